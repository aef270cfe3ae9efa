"""Compares the model and the training of a run with those of the checkpoint that it resumes from.

A model with another `n_heads` or `norm_type` has tensors of the same shapes and computes something else: its checkpoint
is refused. Another learning rate or batch size is allowed and logged. Both descriptions are flat mappings of dotted
keys to plain data, stored in a checkpoint's `info` and in the state of the algorithm `dmoe_steps`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence, Sized
from dataclasses import asdict, fields
from typing import Any

import torch
from composer.core import State, Time
from composer.optim import ComposerScheduler
from composer.utils import dist
from transformers import PretrainedConfig

from foundry_moe.checkpoint.errors import printable, without_secrets
from foundry_moe.config import MoEConfig
from foundry_moe.layers.lookup import moe_layers
from foundry_moe.layers.moe import MoELayer
from foundry_moe.schema import UserError, yaml_value

# the only key of every Hugging Face configuration that changes what the model computes; the others are for generation
_COMPUTES = ("tie_word_embeddings",)
# keys of a model for initial weights, and for the choice between implementations of one formula
_NEUTRAL = ("init_device", "init_config", "initializer_range", "attn_impl", "fc_type", "use_cache", "loss_fn")
# parts of keys that change the training only
_TRAINS = (
    "drop",  # attn_pdrop, attention_dropout, resid_pdrop and the like
    "embedding_fraction",
    "max_seq_len",
    "max_position_embeddings",
    "router_aux_loss_coef",
    "output_router_logits",
    "router_jitter_noise",
)
# keys of `model.peft_config` for initial weights and for loading; `lora_dropout` is one of _TRAINS, others must agree
_NEUTRAL_PEFT = (
    *("init_lora_weights", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "inference_mode"),
    *("base_model_name_or_path", "revision", "auto_mapping", "peft_type", "peft_version", "task_type"),
    *("runtime_config", "megatron_config", "megatron_core"),
)
_SAME_NORM = ("low_precision_", "triton_")  # layernorm and low_precision_layernorm are one formula

# The keys of MoEConfig at a resume. Of a gate's own keys those in `Gate.MAY_CHANGE` may change, the others must agree.
MUST_AGREE = frozenset(
    {
        *("num_experts", "top_k", "layers", "gate", "expert_hidden_size", "activation", "bias"),
        *("shared_expert_hidden_size", "shared_expert_gate"),
        *("lora.r", "lora.alpha", "lora.rslora", "lora.targets"),
    }
)
MAY_CHANGE = frozenset({"loss", "balance_over", "freeze", "capacity", "drop", "lora.dropout", "seed"})  # with a line
NO_EFFECT = frozenset({"init", "init_std", "backend", "memory", "mesh", "lora.start"})


def describe_model(model: torch.nn.Module) -> dict[str, Any]:
    """The keys of its configuration that decide what the model computes; empty for a model without a configuration."""
    return {key: value for key, value in _configuration(model).items() if not _trains(key)}


def describe_training(state: State) -> dict[str, Any]:
    """Optimizer, schedules, training keys of experts, data, batch size, precision, dropout and seed of the run."""
    found = {key: value for key, value in _configuration(state.model).items() if _trains(key)}
    found["precision"] = str(getattr(state.precision, "value", state.precision))
    size = getattr(state.train_dataloader, "batch_size", None)
    if isinstance(size, int | float):
        found["global_train_batch_size"] = size * dist.get_world_size()
    found |= {**_trains_experts(state.model), **_data(state.train_dataloader), **_schedules(state)}
    if (seed := getattr(state, "rank_zero_seed", None)) is not None:
        found["seed"] = seed
    for optimizer in state.optimizers or ():
        found["optimizer"] = type(optimizer).__name__
        for index, group in enumerate(optimizer.param_groups):
            where = f"optimizer.param_groups.{index - 1}" if index else "optimizer"
            # the scheduler changes `lr`; the YAML has the initial one
            values = {**group, "lr": group.get("initial_lr", group.get("lr"))}
            found |= {f"{where}.{key}": _plain(values[key]) for key in optimizer.defaults if key in values}
    return found


def describe_experts(layers: Sequence[MoELayer]) -> dict[str, Any]:
    """The keys of `MUST_AGREE`. Layers differ in their index only."""
    config, gate = layers[0].config, layers[0].gate
    found = {key: value for key, value in _keys_of(config).items() if key in MUST_AGREE}
    found["layers"] = [layer.layer_index for layer in layers]
    found["bias"] = config.bias is True
    found["gate.name"] = found.pop("gate")["name"]
    if gate.CHOOSES_BY_SEED:
        found["seed"] = config.seed
    own = {f"gate.{key}": value for key, value in asdict(gate.config).items() if key not in gate.MAY_CHANGE}
    return {key: list(value) if isinstance(value, tuple) else value for key, value in {**found, **own}.items()}


def _trains_experts(model: torch.nn.Module) -> dict[str, Any]:
    """The keys of `MAY_CHANGE`."""
    layers = moe_layers(model)
    if not layers:
        return {}
    config, gate = layers[0].config, layers[0].gate
    found = {key: value for key, value in _keys_of(config).items() if key in MAY_CHANGE}
    del found["loss"]
    weights = layers[0].loss_weights
    found |= {f"loss.{name}": weights.get(name, 0.0) for name in sorted({*gate.LOSSES, *weights})}
    found |= {f"gate.{key}": value for key, value in asdict(gate.config).items() if key in gate.MAY_CHANGE}
    return {f"moe.{key}": _plain(value) for key, value in found.items()}


def _keys_of(config: MoEConfig) -> dict[str, Any]:
    """The keys with their values, those of `lora` as `lora.r` and so on."""
    found = {key.name: getattr(config, key.name) for key in fields(config)}
    lora = config.lora_config
    del found["lora"]
    if lora is not None:
        found |= {f"lora.{key.name}": getattr(lora, key.name) for key in fields(lora)}
        found["lora.targets"] = lora.targets_of(config.activation)
    return found


def _data(loader: Any) -> dict[str, Any]:
    """The number of samples, and the keys of a streaming dataset that decide which are read, and in which order."""
    dataset, where = getattr(loader, "dataset", None), "train_loader.dataset"
    streams = getattr(dataset, "streams", None) or ()
    found: dict[str, Any] = {f"{where}.samples": len(dataset)} if not streams and isinstance(dataset, Sized) else {}
    for key in ("local", "remote", "split") if streams else ():
        values = sorted({str(value) for stream in streams if (value := getattr(stream, key, None)) is not None})
        found[f"{where}.{key}"] = printable(without_secrets(", ".join(values)))
    for key in ("epoch_size", "shuffle", "shuffle_seed", "shuffle_algo"):
        if streams and hasattr(dataset, key):
            found[f"{where}.{key}"] = _plain(getattr(dataset, key))
    return found


def _schedules(state: State) -> dict[str, Any]:
    """The learning rate's schedules, by their plain attributes."""
    found: dict[str, Any] = {}
    for number, scheduler in enumerate(getattr(state, "schedulers", None) or ()):
        where = f"schedulers.{number}" if number else "scheduler"
        # Composer 0.32 keeps its scheduler only in the closure of the function that it gives to LambdaLR
        cells = [cell for fn in getattr(scheduler, "lr_lambdas", ()) for cell in getattr(fn, "__closure__", None) or ()]
        contents = [cell.cell_contents for cell in cells]
        own = next((item for item in contents if ComposerScheduler in type(item).__mro__), None)
        found[where] = type(scheduler if own is None else own).__name__
        for key, value in ({} if own is None else vars(own)).items():
            if value is None or isinstance(value, bool | int | float | str | Time):
                found[f"{where}.{key}"] = _plain(value)
    if any(str(value).endswith("dur") for value in found.values()):
        found["max_duration"] = _plain(getattr(state, "max_duration", None))  # the schedule's length
    return found


