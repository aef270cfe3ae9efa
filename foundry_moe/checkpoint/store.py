"""`Store`: the interface through which checkpoints reach storage, and its guarantees.

A store holds named byte strings ("objects") below one folder. It does not depend on checkpoints. `store_s3` uses boto3,
`store_cloud` uses obstore for Google and Azure, and `store_file` gives the same guarantees on a file system.
"""

from __future__ import annotations

import abc
import contextlib
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from foundry_moe.checkpoint.errors import DeniedError, NotAnObjectError, StoreError

CLOUDS = ("s3", "gs", "az")  # schemes of addresses
FORM = "s3://bucket/run, gs://bucket/run, az://container/run or a path"

PART_BYTES = 16 * 2**20  # of 8, 16, 32 and 64 MiB the fastest against Ceph RGW and moto; S3 requires at least 5 MiB
SMALL_BYTES = 2**20  # default limit of `get`
See = Callable[[memoryview], object]
PROBE = "probe"  # an empty object, written and deleted by `check`
PROBE_TRIES = 3  # the check of another run may delete the object between the two writes


@dataclass(frozen=True, kw_only=True)
class StoreOptions:
    """Address, limits and retries. `timeout_s` limits a connection attempt, and a silence on an open connection."""

    endpoint_url: str | None = field(default=None, repr=False)  # may hold a password
    region: str | None = None
    profile: str | None = None
    timeout_s: float = 60.0
    attempts: int = 5
    part_bytes: int = PART_BYTES
    parts_in_flight: int = 4


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One object of a listing; `modified_s` is the store's clock, in seconds since 1970."""

    key: str
    size_bytes: int
    modified_s: float


class Store(abc.ABC):
    """Objects below one folder. Keys are relative to it and use `/`.

    Methods raise StoreError and are thread-safe. An object appears under its key complete or not at all.
    """

    url: str
    options: StoreOptions
    range_bytes = PART_BYTES  # adjacent blocks are read in one request up to this size
    sent_bytes = 0  # by `put` since the store was opened, part by part, to report progress
    host: str | None = None  # identifies the machine whose page cache all its processes share

    @abc.abstractmethod
    def put(self, key: str, data: bytes | memoryview) -> None:
        """Writes or overwrites an object of any size; a large one in parts, from the given memory."""

    @abc.abstractmethod
    def put_new(self, key: str, data: bytes) -> bool:
        """Writes a small object unless the key exists. Exactly one of several writers succeeds.

        Returns:
            Whether the object was written. It may be False for the writer that succeeded, if the response was lost and
            the request retried: read the object back.
        """

    @abc.abstractmethod
    def size_bytes(self, key: str) -> int | None:
        """Size of an object; None if it does not exist."""

    @abc.abstractmethod
    def scan(self, prefix: str = "") -> Iterator[Entry]:
        """All objects whose key begins with `prefix`, sorted by key."""

    @abc.abstractmethod
    def delete(self, keys: Iterable[str]) -> None:
        """Deletes objects. Missing ones are ignored."""

    @abc.abstractmethod
    def get(self, key: str, most_bytes: int = SMALL_BYTES) -> bytes:
        """Reads a small object. Raises NotAnObjectError if it has more than `most_bytes`."""

    @abc.abstractmethod
    def read_into(self, key: str, start: int, out: memoryview, see: See = lambda piece: None) -> None:
        """Fills `out` with the bytes from `start` on, and passes them to `see` in order. Raises StoreError if the
        object ends before."""

    @abc.abstractmethod
    def now_s(self) -> float:
        """The store's clock in seconds since 1970, comparable with `Entry.modified_s`."""

    def free_bytes(self) -> int | None:
        """Room for new objects; None where the store cannot tell."""
        return None

    def check(self) -> None:
        """Raises StoreError if the folder cannot be listed or written to.

        Called at the start of a run, whose first save may be hours later. Does not need permission to delete.
        """
        for _ in self.scan("commits/"):
            break
        for _ in range(PROBE_TRIES):
            self.put_new(PROBE, b"")
            second_won = self.put_new(PROBE, b"")
            with contextlib.suppress(StoreError):
                self.delete([PROBE])
            if not second_won:
                return
        raise DeniedError(
            f"{self.url} ignores the condition of a write (If-None-Match: * on S3) and overwrites, so that "
            "two runs could commit the same step: use a store that supports conditional writes"
        )


