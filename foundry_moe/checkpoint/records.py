"""Commit records: the small objects whose presence makes a checkpoint exist, and what they share with manifests.

A record is untrusted JSON. `from_bytes` checks all of it, so that users of a Commit need not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import xxhash

from foundry_moe.checkpoint import strict
from foundry_moe.checkpoint.errors import CheckpointError, DamagedError

FORMAT = 1
RECORD_BYTES = 2**20  # limit of a commit record's size
MANIFEST_BYTES = 2**29  # limit of a compressed manifest's size
RANKS = 2**20  # limit of `world_size`

LAST_GENERATION, LAST_STEP = 10**9 - 1, 10**15 - 1  # limits by the digits in names of commits

ATTEMPT = re.compile(r"steps/([0-9]{12,15})/[0-9]{8}T[0-9]{6}-[0-9a-f]{8}")  # the form of an attempt's name
_COMMIT = re.compile(r"commits/([0-9]{6,9})-([0-9]{12,15})\.json")
_HASH = re.compile(r"[0-9a-f]{32}")

Buffer = bytes | bytearray | memoryview


def file_hash(data: Buffer) -> str:
    """The 128-bit xxh3 of a manifest."""
    return xxhash.xxh3_128_hexdigest(data)


def sealed(body: dict[str, Any]) -> bytes:
    """A record as JSON with a hash of its content."""
    digest = file_hash(json.dumps(body, sort_keys=True).encode())
    return json.dumps({**body, "xxh3": digest}, sort_keys=True, indent=1).encode()


def unsealed(raw: bytes, where: str, most_bytes: int) -> dict[str, Any]:
    """The inverse of `sealed`.

    Raises:
        DamagedError: the record is incomplete, altered, or larger than `most_bytes`.
    """
    if len(raw) > most_bytes:
        raise DamagedError(f"{where} has {len(raw)} bytes, more than {most_bytes}")
    body = strict.mapping(strict.parse_json(raw, where), where, ("xxh3",))
    strict.check_depth(body, where)
    if body.pop("xxh3") != file_hash(json.dumps(body, sort_keys=True).encode()):
        raise DamagedError(f"{where} does not have the hash that it states")
    return body


def check_info(info: Any, where: str, keys: tuple[str, ...] = ()) -> None:
    """Checks the known keys of a run's description, in manifests and records; other keys may be any JSON.

    Raises:
        DamagedError: a key of `keys` is missing, or a known key has another type or is not printable.
    """
    strict.mapping(info, where, keys)
    strict.check_depth(info, where, most=16)
    try:
        json.dumps(info, ensure_ascii=False).encode()
    except ValueError as error:
        raise DamagedError(f"{where} holds invalid text: {strict.shown(str(error))}") from error
    for key in info:
        name = f"{where}: {key}"
        if key in ("step", "bytes", "objects", "tensors"):
            strict.integer(info[key], name)
        elif key == "world_size":
            strict.integer(info[key], name, least=1, most=RANKS)
        elif key in ("torch", "saved", "source"):
            strict.text(info[key], name)
        elif key in ("model", "training"):
            strict.mapping(info[key], name)
        elif key in ("milestone", "weights_only") and type(info[key]) is not bool:
            strict.fail(name, info[key], "true or false")
    for name, size in strict.mapping(info.get("mesh", {}), f"{where}: mesh").items():
        strict.text(name, f"{where}: a mesh's dimension", most=64)
        strict.integer(size, f"{where}: mesh.{name}", least=1, most=RANKS)


def check_attempt(attempt: Any, step: Any, where: str) -> str:
    """Returns the name of an attempt at `step`.

    Raises:
        DamagedError: it has another form, which could be a path out of the folder.
    """
    name = strict.text(attempt, f"{where}: attempt", ATTEMPT, most=64)
    if name.split("/")[1] != f"{step:012d}":
        raise DamagedError(f"{where}: attempt {name} does not belong to step {step}")
    return name


@dataclass(frozen=True, kw_only=True, order=True)
class CommitKey:
    """The order of commits: a later generation is newer whatever its step.

    A generation begins where history forks: when a run falls back past a damaged commit, and at `resume: STEP`.
    """

    generation: int
    step: int

    def __post_init__(self) -> None:
        # `parse` would not find a name with more digits
        if not (0 <= self.generation <= LAST_GENERATION and 0 <= self.step <= LAST_STEP):
            raise CheckpointError(
                f"no commit can have generation {self.generation} and step {self.step}: the largest are "
                f"{LAST_GENERATION} and {LAST_STEP}. Use another folder, or remove the record below commits/ that has "
                "such a number"
            )

    @property
    def key(self) -> str:
        return f"commits/{self.generation:06d}-{self.step:012d}.json"

    @staticmethod
    def parse(key: str) -> CommitKey | None:
        """The inverse of `key`; None for any other name."""
        match = _COMMIT.fullmatch(key)
        if match is None:
            return None
        found = CommitKey(generation=int(match[1]), step=int(match[2]))
        return found if found.key == key else None


@dataclass(frozen=True, kw_only=True)
class Commit:
    """A commit record. A checkpoint exists only while its record does."""

    where: CommitKey
    attempt: str  # the folder of its data, for example steps/000000000500/20260102T030405-1a2b3c4d
    nonce: str  # distinguishes this writer's record, after a lost response, from another writer's
    manifest_bytes: int = 0  # until the manifest is written
    manifest_hash: str = ""
    forked_from: int | None = None  # the step of `resume: STEP`, in the generation that began there
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
        return sealed(body)

    @staticmethod
    def from_bytes(raw: bytes, key: str) -> Commit:
        """Raises DamagedError for a record that is incomplete, altered, under another key, or names no attempt."""
        where = CommitKey.parse(key)
        if where is None:
            raise DamagedError(f"{strict.shown(key)} is not the name of a commit record")
        name = f"{key}: the commit record"
        body = unsealed(raw, name, RECORD_BYTES)
        strict.mapping(body, name, ("generation", "step", "attempt", "nonce", "manifest", "forked_from", "summary"))
        manifest = strict.mapping(body["manifest"], f"{name}: manifest", ("size", "xxh3"))
        for field_name, mine in (("generation", where.generation), ("step", where.step)):
            if strict.integer(body[field_name], f"{name}: {field_name}") != mine:
                raise DamagedError(f"{key}: the record has {field_name} {body[field_name]}")
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
            summary=strict.clean(body["summary"]),
        )
