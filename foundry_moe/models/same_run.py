"""Whether a checkpoint is of the model that this run builds, beyond the shapes of its tensors; and trained alike.

Another `n_heads` or `norm_type` fits the same tensors and computes something else: such a checkpoint is refused.
Another learning rate or batch size is a user's right, and said. What is described is plain data in one flat mapping
of dotted keys, kept in a checkpoint's `info` and in the state of the algorithm `dmoe_steps`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from composer.core import State
from composer.utils import dist
from transformers import PretrainedConfig

from foundry_moe.schema import yaml_value

# of what every Hugging Face configuration has, only this says what the model computes; the rest is of generation
_COMPUTES = ("tie_word_embeddings",)
# of a model's own keys: how weights are first drawn, and which of several implementations of one formula runs
_NEUTRAL = ("init_device", "init_config", "initializer_range", "attn_impl", "fc_type", "use_cache", "loss_fn")
_TRAINS = (
    "drop",  # attn_pdrop, attention_dropout, resid_pdrop and the like
    "embedding_fraction",
    "max_seq_len",
    "max_position_embeddings",
    "router_aux_loss_coef",
    "output_router_logits",
    "router_jitter_noise",
)
_SAME_NORM = ("low_precision_", "triton_")  # layernorm and low_precision_layernorm are one formula


def describe_model(model: torch.nn.Module) -> dict[str, Any]:
    """What the model computes, by dotted keys of its configuration; empty for a model that has none."""
    return {key: value for key, value in _configuration(model).items() if not _trains(key)}


def describe_training(state: State) -> dict[str, Any]:
    """How the run is trained, as far as the trainer knows it: optimizer, precision, batch and the model's dropout."""
    found = {key: value for key, value in _configuration(state.model).items() if _trains(key)}
    found["precision"] = str(getattr(state.precision, "value", state.precision))
    size = getattr(state.train_dataloader, "batch_size", None)
    if isinstance(size, int | float):
        found["global_train_batch_size"] = size * dist.get_world_size()
    for optimizer in state.optimizers or ():
        found["optimizer"] = type(optimizer).__name__
        for index, group in enumerate(optimizer.param_groups):
            where = f"optimizer.param_groups.{index - 1}" if index else "optimizer"
            # the scheduler changes `lr`; what the user wrote is the initial one
            values = {**group, "lr": group.get("initial_lr", group.get("lr"))}
            found |= {f"{where}.{key}": _plain(values[key]) for key in optimizer.defaults if key in values}
    return found


def check_model(here: Mapping[str, Any], there: object, where: str = "model") -> None:
    """Compares the keys of two models that both have.

    Args:
        there: from a checkpoint, which may hold anything.
        where: prefix of the keys in the error.

    Raises:
        ValueError: they differ; names the key and both values.
    """
    if not isinstance(there, Mapping):
        return
    for key in here:
        if key in there and here[key] != there[key]:
            raise ValueError(
                f"{where}.{key} ({yaml_value(here[key])}): the checkpoint was trained with {yaml_value(there[key])}, "
                f"and its weights would compute something else; use {yaml_value(there[key])}, or give this run another "
                "folder"
            )


def training_changes(asked: Mapping[str, Any], there: object, holds: Mapping[str, Any] | None = None) -> list[str]:
    """A sentence for each difference in how two runs are trained.

    Args:
        asked, there: what this run's YAML says, and the checkpoint.
        holds: what holds after loading: an optimizer's state brings its own learning rate.
    """
    if not isinstance(there, Mapping):
        return []
    holds = asked if holds is None else holds
    return [
        f"{key}: this run says {yaml_value(asked[key])}, the checkpoint was trained with {yaml_value(there[key])}, and "
        f"{yaml_value(holds.get(key))} holds"
        for key in asked
        if key in there and asked[key] != there[key]
    ]


def _configuration(model: torch.nn.Module) -> dict[str, Any]:
    config = getattr(getattr(model, "module", model), "config", None)
    if not isinstance(config, PretrainedConfig):
        return {}
    ignored = {*PretrainedConfig().to_dict(), *_NEUTRAL} - set(_COMPUTES)
    return _flat(config.to_dict(), ignored)


def _flat(mapping: Mapping[str, Any], ignored: set[str], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in mapping.items():
        if key in ignored or key.startswith("_"):
            continue
        if isinstance(value, Mapping) and value.get("ffn_type") == "dmoe":
            continue  # keys of experts: `describe_experts` has them
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
    return value if value is None or isinstance(value, bool | int | float | str) else json.dumps(value, default=str)
