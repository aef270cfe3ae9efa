"""The table of contents of a checkpoint: tensors, their blocks, and the place of each block. JSON, no pickle.

A manifest is a line that names the format, then zlib-compressed JSON. The commit record has its size and hash. It is
untrusted data: `from_bytes` checks all of it, so that users of a Manifest need not.
Legend: B blocks of a tensor or of all, N dimensions, O objects.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash

from foundry_moe.checkpoint import strict
from foundry_moe.checkpoint.errors import CheckpointError, DamagedError
from foundry_moe.checkpoint.layout import Box
from foundry_moe.checkpoint.records import FORMAT, MANIFEST_BYTES, Buffer, check_attempt, check_info
from foundry_moe.checkpoint.strict import shown

MAGIC = b"foundry-moe checkpoint 1\n"
ALIGN_BYTES = 64  # blocks start at multiples of this, so that views of any dtype are possible

MOST_CUT = 8  # dimensions along which a tensor may be cut: a block has 2^8 corners
_KEYS = 2**62

OBJECT = re.compile(r"data/[0-9]{6,9}\.bin")
_HASHES = re.compile(r"[0-9a-f]*")

Row = tuple[str, Box, int, int]  # a block: tensor, box, start in the rank's object, hash

BlockHash = xxhash.xxh3_64  # for a block that is read in pieces


def block_hash(data: Buffer) -> int:
    """The 64-bit xxh3 of a block: 30 GB/s, sha256 1.7 GB/s. It detects damage, not forgery.

    `update` releases the GIL; xxhash's one-call function does not.
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
    def bytes_B(self) -> np.ndarray:
        return np.prod(self.sizes_BN, axis=1, dtype=np.int64) * strict.ITEM_BYTES[self.dtype]

    @property
    def size_bytes(self) -> int:
        return int(self.bytes_B.sum())


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A checkpoint's table of contents.

    info: step, attempt, world size, mesh, versions; printed by `checkpoints show`.
    objects: (key, size in bytes) of each data object.
    tensors: by path, in the order of the plan.
    values: all other values, encoded by `codec.encode`; `{"$ref": path}` stands for a tensor.
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
                f"the manifest would have {len(text)} bytes, {len(raw)} compressed, above the limit of readers: "
                "keep large data in tensors, not in lists"
            )
        return raw

    @staticmethod
    def from_bytes(raw: bytes) -> Manifest:
        """Parses a manifest and checks types and ranges; that blocks cover each tensor exactly once and do not overlap
        within their objects; and that the values refer to each tensor once. `codec.decode` checks the values.

        Raises:
            DamagedError: the manifest is invalid, or its format is newer.
        """
        if not raw.startswith(MAGIC):
            raise DamagedError(f"not a checkpoint manifest: it begins with {raw[:16]!r}")
        if len(raw) > MANIFEST_BYTES:
            raise DamagedError(f"the manifest has {len(raw)} bytes, more than {MANIFEST_BYTES}")
        text = strict.inflate(memoryview(raw)[len(MAGIC) :], "the manifest")
        body = strict.mapping(strict.parse_json(text, "the manifest"), "the manifest", ("format",))
        if body["format"] != FORMAT:
            raise DamagedError(
                f"manifest format {shown(body['format'])} is not {FORMAT}: use the version that wrote it"
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


def object_key(rank: int) -> str:
    """The key of a rank's object, relative to the attempt."""
    return f"data/{rank:06d}.bin"


def build_manifest(
    tensors: Mapping[str, tuple[Any, tuple[int, ...]]],
    written: Mapping[int, tuple[int, Iterable[Row]]],
    values: Any,
    info: Mapping[str, Any],
) -> Manifest:
    """Builds a manifest.

    Args:
        tensors: (torch.dtype, shape) of each, by path.
        written: by rank, the size of its object and its rows.
        values: all other values, encoded.
    """
    objects: list[tuple[str, int]] = []
    blocks: dict[str, list[tuple[Box, int, int, int]]] = {name: [] for name in tensors}
    for rank, (size_bytes, rows) in sorted(written.items()):
        for name, box, start, digest in rows:
            blocks[name].append((box, len(objects), start, digest))
        if size_bytes:
            objects.append((object_key(rank), size_bytes))
    entries = {}
    for name, (dtype, shape) in tensors.items():
        mine = sorted(blocks[name])
        dims = (len(mine), len(shape))
        entries[name] = TensorEntry(
            dtype=str(dtype).removeprefix("torch."),
            shape=shape,
            offsets_BN=np.array([box[0] for box, *_ in mine], dtype=np.int64).reshape(dims),
            sizes_BN=np.array([box[1] for box, *_ in mine], dtype=np.int64).reshape(dims),
            object_B=np.array([block[1] for block in mine], dtype=np.int64),
            start_B=np.array([block[2] for block in mine], dtype=np.int64),
            hash_B=np.array([block[3] for block in mine], dtype=np.uint64),
        )
    return Manifest(info=info, objects=objects, tensors=entries, values=values)


def _objects(listed: Any, world_size: int) -> list[tuple[str, int]]:
    """The data objects, at most one for each rank."""
    objects = []
    for number, item in enumerate(strict.sequence(listed, "the manifest's objects")):
        where = f"object {number}"
        key, size = strict.sequence(item, where, 2)
        objects.append((strict.text(key, where, OBJECT), strict.integer(size, f"the size of {where}", least=1)))
    if len({key for key, _ in objects}) != len(objects) or len(objects) > world_size:
        raise DamagedError(
            f"{len(objects)} objects of {world_size} processes: some are listed twice, or there are too many"
        )
    if sum(size for _, size in objects) > strict.MOST:
        raise DamagedError(f"the objects have more than {strict.MOST} bytes")
    return objects


def _entry(name: str, columns: Any) -> TensorEntry:
    """The entry of one tensor. `_check_blocks` checks its blocks."""
    where = f"tensor {shown(name)}"
    dtype, listed, offsets, sizes, objects, starts, hashes = strict.sequence(columns, where, 7)
    if type(dtype) is not str or dtype not in strict.ITEM_BYTES:
        strict.fail(f"the dtype of {where}", dtype, "a known dtype")
    shape = strict.shape(listed, f"the shape of {where}", strict.ITEM_BYTES[dtype])
    count = len(strict.sequence(objects, f"the objects of {where}"))
    if type(hashes) is not str or len(hashes) != 16 * count or not _HASHES.fullmatch(hashes):
        raise DamagedError(f"{where} has {count} blocks, and not one hash of 16 digits for each")
    return TensorEntry(
        dtype=dtype,
        shape=shape,
        offsets_BN=strict.integers(offsets, f"offsets of {where}", count * len(shape)).reshape(count, len(shape)),
        sizes_BN=strict.integers(sizes, f"sizes of {where}", count * len(shape)).reshape(count, len(shape)),
        object_B=strict.integers(objects, f"objects of {where}", count),
        start_B=strict.integers(starts, f"starts of {where}", count),
        hash_B=np.frombuffer(bytes.fromhex(hashes), dtype=">u8").astype(np.uint64),
    )


def _check_values(values: Any, tensors: Mapping[str, TensorEntry]) -> None:
    """Each tensor is referred to once, and paths are unique. `codec.decode` checks the rest."""
    strict.check_depth(strict.mapping(values, "the manifest's values"), "the manifest's values")
    paths: dict[str, list[str]] = {"$ref": [], "$tensor": []}
    try:
        for path, tag, node in tensors_in(values):
            paths[tag].append(strict.text(node[tag] if tag == "$ref" else path, "a tensor's path"))
    except (TypeError, ValueError) as error:
        raise DamagedError(f"the manifest's values cannot be read: {shown(str(error))}") from error
    if sorted(paths["$ref"]) != sorted(tensors):
        wrong = sorted(set(paths["$ref"]) ^ set(tensors)) or paths["$ref"]
        raise DamagedError(f"the values must refer once to each tensor, and do not to {shown(wrong[0])}")
    every = [*paths["$tensor"], *tensors]
    if len(set(every)) != len(every):
        raise DamagedError("two tensors of the manifest have the same path")


def tensors_in(values: Any, path: str = "") -> Iterator[tuple[str, str, Any]]:
    """The tensors among encoded values: (path, "$ref" or "$tensor", the node)."""
    if isinstance(values, list):
        for index, item in enumerate(values):
            yield from tensors_in(item, f"{path}.{index}" if path else str(index))
    elif isinstance(values, dict):
        tag = next(iter(values), "")
        if tag in ("$ref", "$tensor"):
            yield path, tag, values
        elif tag in ("$tuple", "$set"):
            yield from tensors_in(values[tag], path)
        else:
            for key, item in values["$dict"] if tag == "$dict" else values.items():
                yield from tensors_in(item, f"{path}.{key}" if path else str(key))


def check_tiling(name: str, shape: tuple[int, ...], offsets_BN: np.ndarray, sizes_BN: np.ndarray) -> None:
    """Raises DamagedError unless the boxes of a tensor cover it exactly once. A tensor without elements has no boxes.

    The indicator function of a box is the cumulative sum, over all dimensions, of +1 and -1 at its corners, and
    determines them. So boxes tile a tensor if and only if the sum of their signed corners equals that of the tensor.
    This needs no search for overlaps and no order.

    Args:
        offsets_BN, sizes_BN: int64, without negative numbers.
    """
    if 0 in shape:
        if len(sizes_BN):
            raise DamagedError(f"tensor {shown(name)} has no elements and {len(sizes_BN)} blocks")
        return
    ends_BN = offsets_BN + sizes_BN
    wrong_B = np.any((sizes_BN < 1) | (ends_BN > np.array(shape, dtype=np.int64)), axis=1)
    if wrong_B.any():
        first, end = offsets_BN[wrong_B][0].tolist(), ends_BN[wrong_B][0].tolist()
        raise DamagedError(f"a block of {shown(name)} {list(shape)} reaches from {first} to {end}")
    cut = np.flatnonzero(np.any(sizes_BN != shape, axis=0)) if shape else np.empty(0, dtype=int)
    if len(cut) > MOST_CUT or math.prod(shape[dim] + 1 for dim in cut) >= _KEYS:
        raise DamagedError(f"the blocks of {shown(name)} are cut along {len(cut)} dimensions, or it is too large")
    # corners of the boxes, and of the tensor with the opposite sign, as integers: their index in a grid
    keys, signs = np.zeros(len(sizes_BN) + 1, dtype=np.int64), np.array([1] * len(sizes_BN) + [-1])
    for dim in cut:
        lower, upper = np.append(offsets_BN[:, dim], 0), np.append(ends_BN[:, dim], shape[dim])
        keys, signs, repeats = keys * (shape[dim] + 1), np.concatenate([signs, -signs]), len(keys) // len(lower)
        keys = np.concatenate([keys + np.tile(lower, repeats), keys + np.tile(upper, repeats)])
    _, places = np.unique(keys, return_inverse=True)
    if np.bincount(places, weights=signs).any():
        raise DamagedError(f"the blocks of {shown(name)} {list(shape)} leave elements out or hold some twice")


def _check_blocks(objects: list[tuple[str, int]], tensors: Mapping[str, TensorEntry]) -> None:
    """Raises DamagedError unless the blocks of each tensor cover it exactly once, and all blocks are aligned, within
    their objects, and do not overlap.

    So the tensors together are not larger than the objects, whose sizes the store confirms.
    """
    for name, entry in tensors.items():
        check_tiling(name, entry.shape, entry.offsets_BN, entry.sizes_BN)
    entries = [entry for entry in tensors.values() if len(entry.object_B)]
    if not entries:
        return
    object_B = np.concatenate([entry.object_B for entry in entries])
    start_B = np.concatenate([entry.start_B for entry in entries])
    end_B = start_B + np.concatenate([entry.bytes_B for entry in entries])
    if object_B.max() >= len(objects):
        raise DamagedError(f"a block lies in object {int(object_B.max())} of {len(objects)}")
    size_B = np.array([size for _, size in objects], dtype=np.int64)[object_B]
    wrong_B = (end_B > size_B) | (start_B % ALIGN_BYTES != 0)
    if wrong_B.any():
        block = int(wrong_B.argmax())
        raise DamagedError(
            f"a block lies at bytes {int(start_B[block])} to {int(end_B[block])} of an object of "
            f"{int(size_B[block])} bytes: it must begin at a multiple of {ALIGN_BYTES} and end within"
        )
    order = np.lexsort((start_B, object_B))
    object_B, start_B, end_B = object_B[order], start_B[order], end_B[order]
    overlap = (object_B[1:] == object_B[:-1]) & (start_B[1:] < end_B[:-1])
    if overlap.any():
        raise DamagedError(
            f"two blocks share byte {int(start_B[1:][overlap][0])} of object {int(object_B[1:][overlap][0])}"
        )
