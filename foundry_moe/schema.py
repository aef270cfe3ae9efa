"""Reads a user's mappings strictly: into frozen dataclasses, with one sentence for what does not fit.

This module imports neither torch nor Composer.
"""

from __future__ import annotations

import difflib
import inspect
import math
import re
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields
from typing import Any, Literal, TypeVar, Union

T = TypeVar("T")


def nearest(word: object, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the nearest known name, or a list of the known names."""
    known = sorted(known)
    match = difflib.get_close_matches(str(word), known, n=1)
    return f"did you mean {match[0]!r}?" if match else f"known: {', '.join(known)}"


def one_of(where: str, value: object, known: Iterable[str]) -> None:
    """Raises ValueError unless `value` is one of `known`."""
    known = list(known)
    if value not in known:
        match = difflib.get_close_matches(str(value), known, n=1)
        meant = f"; did you mean {match[0]!r}?" if match else ""
        raise ValueError(f"{where}: {value!r} is not one of {', '.join(known)}{meant}")


def section(run: Mapping[str, Any], *path: str) -> Mapping[str, Any]:
    """A mapping inside a run's YAML, such as `model` or `model.attn_config`; empty where it is not there, or null.

    Raises:
        ValueError: the value is no mapping.
    """
    inner: Any = run
    for depth, key in enumerate(path, 1):
        inner = inner.get(key)
        if inner is None:
            return {}
        if not isinstance(inner, Mapping):
            raise ValueError(f"{'.'.join(path[:depth])} must be a mapping of keys to values, not {inner!r}")
    return inner


def refuse_unknown(unknown: Iterable[str], known: Iterable[str], where: str) -> None:
    """Raises ValueError for the first of `unknown`, keys that a user wrote and `where` does not have."""
    for key in unknown:
        raise ValueError(f"{where}.{key} is not a key of {where}; {nearest(key, known)}")


def form(text: str) -> dict[str, str]:
    """Metadata of a dataclass field: describes its valid values in errors, where the type is not enough."""
    return {"form": text}


def fits(value: Any, annotation: Any) -> bool:
    """Whether a YAML value fits a field's annotation; only the forms used in this project are read."""
    origin = typing.get_origin(annotation)
    if annotation is Any:
        return True
    if origin in (Union, types.UnionType):
        return any(fits(value, option) for option in typing.get_args(annotation))
    if origin is Literal:
        return value in typing.get_args(annotation)
    if origin is tuple or origin is list:
        return isinstance(value, list | tuple) and all(fits(v, typing.get_args(annotation)[0]) for v in value)
    if origin in (dict, Mapping) or annotation in (dict, Mapping):
        return isinstance(value, Mapping)
    if annotation is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if annotation is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if annotation is type(None):
        return value is None
    return isinstance(value, annotation) if isinstance(annotation, type) else True


def _plain(annotation: Any) -> str:
    """An annotation in plain words."""
    names = {
        "int": "a whole number",
        "float": "a number",
        "str": "text",
        "bool": "true or false",
        "dict": "a mapping",
        "NoneType": "null",
    }
    if typing.get_origin(annotation) in (Union, types.UnionType):
        return " or ".join(_plain(option) for option in typing.get_args(annotation))
    if typing.get_origin(annotation) is Literal:
        return " or ".join(str(v) for v in typing.get_args(annotation))
    if typing.get_origin(annotation) in (tuple, list):
        return "a list"
    if typing.get_origin(annotation) in (dict, Mapping):
        return "a mapping"
    name = getattr(annotation, "__name__", str(annotation))
    return names.get(name, name)


def from_mapping(cls: type[T], mapping: Mapping[str, Any] | None, where: str) -> T:
    """Builds a frozen dataclass from a user's mapping, strictly.

    Args:
        cls: a keyword-only dataclass; its `__post_init__` checks values and may raise ValueError. A class variable
            `REMOVED` maps keys of earlier versions to the reason and what to do.
        mapping: the user's keys. None is an empty mapping.
        where: how the user knows this place, for example `algorithms.dmoe`.

    Raises:
        ValueError: an unknown key (the nearest known one is named) or a removed one, a missing key, or a value of
            another type.
    """
    if mapping is None:
        mapping = {}
    if not isinstance(mapping, Mapping):
        raise ValueError(f"{where} must be a mapping of keys to values, not {mapping!r}")
    known = {f.name: f for f in fields(cls) if f.init}  # type: ignore[arg-type]
    for key, reason in getattr(cls, "REMOVED", {}).items():
        if key in mapping:
            raise ValueError(f"{where}.{key} was removed: {reason}")
    hints = typing.get_type_hints(cls)
    refuse_unknown([key for key in mapping if key not in known], known, where)
    forms = {name: f.metadata.get("form") or _plain(hints[name]) for name, f in known.items()}
    for key, value in mapping.items():
        if not fits(value, hints[key]):
            raise ValueError(f"{where}.{key} must be {forms[key]}, not {value!r}")
    for name, f in known.items():
        if name not in mapping and f.default is MISSING and f.default_factory is MISSING:
            raise ValueError(f"{where}.{name} is missing: give it {forms[name]}")
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in mapping.items()}
    try:
        return cls(**values)
    except ValueError as error:
        named = str(error).startswith(f"{where}.")
        raise ValueError(str(error) if named else f"{where}: {error}") from None


_AS_YAML = {None: "null", True: "true", False: "false"}
_KEY_HELP = re.compile(r"^(\w+(?:, \w+)*): ")


def key_help(cls: type) -> str:
    """What a dataclass of user's keys says of each in its docstring, a line for each key, with its default."""
    defaults = {}
    for item in fields(cls):  # type: ignore[arg-type]
        given = item.default if item.default_factory is MISSING else item.default_factory()
        if isinstance(given, bool | None):
            given = _AS_YAML[given]
        defaults[item.name] = "needed" if given is MISSING else given
    lines: list[str] = []
    inside = False
    for line in inspect.getdoc(cls).splitlines():  # type: ignore[union-attr]
        found = _KEY_HELP.match(line)
        if found and found.group(1) in defaults:
            lines.append(f"{found.group(1)} ({defaults[found.group(1)]}): {line[found.end() :]}")
            inside = True
        elif inside and line.startswith(" "):
            lines[-1] += f" {line.strip()}"
        else:
            inside = False
    return "\n".join(lines)


def with_keys(text: str | None, cls: type) -> str:
    """A docstring with the keys of `cls` under it, for `llmfoundry registry find`."""
    return f"{inspect.cleandoc(text or '')}\n\nKeys, with their defaults:\n\n{key_help(cls)}"


def yaml_value(value: Any) -> str:
    """A value as YAML writes it, for messages."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