def check_model(here: Mapping[str, Any], there: object, where: str = "model") -> None:
    """Compares the keys that two descriptions of models have in common.

    Args:
        there: from a checkpoint, so it is not trusted.
        where: prefix of the keys in the error.

    Raises:
        ValueError: they differ; names the key and both values.
    """
    for key, value in _differences(here, there).items():
        raise UserError(
            f"{where}.{key} ({yaml_value(here[key])}): the checkpoint was trained with {yaml_value(value)}, and its "
            f"weights would compute something else; use {yaml_value(value)}, or give this run another folder"
        )


def training_changes(asked: Mapping[str, Any], there: object, holds: Mapping[str, Any] | None = None) -> list[str]:
    """A sentence for each difference in how two runs are trained.

    Args:
        asked, there: `describe_training` of this run and of the checkpoint.
        holds: of this run after loading, since the optimizer's state contains the checkpoint's learning rate.
    """
    holds = asked if holds is None else holds
    return [
        f"{key}: this run sets {yaml_value(asked[key])}, the checkpoint was trained with {yaml_value(value)}, and "
        f"{yaml_value(holds.get(key))} is used"
        for key, value in _differences(asked, there).items()
    ]


def _differences(here: Mapping[str, Any], there: object) -> dict[str, Any]:
    """The checkpoint's values of the keys in which it differs, with texts as `_plain` has them."""
    common = {key: there[key] for key in here if key in there} if isinstance(there, Mapping) else {}
    shown = {key: printable(value) if isinstance(value, str) else value for key, value in common.items()}
    return {key: value for key, value in shown.items() if value != here[key]}


def _configuration(model: torch.nn.Module) -> dict[str, Any]:
    model = getattr(model, "module", model)
    config = getattr(model, "config", None)
    if not isinstance(config, PretrainedConfig):
        return {}
    ignored = {*PretrainedConfig().to_dict(), *_NEUTRAL} - set(_COMPUTES)
    found = _flat(config.to_dict(), ignored)
    for name, adapter in (getattr(getattr(model, "model", None), "peft_config", None) or {}).items():
        where = "peft_config" if name == "default" else f"peft_config.{name}"
        for key, value in adapter.to_dict().items():
            if key not in _NEUTRAL_PEFT:
                found[f"{where}.{key}"] = _plain(sorted(value) if isinstance(value, set) else value)
    return found


def _flat(mapping: Mapping[str, Any], ignored: set[str], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in mapping.items():
        if key in ignored or key.startswith("_"):
            continue
        if isinstance(value, Mapping):
            found |= _flat(value, ignored, f"{prefix}{key}.")
        elif key == "norm_type":
            for spelling in _SAME_NORM:
                value = str(value).removeprefix(spelling)
            found[prefix + key] = value
        else:
            found[prefix + key] = _plain(value)
    return found


def _trains(key: str) -> bool:
    return any(word in key.rpartition(".")[2] for word in _TRAINS)


def _plain(value: Any) -> Any:
    """The value as JSON data; control characters are removed from texts, which are compared and shown."""
    if isinstance(value, Time):
        value = value.to_timestring()
    if isinstance(value, str):
        return printable(value)
    return value if value is None or isinstance(value, bool | int | float) else json.dumps(value, default=str)
