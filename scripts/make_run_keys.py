"""Writes foundry_moe/launch/run_keys.json: what a run's YAML may hold, by Composer's and LLM Foundry's own signatures.

`foundry-moe check` reads that table, because importing both takes ten seconds. A test compares it with what is
installed. Run it after an update of either:

    python scripts/make_run_keys.py
"""

from __future__ import annotations

import inspect
import json
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Any

TABLE = Path(__file__).parents[1] / "foundry_moe" / "launch" / "run_keys.json"
REGISTRIES = ("models", "optimizers", "schedulers", "algorithms", "callbacks", "loggers", "dataloaders")
NAMES = ("norms", "ffns", "fcs", "attention_classes", "attention_implementations", "param_init_fns")
KINDS = {int: "int", float: "float", str: "str", bool: "bool", type(None): "null"}
# keys of a registered name that its constructor does not have
EXTRA = {
    "models": {"name": "str", "master_weights_dtype": "str"},
    "optimizers": {"name": "str", "disable_grad": "list|str", "param_groups": "list"},
    "schedulers": {"name": "str"},
    "dataloaders": {"name": "str", "label": "str"},
}
# rules for single values, beside their kind: keys of a run, of registered entries, of an MPT, and of an MPT's parts
RUN_RULES = {
    "global_train_batch_size": ">= 1",
    "seed": ">= 0",
    "device_train_microbatch_size": "> 0 or auto",
    "device_eval_batch_size": "> 0",
    "dist_timeout": "> 0 and at most 1e9",
}
RULES = {
    "models": {"init_device": "of cpu meta mixed"},
    "optimizers": {"lr": ">= 0", "weight_decay": ">= 0", "eps": ">= 0"},
    "dataloaders": {"num_workers": ">= 0"},
    "callbacks": {"sample_tokens": ">= 1"},
    "algorithms": {"clipping_type": "of norm value adaptive", "clipping_threshold": "> 0"},
}
MPT_RULES = {
    **dict.fromkeys(("d_model", "n_heads", "n_layers", "vocab_size", "max_seq_len", "head_dim"), ">= 1"),
    **dict.fromkeys(("resid_pdrop", "emb_pdrop"), "0 to 1"),
    "expansion_ratio": "> 0",
    "norm_type": "in norms",
    "loss_fn": "of torch_crossentropy fused_crossentropy",
}
PART_RULES = {
    "attn_config": {
        "attn_type": "in attention_classes",
        "attn_impl": "in attention_implementations",
        "attn_pdrop": "0 to 1",
        "kv_n_heads": ">= 1",
        "attn_logit_softcapping": "> 0 or null",
    },
    "ffn_config": {"ffn_type": "in ffns"},
    "init_config": {"name": "in param_init_fns"},
}
# given by LLM Foundry, not by a user
GIVEN = {"self", "params", "tokenizer", "device_batch_size", "train_config"}
GIVEN_TO_PARTS = {"d_model", "n_heads", "n_layers", "device", "module", "expansion_ratio", "bias", "act_fn"}
PACKAGE = "foundry_moe"
# LLM Foundry's transform `update_batch_size_info` reads these and fills in those
NEEDED = {"global_train_batch_size", "device_train_microbatch_size"}
COMPUTED = {"device_train_batch_size", "device_train_grad_accum", "device_eval_batch_size", "n_gpus"}


def kinds(annotation: Any) -> list[str]:
    """The YAML values that an annotation takes: int, float, str, bool, null, list, dict, or any."""
    if isinstance(annotation, str):
        return ["any"]
    origin = typing.get_origin(annotation) or annotation
    if origin in (typing.Union, types.UnionType):
        found = {kind for option in typing.get_args(annotation) for kind in kinds(option)}
        return ["any"] if "any" in found else sorted(found)
    if origin in KINDS:
        return [KINDS[origin]]
    if origin in (dict, Mapping):
        return ["dict"]
    if origin in (list, tuple):
        return ["list"]
    return ["any"]


def keys_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The shape of its keyword arguments.

    keys: kinds by name (`int|null`, with a rule `int|null >= 1`), or the shape of a mapping; required: names without a
    default; open: others are taken too.
    """
    owners = function.__mro__ if isinstance(function, type) else (function,)
    found: dict[str, str] = {}
    required: set[str] = set()
    is_open = True
    for index, owner in enumerate(owners):
        target = owner.__dict__.get("__init__") if isinstance(owner, type) else owner
        if target is None or owner is object:
            continue
        target = _unwrapped(target)
        parameters = inspect.signature(target).parameters.values()
        try:
            hints = typing.get_type_hints(target)
        except Exception:  # names that exist for type checkers alone
            hints = {}
        for parameter in parameters:
            keyword = parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
            if not keyword or parameter.name in GIVEN:
                continue
            found.setdefault(parameter.name, "|".join(kinds(hints.get(parameter.name, Any))))
            if parameter.default is parameter.empty and is_open and index == 0:
                required.add(parameter.name)
        is_open = any(p.kind is p.VAR_KEYWORD for p in parameters)
        if not is_open:
            break
    return {"keys": dict(sorted(found.items())), "required": sorted(required), "open": is_open}


def _unwrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    """LLM Foundry's `experimental_class` hides a constructor in the closure of one that takes anything."""
    for cell in getattr(function, "__closure__", None) or ():
        if getattr(cell.cell_contents, "__name__", "") == "__init__":
            return cell.cell_contents
    return function


def of_ours(registry: str) -> list[str]:
    """This package's names."""
    return sorted(e.name for e in entry_points(group=f"llmfoundry_{registry}") if e.value.startswith(f"{PACKAGE}."))


def of_others(registry: str, names: Iterable[str]) -> list[str]:
    """Names that are not this package's: those are checked by its own classes."""
    return sorted(set(names).difference(of_ours(registry)))


