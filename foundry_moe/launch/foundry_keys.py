"""Checks a run's keys against those of Composer and LLM Foundry without importing them, which takes ten seconds.

Their signatures, and rules for single values, are in run_keys.json, which scripts/make_run_keys.py writes; names of
other packages are read from their entry points, which are not loaded. `run_values` checks values that depend on others.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from foundry_moe.schema import KINDS, UserError, caught, fits, nearest, one_of, refuse_unknown, section, yaml_value

MPT_VOCABULARY = 50368  # LLM Foundry's default of `vocab_size`
_GROUPS = {"callbacks": ("callbacks", "callbacks_with_config")}
REPORTS = ("expert_load", "run_report")  # callbacks of this package that `schema.checks_keys` checks
_KINDS = {**KINDS, "list": "a list", "dict": "a mapping of keys to values", "null": "null"}
MPTS = ("mpt_causal_lm", "dmoe_causal_lm")
# sections whose `name` is an entry of a registry, and sections whose keys are entries of the registry of that name
_NAMED = {
    "model": "models",
    "optimizer": "optimizers",
    "scheduler": "schedulers",
    "train_loader": "dataloaders",
    "eval_loader": "dataloaders",
}
_OF_ENTRIES = ("algorithms", "callbacks", "loggers")


_DMOE_KEYS = {  # of dmoe_causal_lm, beside those of mpt_causal_lm
    "moe": "dict|null",
    "loss_fn": "str of auto fused_linear_crossentropy torch_crossentropy fused_crossentropy",
}


@cache
def table() -> Mapping[str, Any]:
    """The contents of run_keys.json, and the keys of dmoe_causal_lm."""
    found = json.loads(Path(__file__).with_name("run_keys.json").read_text())
    models = found["registries"]["models"]
    mpt = models["mpt_causal_lm"]
    models["dmoe_causal_lm"] = {**mpt, "keys": {**mpt["keys"], **_DMOE_KEYS}}
    return found


def key_mistakes(run: Mapping[str, Any], *, rules: bool = False, skipped: Sequence[str] = ()) -> Iterator[str]:
    """A sentence for each key of a run that is unknown, missing, or whose value has the wrong type.

    Args:
        rules: check each value by the rule for it too, where keys and kinds are right.
        skipped: paths of keys that are not checked.
    """
    shape = table()["run"]
    for key in run:
        if key not in shape["keys"]:
            meant = nearest(key, shape["keys"])
            yield f"{key} is not a key of a run; {meant}; keys of your own go under `variables`"
    walk = _Walk(rules=rules, foreign=bool(run.get("code_paths")), skipped=skipped)
    yield from walk.shape("", {key: value for key, value in run.items() if key not in _OF_ENTRIES}, shape)
    for key, registry in _NAMED.items():
        several = isinstance(run.get(key), list)  # evaluation sets
        found = {f"{key}.{i}": item for i, item in enumerate(run[key])} if several else {key: run.get(key)}
        for where, settings in found.items():
            name = settings.get("name") if isinstance(settings, Mapping) else None
            if isinstance(name, str):
                yield from walk.entry(where, name, settings, registry)
            elif isinstance(settings, Mapping):
                yield f"{where}.name ({name!r}) must name one of {', '.join(known_names(registry))}"
            elif several:
                yield f"{where} must be a mapping of keys to values, not {settings!r}"
    for key in _OF_ENTRIES:
        wrong = caught(section, run, key)  # as `read_moe` says it
        yield from wrong
        for name, settings in {} if wrong else section(run, key).items():
            yield from walk.entry(f"{key}.{name}", str(name), settings, key)
    if isinstance(run.get("optimizer"), Mapping):
        yield from walk.groups(run["optimizer"])


@dataclass(frozen=True, kw_only=True)
class _Walk:
    """foreign: the run imports code of its own, which may register other names. Others: as in `key_mistakes`."""

    foreign: bool
    rules: bool
    skipped: Sequence[str]

    def entry(self, where: str, name: str, settings: Any, registry: str) -> Iterator[str]:
        """Mistakes in a registered name and the keys given to it."""
        shape = table()["registries"][registry].get(name)
        if where in self.skipped:
            return
        if shape is None:
            names = known_names(registry)
            if name not in names and not self.foreign:
                named = where if registry in _OF_ENTRIES else f"{where}.name: {name}"
                yield f"{named} is not registered; {nearest(name, names)}"
        elif settings is not None and not isinstance(settings, Mapping):
            yield f"{where} must be a mapping of keys to values, not {settings!r}"
        else:
            yield from self.shape(where, settings or {}, shape, name)

    def groups(self, optimizer: Mapping[str, Any]) -> Iterator[str]:
        shape = table()["registries"]["optimizers"].get(str(optimizer.get("name")))
        groups = optimizer.get("param_groups")
        for index, group in enumerate(groups if isinstance(groups, list) else ()):
            where = f"optimizer.param_groups.{index}"
            if not isinstance(group, Mapping) or not isinstance(group.get("param_str_match"), str):
                yield f"{where} must be a mapping with param_str_match, a regular expression of names of parameters"
            elif shape is not None:
                yield from self.shape(where, group, {**shape, "keys": {**shape["keys"], "param_str_match": "str"}})

    def shape(self, where: str, settings: Mapping[str, Any], shape: Mapping[str, Any], name: str = "") -> Iterator[str]:
        """Mistakes in the keys of a mapping; of nested mappings too, if their keys are known.

        Args:
            where: "" for the run itself.
            name: of the registered entry that needs the keys.
        """
        keys, prefix = shape["keys"], f"{where}." if where else ""
        if not shape["open"]:
            unknown = [str(key) for key in settings if key not in keys and f"{prefix}{key}" not in self.skipped]
            yield from caught(refuse_unknown, unknown, keys, where)
        for key, value in settings.items():
            known = keys.get(key, "any")
            if f"{prefix}{key}" in self.skipped:
                continue
            if isinstance(known, str):
                # others' signatures are not enforced: null often means the default, if no rule excludes it
                if value is not None or not where or " " in known or where.removeprefix("callbacks.") in REPORTS:
                    yield from self.value(f"{prefix}{key}", value, known)
            elif value is not None and not isinstance(value, Mapping):
                yield f"{prefix}{key} must be {_KINDS['dict']}, not {value!r}"
            elif value:
                # other kinds of FFN have their own keys
                is_open = known["open"] or value.get("ffn_type") not in (None, "mptmlp", "mptglu")
                yield from self.shape(f"{prefix}{key}", value, {**known, "open": is_open})
        for key in shape["required"]:
            if key not in settings:
                yield f"{prefix}{key} is missing: {name or 'a run'} needs it"

    def value(self, where: str, value: Any, known: str) -> Iterator[str]:
        """Mistakes in a value. `known`: its kinds, and the rule for it: `int|float >= 1`."""
        first, _, rule = known.partition(" ")
        kinds = first.split("|")
        if "any" not in kinds and _kind(value) not in kinds and not (_kind(value) == "int" and "float" in kinds):
            wanted = " or ".join(_KINDS[kind] for kind in kinds if kind != "int" or "float" not in kinds)
            yield f"{where} must be {wanted}, not {value!r}"
        elif rule and self.rules and (value is not None or "null" not in kinds):
            yield from caught(self.check_rule, where, value, *rule.split())

    def check_rule(self, where: str, value: Any, sign: str, *rest: str) -> None:
        """Raises ValueError unless the value is `>= 1`, `> 0 or auto`, `0 to 1`, `of A B`, or `in REGISTRY`.

        An upper limit is `> 0 and at most 9`.
        """
        if sign == "of":
            one_of(where, value, rest)
        elif sign == "in":
            if not self.foreign:
                one_of(where, value, known_names(rest[0]))
        elif sign == ">=" and not (fits(value, float) and value >= int(rest[0])):
            raise UserError(f"{where} ({value!r}) must be {rest[0]} or more")
        elif sign == ">" and not (
            yaml_value(value) in rest[1:] or (fits(value, float) and int(rest[0]) < value <= _most(rest))
        ):
            raise UserError(f"{where} ({value!r}) must be a number above {' '.join(rest)}")
        elif sign == "0" and not (fits(value, float) and 0 <= value <= 1):
            raise UserError(f"{where} ({value!r}) must be a probability, from 0 to 1")


def _most(rest: Sequence[str]) -> float:
    return float(rest[-1]) if "most" in rest else float("inf")


@cache
def known_names(registry: str) -> list[str]:
    """All names of a registry: those of LLM Foundry, of this package, and of other packages."""
    names = table()["registries"].get(registry) or table()["names"].get(registry) or ()
    groups = _GROUPS.get(registry, (registry,))
    installed = [name for group in groups for name in installed_names().get(f"llmfoundry_{group}", ())]
    ours = table()["ours"].get(registry, ())  # of a checkout that is not installed
    return sorted({*names, *ours, *installed})


@cache
def installed_names() -> dict[str, list[str]]:
    """The names of all installed entry points, by group."""
    names: dict[str, list[str]] = {}
    for entry in (entry for distribution in distributions() for entry in distribution.entry_points):
        names.setdefault(entry.group, []).append(entry.name)
    return names


def _kind(value: Any) -> str:
    return "null" if value is None else "dict" if isinstance(value, Mapping) else type(value).__name__
