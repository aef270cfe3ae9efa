"""Reads a user's mappings strictly into frozen dataclasses; each mistake is one sentence.

This module imports neither torch nor Composer.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, Union

T = TypeVar("T")
P = ParamSpec("P")
Init = TypeVar("Init", bound=Callable[..., None])


WRAPPERS = re.compile(r"_checkpoint_wrapped_module\.|_orig_mod\.|_fsdp_wrapped_module\.")


def plain_name(name: str) -> str:
    """The name of a module or parameter without the parts that wrappers of recomputation, compilation and DDP add."""
    return WRAPPERS.sub("", re.sub(r"^(module\.)+", "", name))


class UserError(ValueError):
    """A user's mistake: the message is all that the user needs. Commands print any other error with its traceback."""


class MistakesError(UserError):
    """Mistakes of a user, a sentence each."""

    def __init__(self, sentences: Iterable[str]) -> None:
        self.sentences = tuple(dict.fromkeys(sentences))
        super().__init__("; ".join(self.sentences))

    def __reduce__(self) -> tuple[type[MistakesError], tuple[tuple[str, ...]]]:
        return type(self), (self.sentences,)  # ranks exchange errors


def sentences_of(error: ValueError) -> tuple[str, ...]:
    """The mistakes that an error reports."""
    return error.sentences if isinstance(error, MistakesError) else (str(error),)


def raise_mistakes(sentences: Iterable[str]) -> None:
    """Raises MistakesError if there are any sentences."""
    found = list(sentences)
    if found:
        raise MistakesError(found)


def caught(check: Callable[..., object], *arguments: Any) -> tuple[str, ...]:
    """The sentences of the UserError that a check raises; none if it passes."""
    try:
        check(*arguments)
    except UserError as error:
        return sentences_of(error)
    return ()


def shorten(items: Iterable[object], most: int = 3) -> str:
    """The first few of many as text: `a, b, c and 9 more`."""
    items = list(items)
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(map(str, items[:most])) + more


def name_ranks(ranks: Sequence[int], most: int = 8) -> str:
    """`rank 3`, or `ranks 0, 1, 2 and 9 more`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {shorten(ranks, most)}"


def nearest(word: object, known: Iterable[str]) -> str:
    """`did you mean 'x'?` for the nearest known name, or a list of the known names."""
    known = sorted(known)
    match = difflib.get_close_matches(str(word), known, n=1)
    return f"did you mean {match[0]!r}?" if match else f"known: {', '.join(known)}"


def one_of(where: str, value: object, known: Iterable[str]) -> None:
    """Raises UserError unless `value` is one of `known`."""
    known = list(known)
    if value not in known:
        match = difflib.get_close_matches(str(value).lower(), known, n=1)
        meant = f"; did you mean {match[0]!r}?" if match else ""
        raise UserError(f"{where}: {value!r} is not one of {', '.join(known)}{meant}")


def section(run: Mapping[str, Any], *path: str) -> Mapping[str, Any]:
    """A mapping inside a run's YAML, such as `model` or `model.attn_config`; empty if it is missing or null.

    Raises:
        UserError: the value is not a mapping.
    """
    inner: Any = run
    for depth, key in enumerate(path, 1):
        inner = inner.get(key)
        if inner is None:
            return {}
        if not isinstance(inner, Mapping):
            raise UserError(f"{'.'.join(path[:depth])} must be a mapping of keys to values, not {inner!r}")
    return inner


def refuse_unknown(unknown: Iterable[str], known: Iterable[str], where: str) -> None:
    """Raises UserError for `unknown`, keys that a user wrote and `where` does not have."""
    raise_mistakes(f"{where}.{key} is not a key of {where}; {nearest(key, known)}" for key in unknown)


def suggests_keys(cls: type[T]) -> type[T]:
    """Decorates a dataclass: an unknown keyword argument raises a TypeError that names the nearest known one.

    A value of the wrong type raises a TypeError too.
    """
    create: Callable[..., None] = cls.__init__

    @functools.wraps(create)
    def checked(self: T, *arguments: Any, **keys: Any) -> None:
        if wrong := list(_mistakes_of_keys(_forms(cls), typing.get_type_hints(cls), keys, cls.__name__)):
            raise TypeError("; ".join(wrong))
        create(self, *arguments, **{key: tuple(v) if isinstance(v, list) else v for key, v in keys.items()})

    cls.__init__ = checked  # type: ignore[method-assign, assignment]
    return cls


def checks_keys(where: str) -> Callable[[Init], Init]:
    """Decorates an `__init__`: unknown keywords and values of another type raise a UserError, as YAML's do."""

    def decorate(create: Init) -> Init:
        parameters = list(inspect.signature(create).parameters.values())[1:]
        hints = typing.get_type_hints(create)
        forms = {
            item.name: f"text such as {item.default!r}" if item.default and isinstance(item.default, str) else None
            for item in parameters
        }

        @functools.wraps(create)
        def checked(self: Any, *arguments: Any, **keys: Any) -> None:
            given = {**dict(zip(forms, arguments, strict=False)), **keys}
            raise_mistakes(_mistakes_of_keys(forms, hints, given, where))
            create(self, *arguments, **keys)

        return typing.cast(Init, checked)

    return decorate


