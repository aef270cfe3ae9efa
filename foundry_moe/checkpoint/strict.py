"""Reading what somebody else may have written: JSON, compressed bytes and numbers, each with a limit.

Everything here raises DamagedError, with a sentence, for whatever is not as it should be, and costs memory in
proportion to what was given, so that a small file cannot ask for much. It knows nothing of manifests or records.
"""

from __future__ import annotations

import json
import re
import reprlib
import zlib
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import numpy as np

from foundry_moe.checkpoint.errors import DamagedError, printable

INFLATED_BYTES = 2**30  # the most that compressed bytes may become,
FREE_BYTES = 2**26  # and, above this,
RATIO = 64  # the most that each of them may become: half of what describes a block is its hash, which does not shrink
JSON_DEPTH = 200  # far below Python's limit of 1000 calls, however deep in the stack a reader is called
JSON_NODES = 2**25  # numbers, texts, lists: some 60 bytes each once read, ten for each block of a tensor
SHOWN = 60  # characters of a foreign text that a message shows
DIMS = 64  # as many as PyTorch has
ITEM_BYTES = {  # of the dtypes that a checkpoint may hold
    **dict.fromkeys(("complex128",), 16),
    **dict.fromkeys(("float64", "complex64", "int64", "uint64"), 8),
    **dict.fromkeys(("float32", "int32", "uint32"), 4),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    **dict.fromkeys(("bool", "int8", "uint8"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
}
MOST = 2**50  # bytes, elements, steps: a petabyte, and far from where sums of 64-bit integers wrap round


def shown(value: Any) -> str:
    """A foreign value as a message may show it: escaped, so that it cannot move a terminal's cursor, and short."""
    if isinstance(value, int) and abs(value) >= 10**SHOWN:
        return "a huge integer"
    # `reprlib` bounds depth and length: nested tuples that share their parts would take for ever
    text = ascii(value) if isinstance(value, str | bytes | int | float) else printable(reprlib.repr(value))
    return text if len(text) <= SHOWN else text[:SHOWN] + "..."


def fail(where: str, value: Any, should: str) -> NoReturn:
    """Raises DamagedError: what is there and what should be."""
    raise DamagedError(f"{where} is {shown(value)}, not {should}")


def most_inflated(compressed_bytes: int) -> int:
    """How many bytes so many compressed ones may become; writers keep to it too."""
    return min(INFLATED_BYTES, max(FREE_BYTES, RATIO * compressed_bytes))


def inflate(raw: bytes | memoryview, where: str, most: int | None = None) -> bytes:
    """Decompresses zlib's format. `most` is the limit in bytes, by default that of `most_inflated`."""
    limit = most_inflated(len(raw)) if most is None else min(most, most_inflated(len(raw)))
    worker = zlib.decompressobj()
    try:
        out = worker.decompress(raw, limit + 1)
    except zlib.error as error:
        raise DamagedError(f"{where} cannot be decompressed: {error}") from error
    if len(out) > limit:
        raise DamagedError(f"{where}: {len(raw)} compressed bytes become more than {limit}")
    if not worker.eof or worker.unused_data:
        raise DamagedError(f"{where} is cut short or has bytes behind its end")
    return out


def parse_json(raw: bytes, where: str) -> Any:
    """JSON in UTF-8 of bounded size. `check_depth` is for those parts of which a reader walks all."""
    if sum(raw.count(mark) for mark in (b",", b"[", b"{")) > JSON_NODES:
        raise DamagedError(f"{where} has more than {JSON_NODES} values")
    try:
        body = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deep" if isinstance(error, RecursionError) else error
        raise DamagedError(f"{where} cannot be read: {reason}") from error
    return body


def check_depth(value: Any, where: str, most: int = JSON_DEPTH) -> None:
    """Refuses lists and dictionaries nested deeper than `most`."""
    level = [value]
    for _ in range(most):
        inner: list[Any] = []
        for item in level:
            if type(item) is dict:
                inner.extend(v for v in item.values() if type(v) in (dict, list))
            elif type(item) is list:
                inner.extend(v for v in item if type(v) in (dict, list))
        if not inner:
            return
        level = inner
    raise DamagedError(f"{where} is nested deeper than {most}")


def integer(value: Any, where: str, *, least: int = 0, most: int = MOST) -> int:
    """An int in range; a bool is none."""
    if type(value) is not int or not least <= value <= most:
        fail(where, value, f"an integer from {least} to {most}")
    return value


def text(value: Any, where: str, pattern: re.Pattern[str] | None = None, *, most: int = 4096) -> str:
    """A printable text, which `pattern` matches in full."""
    if type(value) is not str or len(value) > most or not value.isprintable():
        fail(where, value, f"a printable text of at most {most} characters")
    if pattern is not None and pattern.fullmatch(value) is None:
        fail(where, value, f"of the form {pattern.pattern}")
    return value


def mapping(value: Any, where: str, keys: Iterable[str] = ()) -> dict[str, Any]:
    """A JSON object that has at least these keys."""
    if type(value) is not dict:
        fail(where, value, "a JSON object")
    missing = [key for key in keys if key not in value]
    if missing:
        raise DamagedError(f"{where} lacks {', '.join(missing)}")
    return value


def sequence(value: Any, where: str, count: int | None = None) -> list[Any]:
    """A JSON list, of `count` values if that is given."""
    if type(value) is not list or (count is not None and len(value) != count):
        fail(where, value, "a list" if count is None else f"a list of {count}")
    return value


def integers(value: Any, where: str, count: int, *, most: int = MOST) -> np.ndarray:
    """A list of `count` integers from 0 to `most`, as int64."""
    numbers = sequence(value, where, count)
    if not numbers:
        return np.empty(0, dtype=np.int64)
    try:
        array = np.array(numbers)  # without a dtype: with one, texts and fractions would be made integers
    except (ValueError, OverflowError) as error:
        raise DamagedError(f"{where} is not a list of integers") from error
    if array.dtype != np.int64 or array.ndim != 1:
        raise DamagedError(f"{where} is not a list of integers")
    if array.min() < 0 or array.max() > most:
        raise DamagedError(f"{where} holds integers that are not from 0 to {most}")
    return array


def clean(value: Any) -> Any:
    """JSON with all text printable, keys too: what people are shown of a run must not move a terminal's cursor. Line
    breaks and tabs of values stay, because exports write them to a model's configuration."""
    if isinstance(value, str):
        return re.sub(r"[^\n\t]+", lambda found: printable(found[0]), value)
    if isinstance(value, dict):
        return {printable(key): clean(item) for key, item in value.items()}
    return [clean(item) for item in value] if isinstance(value, list) else value


def plain(value: Mapping[str, Any], where: str) -> None:
    """What people are shown of a run: a JSON object, not deep, whose texts can be written in UTF-8."""
    mapping(value, where)
    check_depth(value, where, most=16)
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except ValueError as error:
        raise DamagedError(f"{where} holds text that is none: {shown(str(error))}") from error
