"""What a checkpoint says about itself: tensors, their blocks, and where each block's bytes are. JSON, no pickle.

A manifest is a line that names the format, then zlib-compressed JSON. The commit
record, which makes a checkpoint exist, names it with its size and hash. Both are data from a place where others may
write: `from_bytes` takes nothing on trust, and all who read a Manifest or a Commit may. Legend: B blocks of a tensor,
N its dimensions.
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
from foundry_moe.checkpoint.codec import DIMS, DTYPES, decode, tensors_in
from foundry_moe.checkpoint.coverage import check_places, check_tiling
from foundry_moe.checkpoint.errors import CheckpointError, DamagedError

MAGIC = b"foundry-moe checkpoint 1\n"
FORMAT = 1
ALIGN_BYTES = 64  # blocks start at multiples of this, so that they can be viewed as any dtype
RECORD_BYTES = 2**20  # the most that a commit record may have
MANIFEST_BYTES = 2**29  # and a manifest, compressed
RANKS = 2**20  # the most processes that a checkpoint may say have written it

ATTEMPT = re.compile(r"steps/([0-9]{12,15})/[0-9]{8}T[0-9]{6}-[0-9a-f]{8}")  # the only form of an attempt's name
OBJECT = re.compile(r"data/[0-9]{6,9}\.bin")
_COMMIT = re.compile(r"commits/([0-9]{6,9})-([0-9]{12,15})\.json")
_HASH = re.compile(r"[0-9a-f]{32}")
_HASHES = re.compile(r"[0-9a-f]*")

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
        return Manifest(info=body["info"], objects=objects, tensors=tensors, values=body["values"])


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
    if type(dtype) is not str or dtype not in DTYPES:
        strict.fail(f"the dtype of {where}", dtype, "one that this version knows")
    dims = [strict.integer(size, f"a dimension of {where}") for size in strict.sequence(shape, f"the shape of {where}")]
    if len(dims) > DIMS or math.prod(max(size, 1) for size in dims) * DTYPES[dtype].itemsize > strict.MOST:
        strict.fail(f"the shape of {where}", shape, f"one of at most {DIMS} dimensions and {strict.MOST} bytes")
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


def check_info(info: Any, where: str, keys: tuple[str, ...] = ()) -> None:
    """What is known of a run's description, in manifests and records alike; other keys may be any JSON.

    Raises:
        DamagedError: a key of `keys` is missing, or one has another type, or cannot be shown to a person.
    """
    strict.plain(info, where)
    strict.mapping(info, where, keys)
    for key in ("step", "bytes", "objects", "tensors"):
        if key in info:
            strict.integer(info[key], f"{where}: {key}")
    if "world_size" in info:
        strict.integer(info["world_size"], f"{where}: world_size", least=1, most=RANKS)
    for key in ("torch", "saved", "source"):
        if key in info:
            strict.text(info[key], f"{where}: {key}")
    for key in ("model", "training"):
        strict.mapping(info.get(key, {}), f"{where}: {key}")
    for key in ("milestone", "weights_only"):
        if type(info.get(key, False)) is not bool:
            strict.fail(f"{where}: {key}", info[key], "true or false")
    for name, size in strict.mapping(info.get("mesh", {}), f"{where}: mesh").items():
        strict.text(name, f"{where}: a mesh's dimension", most=64)
        strict.integer(size, f"{where}: mesh.{name}", least=1, most=RANKS)


def check_attempt(attempt: Any, step: Any, where: str) -> str:
    """An attempt's name, which belongs to `step`.

    Raises:
        DamagedError: any other text; such a name could lead out of the folder.
    """
    name = strict.text(attempt, f"{where}: attempt", ATTEMPT, most=64)
    if name.split("/")[1] != f"{step:012d}":
        raise DamagedError(f"{where}: attempt {name} is not one of step {step}")
    return name


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
        """From a key below `commits/`; None for what is no commit record: any name that `key` does not make."""
        match = _COMMIT.fullmatch(key)
        if match is None:
            return None
        found = CommitKey(generation=int(match[1]), step=int(match[2]))
        return found if found.key == key else None


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
        """Raises DamagedError for a record that is torn, altered, not in its place, or whose attempt has no attempt's
        name."""
        if len(raw) > RECORD_BYTES:
            raise DamagedError(f"{key}: the commit record has {len(raw)} bytes, more than {RECORD_BYTES}")
        where = CommitKey.parse(key)
        if where is None:
            raise DamagedError(f"{strict.shown(key)} is no commit record's name")
        name = f"{key}: the commit record"
        body = strict.mapping(strict.parse_json(raw, name), name, ("xxh3",))
        strict.check_depth(body, name)
        claimed = body.pop("xxh3")
        if claimed != file_hash(json.dumps(body, sort_keys=True).encode()):
            raise DamagedError(f"{key}: the commit record does not have the hash it claims")
        strict.mapping(body, name, ("generation", "step", "attempt", "nonce", "manifest", "forked_from", "summary"))
        manifest = strict.mapping(body["manifest"], f"{name}: manifest", ("size", "xxh3"))
        for field_name, mine in (("generation", where.generation), ("step", where.step)):
            if strict.integer(body[field_name], f"{name}: {field_name}") != mine:
                raise DamagedError(f"{key}: the record is that of {field_name} {body[field_name]}")
        if body["forked_from"] is not None:
            strict.integer(body["forked_from"], f"{name}: forked_from")
        check_info(body["summary"], f"{name}: summary")
        return Commit(
            where=where,
            attempt=check_attempt(body["attempt"], where.step, name),
            nonce=strict.text(body["nonce"], f"{name}: nonce", most=64),
            manifest_bytes=strict.integer(manifest["size"], f"{name}: manifest size", most=MANIFEST_BYTES),
            manifest_hash=strict.text(manifest["xxh3"], f"{name}: manifest hash", _HASH),
            forked_from=body["forked_from"],
            summary=body["summary"],
        )
