"""The one place through which checkpoints reach storage: `Store`, and what it promises.

A store holds named byte strings ("objects") below one folder. It does not depend on checkpoints. `store_s3` speaks to
S3 through boto3, `store_cloud` to Google and Azure through obstore; `store_file` keeps the same promises on a file
system.
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

from foundry_moe.checkpoint.errors import DeniedError, NotAnObjectError, StoreError

CLOUDS = ("s3", "gs", "az")  # schemes of addresses
FORM = "s3://bucket/run, gs://bucket/run, az://container/run or a path"

PART_BYTES = 16 * 2**20  # of 8, 16, 32 and 64 MiB the fastest against Ceph RGW and moto; S3 requires at least 5 MiB
SMALL_BYTES = 2**20  # the most that `get` holds in memory by default
See = Callable[[memoryview], object]
PROBE = "probe"  # an empty object, written and deleted to see whether that can be done
PROBE_TRIES = 3  # another run's check may delete the object between two writes of ours


@dataclass(frozen=True, kw_only=True)
class StoreOptions:
    """How patient a store is. `timeout_s` is for one connection attempt or one silence on an open connection."""

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

    All methods raise a `StoreError`, and are safe to call from several threads. An object is visible under its key
    whole or not at all.
    """

    url: str
    options: StoreOptions
    range_bytes = PART_BYTES  # blocks that lie together are read at once up to this size
    host: str | None = None  # where objects are cached for all processes of a machine: equal on that machine alone

    @abc.abstractmethod
    def put(self, key: str, data: bytes) -> None:
        """Writes a small object, over another if there is one."""

    @abc.abstractmethod
    def put_new(self, key: str, data: bytes) -> bool:
        """Writes a small object unless the key exists: of several writers exactly one gets True.

        False may also mean that an earlier try of this very call won and its answer was lost: read it back.
        """

    @abc.abstractmethod
    def size_bytes(self, key: str) -> int | None:
        """An object's size; None if there is none."""

    @abc.abstractmethod
    def scan(self, prefix: str = "") -> Iterator[Entry]:
        """All objects whose key begins with `prefix`, by key."""

    @abc.abstractmethod
    def delete(self, keys: Iterable[str]) -> None:
        """Deletes objects; one that is not there is no error."""

    @abc.abstractmethod
    def put_large(self, key: str, data: memoryview) -> None:
        """Writes an object of any size straight from memory, in parts."""

    @abc.abstractmethod
    def get(self, key: str, most_bytes: int = SMALL_BYTES) -> bytes:
        """A small object's bytes. A larger one is a NotAnObjectError; no more than the limit is held in memory."""

    @abc.abstractmethod
    def read_into(self, key: str, start: int, out: memoryview, see: See = lambda piece: None) -> None:
        """Fills `out` with the bytes from `start` on, and gives them to `see` in order. A shorter object is a
        StoreError."""

    @abc.abstractmethod
    def now_s(self) -> float:
        """The store's clock, in seconds since 1970, comparable with `Entry.modified_s`."""

    @abc.abstractmethod
    def exists(self) -> bool:
        """Whether the folder is there; on a cloud's store, which has no folders, whether it holds an object."""

    def check(self) -> None:
        """Raises a StoreError with one sentence if the folder cannot be listed or written to.

        Else a run would learn of it from its first saves, hours later. Permission to delete is not needed.
        """
        for _ in self.scan("commits/"):
            break
        if not any(self._second_writer_loses() for _ in range(PROBE_TRIES)):
            raise DeniedError(
                f"{self.url} overwrites an object that was to be written only if there is none (on S3 with "
                "If-None-Match: *): two runs could commit the same step. Use a store that supports conditional writes"
            )

    def _second_writer_loses(self) -> bool:
        """Writes an object twice as a commit is written: of two such writes a store may accept one."""
        self.put_new(PROBE, b"")
        second_won = self.put_new(PROBE, b"")
        with contextlib.suppress(StoreError):
            self.delete([PROBE])
        return not second_won

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"


def checked_key(key: str) -> str:
    """The key, if it cannot lead out of the store's folder.

    Raises:
        NotAnObjectError: it is empty, or has a part that is empty, `.` or `..`, or a character that no key has.
    """
    if any(part in ("", ".", "..") for part in key.split("/")) or "\\" in key or not key.isprintable():
        raise NotAnObjectError(f"{key!r} cannot be the name of an object in a folder of checkpoints")
    return key


def folder_problem(folder: str) -> str | None:
    """Why this folder can never hold checkpoints, whatever is asked of it; None if it may. Nothing is made.

    `s3:/bucket/run` would be the local folder `s3:`, and a file in the way would be found by the first save.
    """
    scheme, separator, rest = folder.partition("://")
    if separator and scheme not in (*CLOUDS, "file"):
        return _unknown_scheme(scheme, rest)
    if separator and scheme in CLOUDS:
        return None if rest.partition("/")[0] else f"it names no bucket: write {scheme}://bucket/run"
    if not separator and (slip := re.match(rf"(?i)({'|'.join(CLOUDS)}|file):/*", folder)):
        kind, rest = slip[1].lower(), folder[slip.end() :]
        right = f"file:///{rest}" if kind == "file" else f"{kind}://{rest}"
        return f"an address begins with {kind}://; write {right}"
    if not separator and (other := re.match(r"([A-Za-z][A-Za-z0-9+.-]*):", folder)):
        return _unknown_scheme(other[1], folder[other.end() :])
    path = Path(rest if separator else folder).expanduser().absolute()
    for place in (path, *path.parents):
        if not os.path.lexists(place):
            continue
        try:
            mode = place.stat().st_mode
        except FileNotFoundError:
            return f"{place} is a link to nothing; name another path"
        except OSError:
            return None  # no right to look: the store says so when it is asked
        if not stat.S_ISDIR(mode):
            kind = "a file" if stat.S_ISREG(mode) else "a device or pipe"
            return f"{place} is {kind}, not a folder; name another path"
        return None
    return None


def is_remote(folder: str) -> bool:
    """Whether a folder is an address (`s3://...`) and not a path."""
    return "://" in folder


def _unknown_scheme(scheme: str, rest: str) -> str:
    """What to write instead of an address of another kind."""
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
