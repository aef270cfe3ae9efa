"""Checkpoints as somebody who can write to the bucket would change them: every hash is right."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from typing import Any

from foundry_moe.checkpoint.manifest import MAGIC
from foundry_moe.checkpoint.records import CommitKey, file_hash
from foundry_moe.checkpoint.store import Store

Change = Callable[[Any], Any]  # changes JSON in place, or returns what stands for it


def key_of(step: int) -> str:
    return CommitKey(generation=0, step=step).key


def record_of(store: Store, step: int) -> dict[str, Any]:
    return json.loads(store.get(key_of(step)))


def manifest_of(store: Store, step: int) -> dict[str, Any]:
    raw = store.get(f"{record_of(store, step)['attempt']}/MANIFEST")
    return json.loads(zlib.decompress(raw[len(MAGIC) :]))


def packed(body: Any) -> bytes:
    """A manifest's bytes."""
    return MAGIC + zlib.compress(json.dumps(body).encode())


def put_record(store: Store, step: int, body: dict[str, Any]) -> None:
    body.pop("xxh3", None)
    body["xxh3"] = file_hash(json.dumps(body, sort_keys=True).encode())
    store.put(key_of(step), json.dumps(body).encode())


def put_manifest(store: Store, step: int, raw: bytes) -> None:
    """Puts it in place of the one of a step, and makes the record agree."""
    record = record_of(store, step)
    store.put(f"{record['attempt']}/MANIFEST", raw)
    record["manifest"] = {"size": len(raw), "xxh3": file_hash(raw)}
    put_record(store, step, record)


def forge_manifest(store: Store, step: int, change: Change) -> None:
    body = manifest_of(store, step)
    other = change(body)
    put_manifest(store, step, packed(body if other is None else other))


def forge_record(store: Store, step: int, change: Change) -> None:
    body = record_of(store, step)
    change(body)
    put_record(store, step, body)
