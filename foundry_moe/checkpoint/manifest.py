"""What a checkpoint says about itself: tensors, their blocks, and where each block's bytes are. JSON, no pickle.

A manifest is a line that names the format, then zlib-compressed JSON. The commit
record, which makes a checkpoint exist, names it with its size and hash. Legend: B blocks of a tensor,
N its dimensions.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash

from foundry_moe.checkpoint.codec import DTYPES
from foundry_moe.checkpoint.errors import DamagedError

MAGIC = b"foundry-moe checkpoint 1\n"
FORMAT = 1
ALIGN_BYTES = 64  # blocks start at multiples of this, so that they can be viewed as any dtype

Buffer = bytes | bytearray | memoryview


BlockHash = xxhash.xxh3_64  # for a block that comes in pieces: `update(piece)`, `intdigest()`


def block_hash(data: Buffer) -> int:
    """The 64-bit xxh3 of a block: 30 GB/s where sha256 does 1.7. It finds damage, not forgery.

    Not xxhash's function of one call: that holds the interpreter's lock throughout, which an object's `update` frees.
    """
    hasher = BlockHash()
    hasher.update(data)
    return hasher.intdigest()


def file_hash(data: Buffer) -> str:
    """The 128-bit xxh3 of a manifest."""
    return xxhash.xxh3_128_hexdigest(data)


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
        return DTYPES[self.dtype].itemsize

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
        return MAGIC + zlib.compress(json.dumps(body, separators=(",", ":")).encode(), 6)

    @staticmethod
    def from_bytes(raw: bytes) -> Manifest:
        """Raises DamagedError for what is no manifest or of a newer format."""
        if not raw.startswith(MAGIC):
            raise DamagedError(f"not a checkpoint manifest: it begins with {raw[:16]!r}")
        try:
            body = json.loads(zlib.decompress(raw[len(MAGIC) :]))
        except (zlib.error, ValueError) as error:
            raise DamagedError(f"the manifest cannot be read: {error}") from error
        if body.get("format") != FORMAT:
            raise DamagedError(f"manifest format {body.get('format')} is not {FORMAT}: use the version that wrote it")
        tensors = {}
        for name, (dtype, shape, offsets, sizes, objects, starts, hashes) in body["tensors"].items():
            count = len(objects)
            tensors[name] = TensorEntry(
                dtype=dtype,
                shape=tuple(shape),
                offsets_BN=np.array(offsets, dtype=np.int64).reshape(count, len(shape)),
                sizes_BN=np.array(sizes, dtype=np.int64).reshape(count, len(shape)),
                object_B=np.array(objects, dtype=np.int64),
                start_B=np.array(starts, dtype=np.int64),
                hash_B=np.frombuffer(bytes.fromhex(hashes), dtype=">u8").astype(np.uint64),
            )
        return Manifest(
            info=body["info"],
            objects=[(key, size) for key, size in body["objects"]],
            tensors=tensors,
            values=body["values"],
        )


@dataclass(frozen=True, kw_only=True, order=True)
class CommitKey:
    """The order of commits: a later generation is newer whatever its step.

    A generation begins where history forks: after a fall back past a damaged commit, or `resume: STEP`.
    """

    generation: int
    step: int

    @property
    def key(self) -> str:
        return f"commits/{self.generation:06d}-{self.step:012d}.json"

    @staticmethod
    def parse(key: str) -> CommitKey | None:
        """From a key below `commits/`; None for what is no commit record."""
        name = key.removeprefix("commits/").removesuffix(".json")
        generation, _, step = name.partition("-")
        if key != f"commits/{name}.json" or not (generation.isdigit() and step.isdigit()):
            return None
        return CommitKey(generation=int(generation), step=int(step))


@dataclass(frozen=True, kw_only=True)
class Commit:
    """The record whose presence makes a checkpoint exist."""

    where: CommitKey
    attempt: str  # the folder of its data, for example steps/000000000500/20260102T030405-1a2b3c4d
    nonce: str  # tells a lost answer to our own conditional write from another writer's
    manifest_bytes: int
    manifest_hash: str
    forked_from: int | None = None  # the step that `resume: STEP` asked for, in the first generation after it
    summary: Mapping[str, Any] = field(default_factory=dict)

    @property
    def step(self) -> int:
        return self.where.step

    def to_bytes(self) -> bytes:
        body = {
            "format": FORMAT,
            "generation": self.where.generation,
            "step": self.where.step,
            "attempt": self.attempt,
            "nonce": self.nonce,
            "manifest": {"size": self.manifest_bytes, "xxh3": self.manifest_hash},
            "forked_from": self.forked_from,
            "summary": dict(self.summary),
        }
        body["xxh3"] = file_hash(json.dumps(body, sort_keys=True).encode())
        return json.dumps(body, sort_keys=True, indent=1).encode()

    @staticmethod
    def from_bytes(raw: bytes, key: str) -> Commit:
        """Raises DamagedError for a record that is torn, altered, or not in its place."""
        try:
            body = json.loads(raw)
            claimed = body.pop("xxh3")
            if claimed != file_hash(json.dumps(body, sort_keys=True).encode()):
                raise DamagedError(f"{key}: the commit record does not have the hash it claims")
            commit = Commit(
                where=CommitKey(generation=body["generation"], step=body["step"]),
                attempt=body["attempt"],
                nonce=body["nonce"],
                manifest_bytes=body["manifest"]["size"],
                manifest_hash=body["manifest"]["xxh3"],
                forked_from=body["forked_from"],
                summary=body["summary"],
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedError(f"{key}: the commit record cannot be read: {error}") from error
        if commit.where.key != key:
            raise DamagedError(f"{key}: the record is that of {commit.where.key}")
        return commit
