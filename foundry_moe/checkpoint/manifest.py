"""What a checkpoint says about itself: tensors, their blocks, and where each block's bytes are. JSON, no pickle.

A manifest is a line that names the format, then zlib-compressed JSON; a commit's record names its size and hash. It
is data from a place where others may write: `from_bytes` takes nothing on trust, and all who read a Manifest may.
Legend: B blocks of a tensor, N its dimensions.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash

from foundry_moe.checkpoint import strict
from foundry_moe.checkpoint.coverage import check_places, check_tiling
from foundry_moe.checkpoint.errors import CheckpointError, DamagedError
from foundry_moe.checkpoint.records import FORMAT, MANIFEST_BYTES, Buffer, check_attempt, check_info

MAGIC = b"foundry-moe checkpoint 1\n"
ALIGN_BYTES = 64  # blocks start at multiples of this, so that they can be viewed as any dtype

OBJECT = re.compile(r"data/[0-9]{6,9}\.bin")
_HASHES = re.compile(r"[0-9a-f]*")

BlockHash = xxhash.xxh3_64  # for a block that comes in pieces: `update(piece)`, `intdigest()`


def block_hash(data: Buffer) -> int:
    """The 64-bit xxh3 of a block: 30 GB/s where sha256 does 1.7. It finds damage, not forgery.

    Not xxhash's function of one call: that holds the interpreter's lock throughout, which an object's `update` frees.
    """
    hasher = BlockHash()
    hasher.update(data)
    return hasher.intdigest()


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """One tensor and its blocks; `object_B` indexes the manifest's objects. Blocks are row-major boxes."""

    dtype: str
    shape: tuple[int, ...]
    offsets_BN: np.ndarray
    sizes_BN: np.ndarray
    object_B: np.ndarray
    start_B: np.ndarray
    hash_B: np.ndarray  # uint64

    @property
    def itemsize(self) -> int:
        return strict.ITEM_BYTES[self.dtype]

    @property
    def bytes_B(self) -> np.ndarray:
        """Each block's size in bytes."""
        return np.prod(self.sizes_BN, axis=1, dtype=np.int64) * self.itemsize

    @property
    def size_bytes(self) -> int:
        return int(self.bytes_B.sum())


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A checkpoint's table of contents.

    info: step, attempt, world size, mesh, versions: what `show` prints.
    objects: (key, size in bytes) of each data object.
    tensors: by path, in the order in which they were planned.
    values: everything else, as `codec.encode` made it; `{"$ref": path}` stands for a tensor.
    """

    info: Mapping[str, Any]
    objects: list[tuple[str, int]]
    tensors: dict[str, TensorEntry]
    values: Any = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        return sum(size for _, size in self.objects)

    def to_bytes(self) -> bytes:
        body = {
            "format": FORMAT,
            "hash": "xxh3-64",
            "info": dict(self.info),
            "objects": [list(item) for item in self.objects],
            "tensors": {
                name: [
                    entry.dtype,
                    list(entry.shape),
                    entry.offsets_BN.reshape(-1).tolist(),
                    entry.sizes_BN.reshape(-1).tolist(),
                    entry.object_B.tolist(),
                    entry.start_B.tolist(),
                    entry.hash_B.astype(">u8").tobytes().hex(),
                ]
                for name, entry in self.tensors.items()
            },
            "values": self.values,
        }
        text = json.dumps(body, separators=(",", ":")).encode()
        raw = MAGIC + zlib.compress(text, 6)
        if len(text) > strict.most_inflated(len(raw) - len(MAGIC)) or len(raw) > MANIFEST_BYTES:
            raise CheckpointError(
                f"the manifest would have {len(text)} bytes, {len(raw)} compressed, which is not read again: keep "
                "large or monotonous data in tensors, not in lists"
            )
        return raw

    @staticmethod
    def from_bytes(raw: bytes) -> Manifest:
        """A manifest of which all is checked that needs no other object: types and ranges; that the blocks of each
        tensor hold each of its elements once, and lie apart within their objects; that the values can be decoded and
        refer to each tensor once.

        Raises:
            DamagedError: anything else, or a newer format.
        """
        if not raw.startswith(MAGIC):
            raise DamagedError(f"not a checkpoint manifest: it begins with {raw[:16]!r}")
        if len(raw) > MANIFEST_BYTES:
            raise DamagedError(f"the manifest has {len(raw)} bytes, more than {MANIFEST_BYTES}")
        text = strict.inflate(memoryview(raw)[len(MAGIC) :], "the manifest")
        body = strict.mapping(strict.parse_json(text, "the manifest"), "the manifest", ("format",))
        if body["format"] != FORMAT:
            raise DamagedError(
                f"manifest format {strict.shown(body['format'])} is not {FORMAT}: use the version that wrote it"
            )
        strict.mapping(body, "the manifest", ("info", "objects", "tensors", "values"))
        check_info(body["info"], "the manifest's info", ("step", "attempt", "world_size"))
        check_attempt(body["info"]["attempt"], body["info"]["step"], "the manifest's info")
        objects = _objects(body["objects"], body["info"]["world_size"])
        tensors = {
            strict.text(name, "a tensor's name"): _entry(name, columns)
            for name, columns in strict.mapping(body["tensors"], "the manifest's tensors").items()
        }
        _check_blocks(objects, tensors)
        _check_values(body["values"], tensors)
        return Manifest(info=strict.clean(body["info"]), objects=objects, tensors=tensors, values=body["values"])


def _objects(listed: Any, world_size: int) -> list[tuple[str, int]]:
    """The data objects, one for each rank that wrote anything."""
    objects = []
    for number, item in enumerate(strict.sequence(listed, "the manifest's objects")):
        where = f"object {number}"
        key, size = strict.sequence(item, where, 2)
        objects.append((strict.text(key, where, OBJECT), strict.integer(size, f"the size of {where}", least=1)))
    if len({key for key, _ in objects}) != len(objects) or len(objects) > world_size:
        raise DamagedError(f"{len(objects)} objects of {world_size} processes: one is listed twice, or too many are")
    if sum(size for _, size in objects) > strict.MOST:
        raise DamagedError(f"the objects have more than {strict.MOST} bytes")
    return objects


def _entry(name: str, columns: Any) -> TensorEntry:
    """One tensor's line. How its blocks lie is looked at for all tensors together."""
    where = f"tensor {strict.shown(name)}"
    dtype, shape, offsets, sizes, objects, starts, hashes = strict.sequence(columns, where, 7)
    if type(dtype) is not str or dtype not in strict.ITEM_BYTES:
        strict.fail(f"the dtype of {where}", dtype, "one that this version knows")
    dims = [strict.integer(size, f"a dimension of {where}") for size in strict.sequence(shape, f"the shape of {where}")]
    if len(dims) > strict.DIMS or math.prod(max(size, 1) for size in dims) * strict.ITEM_BYTES[dtype] > strict.MOST:
        strict.fail(f"the shape of {where}", shape, f"one of at most {strict.DIMS} dimensions and {strict.MOST} bytes")
    count = len(strict.sequence(objects, f"the objects of {where}"))
    if type(hashes) is not str or len(hashes) != 16 * count or not _HASHES.fullmatch(hashes):
        raise DamagedError(f"{where} has {count} blocks, and no hash of 16 digits for each")
    return TensorEntry(
        dtype=dtype,
        shape=tuple(dims),
        offsets_BN=strict.integers(offsets, f"offsets of {where}", count * len(dims)).reshape(count, len(dims)),
        sizes_BN=strict.integers(sizes, f"sizes of {where}", count * len(dims)).reshape(count, len(dims)),
        object_B=strict.integers(objects, f"objects of {where}", count),
        start_B=strict.integers(starts, f"starts of {where}", count),
        hash_B=np.frombuffer(bytes.fromhex(hashes), dtype=">u8").astype(np.uint64),
    )


