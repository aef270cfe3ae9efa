"""Reads untrusted data with limits: JSON, compressed bytes, numbers and texts.

All functions raise DamagedError for invalid data. Memory is proportional to the size of the input, so that a small file
cannot exhaust it. This module does not depend on manifests or records.
"""

from __future__ import annotations

import json
import math
import re
import reprlib
import zlib
from collections.abc import Iterable
from typing import Any, NoReturn

import numpy as np

from foundry_moe.checkpoint.errors import DamagedError, printable

INFLATED_BYTES = 2**30  # limit of decompressed data
FREE_BYTES = 2**26  # above this, the compression ratio is limited, too
RATIO = 64  # half of a block's description is its hash, which does not compress
JSON_DEPTH = 200  # far below Python's recursion limit of 1000
JSON_NODES = 2**25  # values: about 60 bytes each in memory, ten for each block of a tensor
SHOWN = 60  # characters of untrusted text in a message
DIMS = 64  # as many as PyTorch has
ITEM_BYTES = {  # by dtype of a checkpoint
    **dict.fromkeys(("complex128",), 16),
    **dict.fromkeys(("float64", "complex64", "int64", "uint64"), 8),
    **dict.fromkeys(("float32", "int32", "uint32"), 4),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    **dict.fromkeys(("bool", "int8", "uint8"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
}
MOST = 2**50  # of bytes, elements, steps: a petabyte; sums stay far below 2^63


def shown(value: Any) -> str:
    """An untrusted value for a message: escaped and shortened."""
    if isinstance(value, int) and abs(value) >= 10**SHOWN:
        return "a huge integer"
    # reprlib limits depth and length: repr of nested tuples with shared parts takes exponential time
    text = ascii(value) if isinstance(value, str | bytes | int | float) else printable(reprlib.repr(value))
    return text if len(text) <= SHOWN else text[:SHOWN] + "..."


def fail(where: str, value: Any, should: str) -> NoReturn:
    """Raises DamagedError with the value found and the one expected."""
    raise DamagedError(f"{where} is {shown(value)}, not {should}")


def most_inflated(compressed_bytes: int) -> int:
    """Limit of decompressed bytes for this many compressed ones; writers observe it too."""
    return min(INFLATED_BYTES, max(FREE_BYTES, RATIO * compressed_bytes))


def inflate(raw: bytes | memoryview, where: str, most: int | None = None) -> bytes:
    """Decompresses zlib data of at most `most` bytes, by default `most_inflated`."""
    limit = most_inflated(len(raw)) if most is None else min(most, most_inflated(len(raw)))
    worker = zlib.decompressobj()
    try:
        out = worker.decompress(raw, limit + 1)
    except zlib.error as error:
        raise DamagedError(f"{where} cannot be decompressed: {error}") from error
    if len(out) > limit:
        raise DamagedError(f"{where}: {len(raw)} compressed bytes become more than {limit}")
    if not worker.eof or worker.unused_data:
        raise DamagedError(f"{where} is incomplete or has trailing bytes")
    return out


def parse_json(raw: bytes, where: str) -> Any:
    """Parses JSON in UTF-8 with a limited number of values. `check_depth` limits the depth of parts."""
    if sum(raw.count(mark) for mark in (b",", b"[", b"{")) > JSON_NODES:
        raise DamagedError(f"{where} has more than {JSON_NODES} values")
    try:
        return json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deep" if isinstance(error, RecursionError) else error
        raise DamagedError(f"{where} cannot be read: {reason}") from error


def check_depth(value: Any, where: str, most: int = JSON_DEPTH) -> None:
    """Raises DamagedError if lists and dictionaries are nested deeper than `most`."""
    level = [value]
    for _ in range(most):
        inner = (item.values() if type(item) is dict else item for item in level if type(item) in (dict, list))
        level = [item for items in inner for item in items if type(item) in (dict, list)]
        if not level:
            return
    raise DamagedError(f"{where} is nested deeper than {most}")


def integer(value: Any, where: str, *, least: int = 0, most: int = MOST) -> int:
    """An int in range, not a bool."""
    if type(value) is not int or not least <= value <= most:
        fail(where, value, f"an integer from {least} to {most}")
    return value


def text(value: Any, where: str, pattern: re.Pattern[str] | None = None, *, most: int = 4096) -> str:
    """A printable text that matches `pattern` in full."""
    if type(value) is not str or len(value) > most or not value.isprintable():
        fail(where, value, f"a printable text of at most {most} characters")
    if pattern is not None and pattern.fullmatch(value) is None:
        fail(where, value, f"of the form {pattern.pattern}")
    return value


def mapping(value: Any, where: str, keys: Iterable[str] = ()) -> dict[str, Any]:
    """A JSON object with at least these keys."""
    if type(value) is not dict:
        fail(where, value, "a JSON object")
    missing = [key for key in keys if key not in value]
    if missing:
        raise DamagedError(f"{where} lacks {', '.join(missing)}")
    return value


def sequence(value: Any, where: str, count: int | None = None) -> list[Any]:
    """A JSON list, of `count` values if given."""
    if type(value) is not list or (count is not None and len(value) != count):
        fail(where, value, "a list" if count is None else f"a list of {count}")
    return value


def shape(value: Any, where: str, itemsize: int = 1) -> tuple[int, ...]:
    """A tensor's shape, of at most `DIMS` dimensions and `MOST` bytes."""
    sizes = tuple(integer(size, f"a dimension of {where}") for size in sequence(value, where))
    if len(sizes) > DIMS or math.prod(max(size, 1) for size in sizes) * itemsize > MOST:
        fail(where, value, f"one of at most {DIMS} dimensions and {MOST} bytes")
    return sizes


def integers(value: Any, where: str, count: int) -> np.ndarray:
    """A list of `count` integers from 0 to `MOST`, as int64."""
    numbers = sequence(value, where, count)
    if not numbers:
        return np.empty(0, dtype=np.int64)
    try:
        array = np.array(numbers)  # without a dtype, which would convert texts and fractions
    except (ValueError, OverflowError) as error:
        raise DamagedError(f"{where} is not a list of integers") from error
    if array.dtype != np.int64 or array.ndim != 1:
        raise DamagedError(f"{where} is not a list of integers")
    if array.min() < 0 or array.max() > MOST:
        raise DamagedError(f"{where} holds integers that are not from 0 to {MOST}")
    return array


def clean(value: Any) -> Any:
    """Escapes unprintable characters in all texts and keys, so that they cannot control a terminal. Values keep line
    breaks and tabs, because exports write them to a model's configuration."""
    if isinstance(value, str):
        return re.sub(r"[^\n\t]+", lambda found: printable(found[0]), value)
    if isinstance(value, dict):
        return {printable(key): clean(item) for key, item in value.items()}
    return [clean(item) for item in value] if isinstance(value, list) else value