def checked_key(key: str) -> str:
    """Returns the key if it stays within the store's folder.

    Raises:
        NotAnObjectError: the key or a part of it is empty, `.` or `..`, or has a backslash or unprintable character.
    """
    if any(part in ("", ".", "..") for part in key.split("/")) or "\\" in key or not key.isprintable():
        raise NotAnObjectError(f"{key!r} cannot be the name of an object in a folder of checkpoints")
    return key


def folder_problem(folder: str) -> str | None:
    """Why this folder cannot hold checkpoints, found without writing to it; None if it may.

    Otherwise `s3:/bucket/run` would be a local folder, and a file in its place would be found by the first save.
    """
    scheme, separator, rest = folder.partition("://")
    if separator and scheme not in (*CLOUDS, "file"):
        return _unknown_scheme(scheme, rest)
    if separator and scheme in CLOUDS:
        bucket = rest.partition("/")[0]
        if "@" in bucket:
            return f"its bucket has a user or password: give credentials in the environment and write {scheme}://bucket/run"
        return None if bucket else f"it names no bucket: write {scheme}://bucket/run"
    if not separator and (slip := re.match(rf"(?i)({'|'.join(CLOUDS)}|file):/*", folder)):
        kind, rest = slip[1].lower(), folder[slip.end() :]
        right = f"file:///{rest}" if kind == "file" else f"{kind}://{rest}"
        return f"an address begins with {kind}://; write {right}"
    if not separator and (other := re.match(r"([A-Za-z][A-Za-z0-9+.-]*):", folder)):
        return _unknown_scheme(other[1], folder[other.end() :])
    path = Path(rest if separator else folder).expanduser().absolute()
    place = next(place for place in (path, *path.parents) if os.path.lexists(place))
    try:
        mode = place.stat().st_mode
    except FileNotFoundError:
        return f"{place} is a link to nothing; name another path"
    except OSError:
        return None  # no permission: the store reports it
    if stat.S_ISDIR(mode):
        return None
    kind = "a file" if stat.S_ISREG(mode) else "a device or pipe"
    return f"{place} is {kind}, not a folder; name another path"


def endpoint_problem(address: str) -> str | None:
    """The fault in the address of a store's server; None without one. The text does not repeat the address."""
    try:
        parts = urlsplit(address)
        host, path, _ = parts.hostname, parts.path, parts.port
    except ValueError:
        host, path = None, ""
    if "@" in path or (host and ("?" in address or "#" in address)):
        return (
            "must be http://host:port without an @ outside of its host part, a query or a fragment: set credentials in "
            "the environment (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, for S3)"
        )
    if not host or not re.fullmatch(r"(?i)https?://[^\s\\]+", address):
        return "must begin with http:// or https:// and name a host, for example https://host:port"
    return None


def _unknown_scheme(scheme: str, rest: str) -> str:
    """The error for an unsupported scheme, with what to write instead."""
    if scheme.lower() == "dbfs":
        volume = "/" + rest.lstrip("/")
        instead = volume if volume.startswith("/Volumes/") else "/Volumes/CATALOG/SCHEMA/VOLUME/run"
        return f"dbfs: is not supported; a Unity Catalog volume is a path: write {instead}"
    instead = {
        "oci": "write s3://bucket/run, with the bucket's S3 Compatibility API as endpoint_url",
        **dict.fromkeys(("abfs", "abfss", "adl", "azure", "wasb", "wasbs"), "write az://container/run"),
        **dict.fromkeys(("gcs", "gcp"), "write gs://bucket/run"),
    }.get(scheme.lower(), f"use {FORM} (./{scheme}:... for a local folder of that name)")
    return f"{scheme}: is not supported; {instead}"