def takes_keys_of(config: Callable[P, object]) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, P], None]]:
    """Decorates an `__init__(self, **keys)`: type checkers check its keys as those of `config`."""
    return lambda create: create


def _forms(cls: type) -> dict[str, str | None]:
    """By key of a dataclass, its valid values in words where the type does not tell."""
    return {item.name: item.metadata.get("form") for item in fields(cls)}  # type: ignore[arg-type]


def _mistakes_of_keys(
    forms: Mapping[str, str | None], hints: Mapping[str, Any], given: Mapping[str, Any], where: str
) -> Iterator[str]:
    """A sentence for each key that is not one of `forms`, or whose value has another type than `hints` has."""
    for key, value in given.items():
        if key not in forms:
            yield f"{where}.{key} is not a key of {where}; {nearest(key, forms)}"
        elif not fits(value, hints[key]):
            yield f"{where}.{key} must be {forms[key] or _plain(hints[key])}, not {value!r}"


def form(text: str) -> dict[str, str]:
    """Metadata of a dataclass field: describes its valid values in errors, if the type does not."""
    return {"form": text}


def fits(value: Any, annotation: Any) -> bool:
    """Whether a YAML value fits a field's annotation; supports the annotations that this project uses."""
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


# types of YAML's values, in plain words
KINDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "dict": "a mapping",
    "NoneType": "null",
}


def _plain(annotation: Any) -> str:
    """An annotation in plain words."""
    if typing.get_origin(annotation) in (Union, types.UnionType):
        return " or ".join(_plain(option) for option in typing.get_args(annotation))
    if typing.get_origin(annotation) is Literal:
        return " or ".join(str(v) for v in typing.get_args(annotation))
    if typing.get_origin(annotation) in (tuple, list):
        return "a list"
    if typing.get_origin(annotation) in (dict, Mapping):
        return "a mapping"
    name = getattr(annotation, "__name__", str(annotation))
    return KINDS.get(name, name)


def from_mapping(cls: type[T], mapping: Mapping[str, Any] | None, where: str) -> T:
    """Builds a frozen dataclass from a user's mapping, strictly.

    Args:
        cls: a keyword-only dataclass; its `__post_init__` checks values and may raise UserError.
        mapping: the user's keys. None is an empty mapping.
        where: the mapping's place in the run, for example `algorithms.dmoe`.

    Raises:
        UserError: unknown keys (the nearest known ones are named), missing keys, or values of another type; all
            of them in one error. Without any, the mistakes that `cls` finds in its values, in one error.
    """
    if mapping is None:
        mapping = {}
    if not isinstance(mapping, Mapping):
        raise UserError(f"{where} must be a mapping of keys to values, not {mapping!r}")
    known = {item.name: item for item in fields(cls)}  # type: ignore[arg-type]
    hints = typing.get_type_hints(cls)
    forms = _forms(cls)
    missing = [
        name for name, item in known.items() if item.default is item.default_factory is MISSING and name not in mapping
    ]
    mistakes = [f"{where}.{name} is missing: give it {forms[name] or _plain(hints[name])}" for name in missing]
    raise_mistakes([*_mistakes_of_keys(forms, hints, mapping, where), *mistakes])
    values = {key: tuple(v) if isinstance(v, list) else v for key, v in mapping.items()}
    try:
        return cls(**values)
    except UserError as error:
        found = sentences_of(error)
    whole = (with_whole_key(where, text, known) for text in found)
    raise MistakesError(text if text.startswith(f"{where}.") else f"{where}: {text}" for text in whole)


def with_whole_key(where: str, sentence: str, keys: Iterable[str]) -> str:
    """The sentence, with `where` before its first word if that is one of `keys`, or begins with one and a dot."""
    first = re.split(r"[^\w]", sentence, maxsplit=1)[0]
    return f"{where}.{sentence}" if first in keys and not sentence.startswith(f"{where}.") else sentence


def with_keys(config: type) -> Callable[[type[T]], type[T]]:
    """Decorates a class that takes the keys of `config`: its signature, and a docstring with the keys and defaults.

    `help`, completion in a shell and `llmfoundry registry find` show them.
    """

    def decorate(cls: type[T]) -> type[T]:
        defaults = {}
        for item in fields(config):
            given = item.default if item.default_factory is MISSING else item.default_factory()
            if given is not MISSING:
                defaults[item.name] = given
        listed = ", ".join(f"{key} {yaml_value(value)}" for key, value in defaults.items())
        keys = ["Keys:", inspect.getdoc(config) or "", f"Defaults: {listed}"]
        cls.__doc__ = "\n\n".join([inspect.cleandoc(cls.__doc__ or ""), *keys])
        cls.__signature__ = inspect.signature(config)  # type: ignore[attr-defined]
        return cls

    return decorate


def yaml_value(value: Any) -> str:
    """A value as YAML writes it, for messages."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