def build() -> dict[str, Any]:
    """The table."""
    import llmfoundry  # noqa: F401  registers
    from composer.core.precision import Precision
    from composer.utils import FSDP2Config, FSDPConfig
    from llmfoundry import layers_registry, registry
    from llmfoundry.data.text_data import StreamingTextDataset
    from llmfoundry.models.layers.attention import GroupedQueryAttention
    from llmfoundry.models.layers.ffn import MPTMLP
    from llmfoundry.models.mpt.configuration_mpt import MPTConfig
    from llmfoundry.models.mpt.modeling_mpt import ComposerMPTCausalLM
    from llmfoundry.utils.config_utils import TrainConfig
    from transformers import PretrainedConfig

    from foundry_moe.launch.foundry_keys import REPORTS
    from foundry_moe.registry import DecoupledAdamWFused, Muon

    hints = typing.get_type_hints(TrainConfig)
    run: dict[str, Any] = {item.name: "|".join(kinds(hints[item.name])) for item in fields(TrainConfig)}
    run |= {"eval_loader": "dict|list|null", "icl_tasks": "list|null|str", "eval_gauntlet": "any"}
    required = [item.name for item in fields(TrainConfig) if item.default == "???"]
    fsdp2, fsdp1 = ({f.name for f in fields(c) if f.init} for c in (FSDP2Config, FSDPConfig))
    run |= {key: "|".join(kind for kind in run[key].split("|") if kind != "null") for key in NEEDED}
    add_rules(run, {**RUN_RULES, "precision": f"of {' '.join(item.value for item in Precision)}"})
    run["fsdp_config"] = shape_of(name for name in fsdp1 | fsdp2 if not name.startswith("_"))
    default = MPTConfig()
    entries: dict[str, Any] = {}
    for name in REGISTRIES:
        known = getattr(registry, name).get_all()
        entries[name] = {key: keys_of(known[key]) for key in of_others(name, known)}
    entries["callbacks"] |= {key: keys_of(v) for key, v in registry.callbacks_with_config.get_all().items()}
    # of ours, those that are their own signature; the others are checked by `MoEConfig` and its like
    entries["callbacks"] |= {key: keys_of(registry.callbacks.get(key)) for key in REPORTS}
    entries["optimizers"] |= {"decoupled_adamw_fused": keys_of(DecoupledAdamWFused), "muon": keys_of(Muon)}
    del entries["optimizers"]["muon"]["keys"]["model"]
    init_keys = {key for fn in layers_registry.param_init_fns.get_all().values() for key in keys_of(fn)["keys"]}
    mpt = {
        **dict.fromkeys((key for key in PretrainedConfig().to_dict() if key.endswith("_token_id")), "any"),
        **keys_of(MPTConfig)["keys"],
        # the class under it takes more, which this one gives it
        **keys_of(ComposerMPTCausalLM.__init__)["keys"],
    }
    add_rules(mpt, MPT_RULES)
    parts = {
        "attn_config": {*default.attn_config, *keys_of(GroupedQueryAttention)["keys"]},
        "ffn_config": {*default.ffn_config, "ffn_act_fn", *keys_of(MPTMLP)["keys"]},
        "init_config": {*default.init_config, *init_keys},
    }
    for key, names in parts.items():
        mpt[key] = shape_of(names - GIVEN_TO_PARTS)
        add_rules(mpt[key]["keys"], PART_RULES[key])
    entries["models"]["mpt_causal_lm"] = {"keys": mpt, "required": [], "open": False}
    streaming = {*keys_of(StreamingTextDataset)["keys"], "streams", "eos_token_id", "bos_token_id"}
    for name, names in {"text": streaming, "finetuning": finetuning_dataset()}.items():
        entries["dataloaders"][name]["keys"]["dataset"] = shape_of(names)
    for name, keys in EXTRA.items():
        for entry in entries[name].values():
            entry["keys"] |= keys
    for name, rules in RULES.items():
        for entry in entries[name].values():
            add_rules(entry["keys"], rules)
    return {
        "versions": {name: version(name) for name in ("mosaicml", "llm-foundry")},
        "run": {"keys": run, "required": sorted({*required, *NEEDED} - COMPUTED), "open": True},
        "registries": entries,
        "ours": {name: of_ours(name) for name in (*REGISTRIES, *NAMES)},
        "names": {name: of_others(name, getattr(layers_registry, name).get_all()) for name in NAMES},
    }


def shape_of(names: Iterable[str]) -> dict[str, Any]:
    """The shape of a mapping with these keys."""
    return {"keys": dict.fromkeys(sorted(names), "any"), "required": [], "open": False}


def add_rules(keys: dict[str, Any], rules: Mapping[str, str]) -> None:
    """Appends rules to the kinds of the keys that are there."""
    for key in keys.keys() & rules.keys():
        keys[key] = f"{keys[key]} {rules[key]}"


def finetuning_dataset() -> set[str]:
    """Keys of a `finetuning` loader's dataset: those of either source of examples, and the loader's own."""
    from llmfoundry.data.finetuning import dataloader
    from llmfoundry.data.finetuning.tasks import StreamingFinetuningDataset, dataset_constructor

    given = {"tokenizer", "dataset_name", "mapping_fn", "batch_size", "allowed_dataset_keys", "kwargs"}
    found = {*dataloader._ALLOWED_DATASET_KEYS, "replication", "hf_name"}
    for function in (StreamingFinetuningDataset, dataset_constructor.build_from_hf, dataloader._validate_config):
        found |= set(keys_of(function)["keys"])
    return found - given


def main() -> None:
    """Writes the table."""
    TABLE.write_text(json.dumps(build(), indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
