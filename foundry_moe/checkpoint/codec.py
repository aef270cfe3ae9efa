"""Plain Python values and small tensors as JSON, exactly and without pickle, so that reading runs no code.

Types that JSON lacks are tagged: `{"$tuple": [...]}`. `encode` refuses any type that is not listed here, and `decode`
raises DamagedError for anything that `encode` does not write.
"""

from __future__ import annotations

import base64
import datetime
import enum
import math
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foundry_moe.checkpoint.errors import DamagedError
from foundry_moe.checkpoint.manifest import tensors_in
from foundry_moe.checkpoint.strict import (
    INFLATED_BYTES,
    ITEM_BYTES,
    MOST,
    check_depth,
    fail,
    inflate,
    integer,
    most_inflated,
    sequence,
    shape,
    shown,
    text,
)
from foundry_moe.schema import UserError

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_BYTES}  # of a checkpoint
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
PACK_BYTES = 4096  # larger byte strings are compressed
DEPTH = 60  # of nested lists and dictionaries, each up to three levels in JSON
_NUMPY = re.compile(r"[<>|=][biufcSU][0-9]{1,5}")
_DEVICE = re.compile(r"[a-z]{1,16}(:[0-9]{1,5})?")


def tensor_bytes(tensor: Tensor) -> bytes:
    """The elements of a tensor as bytes: row-major, little endian."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def tensor_from_bytes(raw: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """The inverse of `tensor_bytes`. The result owns its memory."""
    if not raw:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(dtype).reshape(shape)


@dataclass(frozen=True)
class Encoded:
    """A value that is encoded already; `encode` returns its body."""

    body: Any


def encode(value: Any, *, where: str = "", tensor: Callable[[str, Tensor], Any] | None = None) -> Any:
    """Encodes a value for `json.dumps`.

    Args:
        value: None, bool, int, float, str, bytes, list, tuple, dict, set, numpy arrays and scalars, times, torch
            dtypes, sizes and devices, tensors, and nestings of these.
        where: the value's path, for errors and for `tensor`.
        tensor: called with (path, tensor); its result represents the tensor. None encodes tensors in full.

    Raises:
        TypeError: a value has another type.
        ValueError: the nesting or the number of bytes is above the limit of `decode`.
    """
    packed_bytes = 0

    def pack(raw: bytes, path: str) -> dict[str, Any]:
        nonlocal packed_bytes
        packed_bytes += len(raw)
        if packed_bytes > INFLATED_BYTES:
            raise UserError(f"{path or 'the value'}: arrays and byte strings beside the tensors exceed 1 GiB")
        if len(raw) > PACK_BYTES and len(raw) <= most_inflated(len(packed := zlib.compress(raw))):
            return {"$z": base64.b85encode(packed).decode()}
        return {"$b": base64.b85encode(raw).decode()}

    def go(item: Any, path: str, depth: int) -> Any:
        if item is None or isinstance(item, bool | str) or type(item) is int:
            return item
        if isinstance(item, Encoded):
            return item.body
        depth += 1
        if depth > DEPTH:
            raise UserError(f"{path or 'the value'} is nested deeper than {DEPTH}, which a checkpoint cannot hold")
        if isinstance(item, enum.Enum):
            return go(item.value, path, depth)
        if isinstance(item, torch.Tensor):
            if tensor is not None:
                return tensor(path, item)
            name = DTYPE_NAMES[item.dtype]
            return {"$tensor": [name, list(item.shape), pack(tensor_bytes(item), path)]}
        if type(item) is float:
            return item if math.isfinite(item) else {"$float": repr(item)}
        if isinstance(item, bytes | bytearray):
            return pack(bytes(item), path)
        if isinstance(item, torch.Size):
            return {"$size": list(item)}
        if isinstance(item, tuple):
            return {"$tuple": [go(v, f"{path}.{i}", depth) for i, v in enumerate(item)]}
        if isinstance(item, list):
            return [go(v, f"{path}.{i}", depth) for i, v in enumerate(item)]
        if isinstance(item, set | frozenset):
            return {"$set": [go(v, path, depth) for v in sorted(item, key=repr)]}
        if isinstance(item, Mapping):
            if all(type(k) is str and not k.startswith("$") for k in item):
                return {k: go(v, f"{path}.{k}" if path else k, depth) for k, v in item.items()}
            pairs = ((go(k, path, depth), go(v, f"{path}.{k}" if path else str(k), depth)) for k, v in item.items())
            return {"$dict": [list(pair) for pair in pairs]}
        if isinstance(item, np.ndarray | np.generic) and item.dtype.kind in "biufcSU":
            array = np.asarray(item)
            kind = "$numpy" if isinstance(item, np.ndarray) else "$scalar"
            return {kind: [array.dtype.str, list(array.shape), pack(array.tobytes(), path)]}
        if isinstance(item, int | float):  # a subclass
            return go(int(item) if isinstance(item, int) else float(item), path, depth)
        if isinstance(item, datetime.timedelta):
            return {"$timedelta": [item.days, item.seconds, item.microseconds]}
        if isinstance(item, datetime.datetime):
            return {"$datetime": item.isoformat()}
        if isinstance(item, torch.dtype):
            return {"$dtype": DTYPE_NAMES[item]}
        if isinstance(item, torch.device):
            return {"$device": str(item)}
        raise TypeError(
            f"{path or 'the value'} is a {type(item).__module__}.{type(item).__qualname__}, which a checkpoint cannot "
            "hold: build its state_dict() from numbers, text, lists, dictionaries and tensors"
        )

    return go(value, where, 0)


def decode(value: Any, *, tensor: Callable[[str], Any] | None = None) -> Any:
    """The inverse of `encode`. `tensor` is called with the text of each `{"$ref": ...}`.

    Raises:
        DamagedError: `encode` does not write this. At most 1 GiB more memory is used than `value` has.
    """
    check_depth(value, "a value")
    try:
        return _Decoder(tensor).go(value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        if isinstance(error, DamagedError):
            raise
        raise DamagedError(f"a value cannot be read: {shown(str(error))}") from error


class _Decoder:
    """One call of `decode`, with its remaining budget of decompressed bytes."""

    def __init__(self, tensor: Callable[[str], Any] | None) -> None:
        self._tensor, self._left_bytes = tensor, INFLATED_BYTES

    def go(self, item: Any) -> Any:
        if isinstance(item, list):
            return [self.go(v) for v in item]
        if not isinstance(item, dict):
            return item
        tag = next(iter(item), "")
        if not tag.startswith("$"):
            if any(key.startswith("$") for key in item):
                raise DamagedError(f"a dictionary holds a tag beside {shown(tag)}")
            return {k: self.go(v) for k, v in item.items()}
        if len(item) != 1:
            raise DamagedError(f"the tag {shown(tag)} is not alone")
        body = item[tag]
        match tag:
            case "$b" | "$z":
                return self._bytes(item)
            case "$ref" if self._tensor is not None:
                return self._tensor(text(body, "a tensor's name"))
            case "$tensor":
                name, sizes, data = self._sized(body, lambda name: _dtype(name).itemsize, "an inline tensor")
                return tensor_from_bytes(data, _dtype(name), sizes)
            case "$numpy" | "$scalar":
                name, sizes, data = self._sized(
                    body, lambda name: np.dtype(text(name, tag, _NUMPY)).itemsize, "an array"
                )
                array = np.frombuffer(data, dtype=np.dtype(name)).reshape(sizes).copy()
                if tag == "$scalar" and sizes:
                    fail("a scalar's shape", list(sizes), "empty")
                return array if tag == "$numpy" else array[()]
            case "$float" if body in ("nan", "inf", "-inf"):
                return float(body)
            case "$tuple":
                return tuple(self.go(sequence(body, "a tuple")))
            case "$set":
                return set(self.go(sequence(body, "a set")))
            case "$size":
                return torch.Size(shape(body, "a size"))
            case "$dict":
                pairs = (sequence(pair, "a key with its value", 2) for pair in sequence(body, "a dictionary's list"))
                return {self.go(key): self.go(value) for key, value in pairs}
            case "$timedelta":
                numbers = (integer(number, "a span of time", least=-MOST) for number in sequence(body, "a time", 3))
                return datetime.timedelta(*numbers)
            case "$datetime":
                return datetime.datetime.fromisoformat(text(body, "a time"))
            case "$dtype":
                return _dtype(body)
            case "$device":
                return torch.device(text(body, "a device", _DEVICE))
        raise DamagedError(f"unknown tag {shown(tag)}, or one whose value is none: {shown(body)}")

    def _bytes(self, packed: Any) -> bytes:
        tag, coded = next(iter(packed.items())) if type(packed) is dict and len(packed) == 1 else ("", None)
        if tag not in ("$b", "$z") or type(coded) is not str:
            fail("packed bytes", packed, "a text under $b or $z")
        raw = base64.b85decode(coded)
        if tag == "$z":
            raw = inflate(raw, "a byte string", self._left_bytes)
        self._left_bytes -= len(raw)
        return raw

    def _sized(self, body: Any, itemsize_of: Callable[[Any], int], where: str) -> tuple[str, tuple[int, ...], bytes]:
        name, listed, raw = sequence(body, where, 3)
        itemsize, sizes, data = itemsize_of(name), shape(listed, f"the shape of {where}"), self._bytes(raw)
        if not itemsize or len(data) != math.prod(sizes) * itemsize:
            raise DamagedError(f"{where} {list(sizes)} of {name} has {len(data)} bytes")
        return name, sizes, data


def _dtype(name: Any) -> torch.dtype:
    return DTYPES[name] if text(name, "a dtype") in DTYPES else fail("a dtype", name, "known")


def inline_tensors(values: Any) -> dict[str, Tensor]:
    """The small tensors among encoded values, by path."""
    return {path: decode(node) for path, tag, node in tensors_in(values) if tag == "$tensor"}
