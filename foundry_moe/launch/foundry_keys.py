"""Checks a run's keys against those of Composer and LLM Foundry, which need ten seconds to import.

Their signatures are in run_keys.json, which scripts/make_run_keys.py writes; names that other packages register are
found by their entry points, which are not loaded. Must not know what values mean: see run_values.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from foundry_moe.schema import nearest, refuse_unknown, section

# what this package registers, for a checkout without an installed distribution; False: its own class checks its keys
_OURS: Mapping[str, Mapping[str, bool]] = {
    "models": {"dmoe_causal_lm": True},
    "algorithms": {"dmoe": False, "dmoe_mesh": False, "dmoe_steps": False},
    "callbacks": {"elastic_checkpoint": False},
    "optimizers": {"decoupled_adamw_fused": True},
    "attention_implementations": {"sdpa": True},
    "ffns": {"dmoe": True},
}
_GROUPS = {"callbacks": ("callbacks", "callbacks_with_config")}
_EXTRA = {
    "models": {"name": ["str"], "master_weights_dtype": ["str"]},
    "optimizers": {"name": ["str"], "disable_grad": ["list", "str"], "param_groups": ["list"]},
    "schedulers": {"name": ["str"]},
    "dataloaders": {"name": ["str"], "label": ["str"]},
}
_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "list": "a list",
    "dict": "a mapping of keys to values",
    "null": "null",
}
_MPT_PARTS = ("attn_config", "init_config", "ffn_config")
MPTS = ("mpt_causal_lm", "dmoe_causal_lm")


@cache
def table() -> Mapping[str, Any]:
    """The contents of run_keys.json."""
    return json.loads(Path(__file__).with_name("run_keys.json").read_text())


def check_keys(run: Mapping[str, Any]) -> None:
    """Checks that every key of a run is one that somebody reads, and that its value is of the kind it takes.

    Raises:
        ValueError: names the key, and the nearest one that there is.
    """
    known = table()["run"]
    for key in run:
        if key not in known["keys"]:
            meant = nearest(key, known["keys"])
            raise ValueError(f"{key} is not a key of a run; {meant}; keys of your own go under `variables`")
        check_kind(key, run[key], known["keys"][key])
    for key in known["required"]:
        if key not in run:
            raise ValueError(f"{key} is missing: a run needs it")
    foreign = bool(run.get("code_paths"))  # that code may register anything
    check_named("model", run["model"], "models", foreign)
    check_named("optimizer", run["optimizer"], "optimizers", foreign)
    check_named("scheduler", run["scheduler"], "schedulers", foreign)
    check_named("train_loader", run["train_loader"], "dataloaders", foreign)
    loaders = run.get("eval_loader") or []
    for index, loader in enumerate(loaders if isinstance(loaders, list) else [loaders]):
        check_named(
            f"eval_loader.{index}" if isinstance(loaders, list) else "eval_loader", loader, "dataloaders", foreign
        )
    for key, registry in (("algorithms", "algorithms"), ("callbacks", "callbacks"), ("loggers", "loggers")):
        for name, settings in section(run, key).items():
            check_entry(f"{key}.{name}", str(name), settings, registry, foreign)
    fsdp = table()["fsdp_config"]
    refuse_unknown([str(key) for key in section(run, "fsdp_config") if key not in fsdp], fsdp, "fsdp_config")
    _check_param_groups(run["optimizer"])


def check_named(where: str, settings: Any, registry: str, foreign: bool) -> None:
    """Checks a section that says by `name` which entry of a registry it configures."""
    if not isinstance(settings, Mapping):
        raise ValueError(f"{where} must be a mapping of keys to values, not {settings!r}")
    name = settings.get("name")
    if not isinstance(name, str):
        raise ValueError(f"{where}.name ({name!r}) must name one of {', '.join(known_names(registry))}")
    check_entry(f"{where}", name, settings, registry, foreign, named=True)


def check_entry(where: str, name: str, settings: Any, registry: str, foreign: bool, *, named: bool = False) -> None:
    """Checks a registered name and the keys given to it.

    Args:
        foreign: the run brings code of its own, which may register other names.
        named: the name is a value of the section, and not the section's key.
    """
    entry = _entry(registry, name)
    if entry is None:
        names = known_names(registry)
        if name not in names and not foreign:
            place = f"{where}.name: {name}" if named else where
            raise ValueError(f"{place} is not there; {nearest(name, names)}")
        return
    if settings is not None and not isinstance(settings, Mapping):
        raise ValueError(f"{where} must be a mapping of keys to values, not {settings!r}")
    settings = settings or {}
    keys = {**entry["keys"], **(_EXTRA.get(registry, {}) if named else {})}
    if name == "dmoe_causal_lm":
        keys["moe"] = ["dict", "null"]
    if not entry["open"]:
        refuse_unknown([str(key) for key in settings if key not in keys], keys, where)
    for key, value in settings.items():
        if value is not None:  # Python's signatures are not enforced: null often means the default
            check_kind(f"{where}.{key}", value, keys.get(key, ["any"]))
    for key in entry["required"]:
        if key not in settings:
            raise ValueError(f"{where}.{key} is missing: {name} needs it")
    if name in MPTS:
        _check_mpt_parts(settings)
    if registry == "dataloaders" and name in ("text", "finetuning"):
        dataset = section(settings, "dataset")
        known = table()[f"{name}_dataset"]
        refuse_unknown([str(key) for key in dataset if key not in known], known, f"{where}.dataset")


@cache
def known_names(registry: str) -> list[str]:
    """All names of a registry: LLM Foundry's, ours, and what other packages bring."""
    names = table()["registries"].get(registry) or table()["names"].get(registry) or ()
    groups = _GROUPS.get(registry, (registry,))
    installed = {entry.name for group in groups for entry in entry_points(group=f"llmfoundry_{group}")}
    return sorted({*names, *_OURS.get(registry, ()), *installed})