def _check_blocks(objects: list[tuple[str, int]], tensors: Mapping[str, TensorEntry]) -> None:
    entries = list(tensors.values())
    if not entries:
        return
    check_tiling(
        list(tensors),
        [entry.shape for entry in entries],
        [entry.offsets_BN for entry in entries],
        [entry.sizes_BN for entry in entries],
    )
    check_places(
        [size for _, size in objects],
        np.concatenate([entry.object_B for entry in entries]),
        np.concatenate([entry.start_B for entry in entries]),
        np.concatenate([entry.bytes_B for entry in entries]),
        ALIGN_BYTES,
    )


def _check_values(values: Any, tensors: Mapping[str, TensorEntry]) -> None:
    from foundry_moe.checkpoint.codec import decode, tensors_in  # imports torch, which listing records does not need

    refs: set[str] = set()

    def refer(name: str) -> None:
        if name not in tensors or name in refs:
            raise DamagedError(f"the values refer to {strict.shown(name)}, which is no tensor, or twice to it")
        refs.add(name)

    decode(strict.mapping(values, "the manifest's values"), tensor=refer)
    if len(refs) != len(tensors):
        missing = next(name for name in tensors if name not in refs)
        raise DamagedError(f"nothing in the values refers to tensor {strict.shown(missing)}")
    inline = [strict.text(path, "a tensor's path") for path, tag, _ in tensors_in(values) if tag == "$tensor"]
    twice = len(set(inline)) != len(inline) or not tensors.keys().isdisjoint(inline)
    if twice:
        raise DamagedError("two tensors of the manifest have the same path")
