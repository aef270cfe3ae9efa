"""Checks a run's keys against those of Composer and LLM Foundry without importing them, which takes ten seconds.

Their signatures are in run_keys.json, which scripts/make_run_keys.py writes; names of other packages are read from
their entry points, which are not loaded. `run_values` checks the values.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from foundry_moe.schema import caught, nearest, refuse_unknown, section

# names of this package, for a checkout that is not installed
OURS: Mapping[str, tuple[str, ...]] = {
    "models": ("dmoe_causal_lm",),
    "algorithms": ("dmoe", "dmoe_mesh", "dmoe_steps"),
    "callbacks": ("elastic_checkpoint", "expert_load", "run_report"),
    "optimizers": ("decoupled_adamw_fused",),
    "attention_implementations": ("sdpa",),
}
# names of earlier versions, and what to use
REMOVED = {
    "callbacks.nonfinite_guard": "use elastic_checkpoint.max_nonfinite, or nan_monitor, which checks the loss only"
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


def key_mistakes(run: Mapping[str, Any]) -> Iterator[str]:
    """A sentence for each key of a run that nothing reads, that is missing, or whose value is of another kind."""
    known = table()["run"]
    for key in run:
        if key in ("algorithms", "callbacks", "loggers"):
            yield from caught(section, run, key)
        elif key in known["keys"]:
            yield from _kind_mistake(key, run[key], known["keys"][key])
        else:
            meant = nearest(key, known["keys"])
            yield f"{key} is not a key of a run; {meant}; keys of your own go under `variables`"
    for key in known["required"]:
        if key not in run:
            yield f"{key} is missing: a run needs it"
    foreign = bool(run.get("code_paths"))  # that code may register anything
    loaders = run.get("eval_loader") or []
    named = {
        "model": "models",
        "optimizer": "optimizers",
        "scheduler": "schedulers",
        "train_loader": "dataloaders",
        **({f"eval_loader.{i}": "dataloaders" for i in range(len(loaders))} if isinstance(loaders, list) else {}),
        **({"eval_loader": "dataloaders"} if isinstance(loaders, Mapping) else {}),
    }
    for where, registry in named.items():
        key, _, index = where.partition(".")
        if key in run:
            yield from _named_mistakes(where, run[key][int(index)] if index else run[key], registry, foreign)
    for key in ("algorithms", "callbacks", "loggers"):
        for name, settings in {} if caught(section, run, key) else section(run, key).items():
            yield from _entry_mistakes(f"{key}.{name}", str(name), settings, key, foreign)
    yield from _unknown(run, "fsdp_config", table()["fsdp_config"])
    if isinstance(run.get("optimizer"), Mapping):
        yield from _group_mistakes(run["optimizer"])


def _named_mistakes(where: str, settings: Any, registry: str, foreign: bool) -> Iterator[str]:
    """Mistakes in a section whose `name` is an entry of a registry."""
    name = settings.get("name") if isinstance(settings, Mapping) else None
    if not isinstance(settings, Mapping):
        yield f"{where} must be a mapping of keys to values, not {settings!r}"
    elif not isinstance(name, str):
        yield f"{where}.name ({name!r}) must name one of {', '.join(known_names(registry))}"
    else:
        yield from _entry_mistakes(where, name, settings, registry, foreign, named=True)


def _entry_mistakes(
    where: str, name: str, settings: Any, registry: str, foreign: bool, *, named: bool = False
) -> Iterator[str]:
    """Mistakes in a registered name and the keys given to it.

    Args:
        foreign: the run imports its own code, which may register other names.
        named: the name is a value of the section, not the section's key.
    """
    if where in REMOVED:
        yield f"{where} was removed: {REMOVED[where]}"
        return
    entry = _entry(registry, name)
    if entry is None:
        names = known_names(registry)
        if name not in names and not foreign:
            yield f"{f'{where}.name: {name}' if named else where} is not registered; {nearest(name, names)}"
        return
    if settings is not None and not isinstance(settings, Mapping):
        yield f"{where} must be a mapping of keys to values, not {settings!r}"
        return
    settings = settings or {}
    keys = {**entry["keys"], **(_EXTRA.get(registry, {}) if named else {})}
    if name == "dmoe_causal_lm":
        keys["moe"] = ["dict", "null"]
    if not entry["open"]:
        yield from caught(refuse_unknown, [str(key) for key in settings if key not in keys], keys, where)
    for key, value in settings.items():
        if value is not None:  # Python's signatures are not enforced: null often means the default
            yield from _kind_mistake(f"{where}.{key}", value, keys.get(key, ["any"]))
    for key in entry["required"]:
        if key not in settings:
            yield f"{where}.{key} is missing: {name} needs it"
    if name in MPTS:
        for part in _MPT_PARTS:
            kind = settings[part].get("ffn_type") if isinstance(settings.get(part), Mapping) else None
            if kind in (None, "mptmlp", "mptglu"):  # other kinds of FFN have their own keys
                yield from _unknown(settings, part, table()[part], "model.")
    if registry == "dataloaders" and name in ("text", "finetuning"):
        yield from _unknown(settings, "dataset", table()[f"{name}_dataset"], f"{where}.")


def _unknown(settings: Mapping[str, Any], part: str, known: Iterable[str], prefix: str = "") -> Iterator[str]:
    """Unknown keys of a section, which may be missing; nothing if it is not a mapping, whose kind is checked before."""
    given = settings.get(part)
    if isinstance(given, Mapping):
        yield from caught(refuse_unknown, [str(key) for key in given if key not in known], known, prefix + part)


@cache
def known_names(registry: str) -> list[str]:
    """All names of a registry: those of LLM Foundry, of this package, and of other packages."""
    names = table()["registries"].get(registry) or table()["names"].get(registry) or ()
    groups = _GROUPS.get(registry, (registry,))
    installed = [name for group in groups for name in installed_names().get(f"llmfoundry_{group}", ())]
    return sorted({*names, *OURS.get(registry, ()), *installed})


@cache
def installed_names() -> dict[str, list[str]]:
    """The names of all installed entry points, by group."""
    names: dict[str, list[str]] = {}
    for entry in (entry for distribution in distributions() for entry in distribution.entry_points):
        names.setdefault(entry.group, []).append(entry.name)
    return names


def _kind_mistake(where: str, value: Any, kinds: Iterable[str]) -> Iterator[str]:
    kinds = list(kinds)
    if "any" not in kinds and _kind(value) not in kinds and not (_kind(value) == "int" and "float" in kinds):
        wanted = " or ".join(_KINDS[kind] for kind in kinds if kind != "int" or "float" not in kinds)
        yield f"{where} must be {wanted}, not {value!r}"


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


def _group_mistakes(optimizer: Mapping[str, Any]) -> Iterator[str]:
    entry = _entry("optimizers", str(optimizer.get("name")))
    groups = optimizer.get("param_groups")
    for index, group in enumerate(groups if isinstance(groups, list) else ()):
        where = f"optimizer.param_groups.{index}"
        if not isinstance(group, Mapping) or not isinstance(group.get("param_str_match"), str):
            yield f"{where} must be a mapping with param_str_match, a regular expression of names of parameters"
        elif entry is not None and not entry["open"]:
            known = {**entry["keys"], "param_str_match": ["str"]}
            yield from caught(refuse_unknown, [str(key) for key in group if key not in known], known, where)
            for key, value in group.items():
                yield from _kind_mistake(f"{where}.{key}", value, known.get(key, ["any"]))