def check_kind(where: str, value: Any, kinds: Iterable[str]) -> None:
    """Raises ValueError where a value is of none of these kinds."""
    kinds = list(kinds)
    if "any" in kinds or _kind(value) in kinds or (_kind(value) == "int" and "float" in kinds):
        return
    wanted = " or ".join(_KINDS[kind] for kind in kinds if kind != "int" or "float" not in kinds)
    raise ValueError(f"{where} must be {wanted}, not {value!r}")


def _kind(value: Any) -> str:
    for kind, types in (("null", type(None)), ("bool", bool), ("int", int), ("float", float), ("str", str)):
        if isinstance(value, types):
            return kind
    return "dict" if isinstance(value, Mapping) else "list"


def _entry(registry: str, name: str) -> Mapping[str, Any] | None:
    """keys, required and open of a name whose signature is known."""
    entries = table()["registries"][registry]
    if name == "dmoe_causal_lm":
        return entries["mpt_causal_lm"]
    return entries.get(name)


def _check_mpt_parts(model: Mapping[str, Any]) -> None:
    for part in _MPT_PARTS:
        settings = section({"model": model}, "model", part)
        if part == "ffn_config" and settings.get("ffn_type", "mptmlp") not in ("mptmlp", "mptglu"):
            continue  # keys of that kind of FFN
        known = table()[part]
        refuse_unknown([str(key) for key in settings if key not in known], known, f"model.{part}")


def _check_param_groups(optimizer: Mapping[str, Any]) -> None:
    entry = _entry("optimizers", str(optimizer.get("name")))
    for index, group in enumerate(optimizer.get("param_groups") or ()):
        where = f"optimizer.param_groups.{index}"
        if not isinstance(group, Mapping) or not isinstance(group.get("param_str_match"), str):
            raise ValueError(
                f"{where} must be a mapping with param_str_match, the regular expression of names it takes"
            )
        if entry is not None and not entry["open"]:
            known = {**entry["keys"], "param_str_match": ["str"]}
            refuse_unknown([str(key) for key in group if key not in known], known, where)
            for key, value in group.items():
                check_kind(f"{where}.{key}", value, known[key])
