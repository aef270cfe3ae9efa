"""Plain Python values and small tensors as JSON, exactly and without pickle: reading one runs no code.

What JSON lacks is tagged: `{"$tuple": [...]}`. A type that is not listed here is refused by name when it is saved.
"""

from __future__ import annotations

import base64
import datetime
import enum
import math
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        *("float64", "float32", "float16", "bfloat16", "complex64", "complex128", "bool"),
        *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
    )
    if hasattr(torch, name)
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
PACK_BYTES = 4096  # byte strings above this are compressed


def tensor_bytes(tensor: Tensor) -> bytes:
    """A tensor's elements as raw bytes in row-major order, machine order (little endian)."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def tensor_from_bytes(raw: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """The inverse of `tensor_bytes`; the result owns its memory."""
    if not raw:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(dtype).reshape(shape)


def _pack(raw: bytes) -> dict[str, Any]:
    if len(raw) > PACK_BYTES:
        return {"$z": base64.b85encode(zlib.compress(raw)).decode()}
    return {"$b": base64.b85encode(raw).decode()}


def encode(value: Any, *, where: str = "", tensor: Callable[[str, Tensor], Any] | None = None) -> Any:
    """A value as what `json.dumps` takes.

    Args:
        value: None, bool, int, float, str, bytes, list, tuple, dict, set, numpy arrays and scalars, times, torch
            dtypes, sizes and devices, tensors, and what is made of them.
        where: the value's path, for errors and for `tensor`.
        tensor: called with (path, tensor); what it returns stands for the tensor. None encodes tensors in full.

    Raises:
        TypeError: a value of another type; the path is named.
    """

    def go(item: Any, path: str) -> Any:
        if item is None or isinstance(item, bool | str) or type(item) is int:
            return item
        if isinstance(item, enum.Enum):
            return go(item.value, path)
        if isinstance(item, Tensor):
            if tensor is not None:
                return tensor(path, item)
            name = DTYPE_NAMES[item.dtype]
            return {"$tensor": [name, list(item.shape), _pack(tensor_bytes(item))]}
        if type(item) is float:
            return item if math.isfinite(item) else {"$float": repr(item)}
        if isinstance(item, bytes | bytearray):
            return _pack(bytes(item))
        if isinstance(item, torch.Size):
            return {"$size": list(item)}
        if isinstance(item, tuple):
            return {"$tuple": [go(v, f"{path}.{i}") for i, v in enumerate(item)]}
        if isinstance(item, list):
            return [go(v, f"{path}.{i}") for i, v in enumerate(item)]
        if isinstance(item, set | frozenset):
            return {"$set": [go(v, path) for v in sorted(item, key=repr)]}
        if isinstance(item, Mapping):
            if all(type(k) is str and not k.startswith("$") for k in item):
                return {k: go(v, f"{path}.{k}" if path else k) for k, v in item.items()}
            return {"$dict": [[go(k, path), go(v, f"{path}.{k}" if path else str(k))] for k, v in item.items()]}
        if isinstance(item, np.ndarray | np.generic) and item.dtype.kind in "biufcSU":
            array = np.asarray(item)
            kind = "$numpy" if isinstance(item, np.ndarray) else "$scalar"
            return {kind: [array.dtype.str, list(array.shape), _pack(array.tobytes())]}
        if isinstance(item, int | float):  # a subclass, for example of IntEnum's kind
            return go(int(item) if isinstance(item, int) else float(item), path)
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
            "hold: make its state_dict() of numbers, text, lists, dictionaries and tensors"
        )

    return go(value, where)


def decode(value: Any, *, tensor: Callable[[str], Any] | None = None) -> Any:
    """The inverse of `encode`; `tensor` gets the text of `{"$ref": ...}`, which a tensor callback may have written."""

    def bytes_of(packed: Mapping[str, str]) -> bytes:
        if "$z" in packed:
            return zlib.decompress(base64.b85decode(packed["$z"]))
        return base64.b85decode(packed["$b"])

    def go(item: Any) -> Any:
        if isinstance(item, list):
            return [go(v) for v in item]
        if not isinstance(item, dict):
            return item
        if len(item) != 1 or not (tag := next(iter(item))).startswith("$"):
            return {k: go(v) for k, v in item.items()}
        body = item[tag]
        if tag in ("$b", "$z"):
            return bytes_of(item)
        if tag == "$ref":
            if tensor is None:
                raise ValueError(f"tensor {body!r} is stored apart and was not given")
            return tensor(body)
        if tag == "$tensor":
            return tensor_from_bytes(bytes_of(body[2]), DTYPES[body[0]], tuple(body[1]))
        if tag in ("$numpy", "$scalar"):
            array = np.frombuffer(bytes_of(body[2]), dtype=np.dtype(body[0])).reshape(body[1]).copy()
            return array if tag == "$numpy" else array[()]
        simple: dict[str, Callable[[Any], Any]] = {
            "$float": float,
            "$tuple": lambda b: tuple(go(v) for v in b),
            "$set": lambda b: {go(v) for v in b},
            "$size": torch.Size,
            "$dict": lambda b: {go(k): go(v) for k, v in b},
            "$timedelta": lambda b: datetime.timedelta(*b),
            "$datetime": datetime.datetime.fromisoformat,
            "$dtype": lambda b: DTYPES[b],
            "$device": torch.device,
        }
        if tag not in simple:
            raise ValueError(f"unknown tag {tag!r}: the checkpoint was written by a newer version")
        return simple[tag](body)

    return go(value)
