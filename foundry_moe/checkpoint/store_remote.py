"""The common part of stores over HTTP: streaming reads, limits of time and size, and retries."""

from __future__ import annotations

import abc
import contextlib
import datetime
import random
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from foundry_moe.checkpoint.errors import (
    FREE_SPACE,
    DeniedError,
    ExistsError,
    NotAnObjectError,
    NotFoundError,
    StoreError,
)
from foundry_moe.checkpoint.store import SMALL_BYTES, Entry, See, Store, StoreOptions, checked_key, endpoint_problem

T = TypeVar("T")

SLOWEST_BYTES_PER_S = 2**16  # a slower transfer counts as stalled
FIRST_WAIT_S = 0.2  # before the second attempt at a request
NAMES = {"s3": "S3", "gs": "Google Cloud Storage", "az": "Azure Blob Storage"}
_MAKING = threading.Lock()  # boto3 clients must be created by one thread at a time
_NO_BUCKET = (NotFoundError, "bucket {bucket!r} does not exist; create it or correct `folder`")
_SKEWED = (DeniedError, "this machine's clock is far off; set it right, for example by NTP")
_FULL = (StoreError, f"the store is full ({{code}}); {FREE_SPACE}")
Codes = dict[str, tuple[type[StoreError], str]]  # for codes of a cloud's answer, an error with its message
CODES: Codes = {  # of all clouds
    **dict.fromkeys(("NoSuchBucket", "ContainerNotFound"), _NO_BUCKET),
    **dict.fromkeys(("RequestTimeTooSkewed", "RequestExpired"), _SKEWED),
    **dict.fromkeys(("QuotaExceeded", "InsufficientStorage", "XMinioStorageFull", "AccountIsFull", "507"), _FULL),
}
CLOCK = "owners/clock"  # an empty object; its modification time is the store's clock


class RemoteStore(Store):
    """Objects below `SCHEME://bucket/prefix`. The size that a response announces is checked against its bytes."""

    codes = CODES

    def __init__(self, folder: str, options: StoreOptions | None = None) -> None:
        self.options = options or StoreOptions()
        self.scheme, _, rest = folder.partition("://")
        self.bucket, _, prefix = rest.partition("/")
        self.prefix = prefix.strip("/") + "/" if prefix.strip("/") else ""
        self.url = f"{self.scheme}://{self.bucket}/{self.prefix}".rstrip("/")
        self._made: Any = None

    @property
    def _client(self) -> Any:
        with _MAKING:
            if self._made is None:
                self._made = self._make_client()
            return self._made

    @abc.abstractmethod
    def _make_client(self) -> Any:
        """Creates the cloud's client. Raises StoreError if it cannot."""

    def _key(self, key: str) -> str:
        return self.prefix + checked_key(key)

    def _entry(self, name: str, size_bytes: int, modified: datetime.datetime, action: str) -> Entry | None:
        """An entry of a listing; None for a folder object such as `steps/`, or a path out of the folder."""
        try:
            key, modified_s = checked_key(name.removeprefix(self.prefix)), modified.timestamp()
        except NotAnObjectError:
            return None
        except (ValueError, OverflowError) as error:
            raise self._strange(action, "an object has no valid date") from error
        return Entry(key=key, size_bytes=size_bytes, modified_s=modified_s)

    def _strange(self, action: str, reason: str) -> StoreError:
        return StoreError(
            f"could not {action} in {self.url}: the endpoint did not answer as {NAMES[self.scheme]} ({reason}); check "
            "`endpoint_url`, and the proxies in between"
        )

    def _retry(self, action: Callable[[], T]) -> T:
        """Runs `action` until it succeeds, at most `options.attempts` times, with exponential backoff and jitter.

        A `lasting` StoreError is raised at once.
        """
        for attempt in range(1, self.options.attempts):
            try:
                return action()
            except StoreError as error:
                if error.lasting:
                    raise
                time.sleep(FIRST_WAIT_S * 2 ** (attempt - 1) * (0.5 + random.random()))
        return action()

    @abc.abstractmethod
    def _create(self, key: str, data: bytes) -> None:
        """Writes a small object if it does not exist. Raises ExistsError if it does."""

    @abc.abstractmethod
    def open(self, key: str, span: tuple[int, int] | None) -> AbstractContextManager[tuple[int, Iterator[bytes]]]:
        """Opens an object, or a span (start, count) of it, for reading: the announced size, and the bytes."""

    def _known(self, code: str, action: str) -> StoreError | None:
        """The error for a code of `codes`; None for another code."""
        if code not in self.codes:
            return None
        kind, message = self.codes[code]
        return kind(f"could not {action} in {self.url}: {message.format(bucket=self.bucket, code=code)}")

    def now_s(self) -> float:
        key = f"{CLOCK}-{secrets.token_hex(8)}"
        try:
            self.put(key, b"")
        except DeniedError:
            return time.time()  # without permission to write, nothing is deleted by this clock
        found = [entry.modified_s for entry in self.scan(CLOCK) if entry.key == key]
        with contextlib.suppress(StoreError):
            self.delete([key])
        if not found:
            raise StoreError(f"{self.url} does not list {key}, which was written: its clock cannot be read")
        return found[0]

    def put_new(self, key: str, data: bytes) -> bool:
        try:  # S3 says 409 while another conditional write is under way
            self._retry(lambda: self._create(key, data))
        except ExistsError:
            return False
        return True

    def get(self, key: str, most_bytes: int = SMALL_BYTES) -> bytes:
        return self._retry(lambda: b"".join(self._receive(key, None, most_bytes)))

    def read_into(self, key: str, start: int, out: memoryview, see: See = lambda piece: None) -> None:
        if not len(out):
            return

        def attempt() -> None:
            done = 0
            for piece in self._receive(key, (start, len(out)), len(out)):
                out[done : done + len(piece)] = piece
                done += len(piece)
            if done < len(out):
                raise StoreError(f"{self.url}/{key} ends {len(out) - done} bytes before byte {start + len(out)}")

        self._retry(attempt)
        see(out)

    def _receive(self, key: str, span: tuple[int, int] | None, most_bytes: int) -> Iterator[bytes]:
        """Yields an object, or a span of it, of at most `most_bytes`.

        Raises:
            StoreError: another number of bytes arrives than announced, or they arrive too slowly (see `limit_of`).
        """
        with self.open(key, span) as (size_bytes, pieces):
            done = 0
            if size_bytes > most_bytes and span is None:
                raise NotAnObjectError(f"{self.url}/{key} has {size_bytes} bytes, more than the limit of {most_bytes}")
            if size_bytes > most_bytes:
                raise StoreError(f"{self.url}/{key}: {size_bytes} bytes came where {most_bytes} were asked")
            limit_s, began_s = limit_of(self.options.timeout_s, size_bytes), time.monotonic()
            for piece in pieces:
                done += len(piece)
                if done > size_bytes:
                    raise StoreError(f"{self.url}/{key}: more than {size_bytes} bytes came")
                yield piece
                if done < size_bytes and time.monotonic() - began_s > limit_s:
                    raise StoreError(
                        f"could not read {key} in {self.url}: {done} of {size_bytes} bytes came in {limit_s:.0f} s"
                    )
            if done < size_bytes:
                raise StoreError(f"{self.url}/{key}: {done} of {size_bytes} bytes came")


def limit_of(timeout_s: float, size_bytes: int) -> float:
    """The time limit, in seconds, of one attempt at a request that transfers this many bytes."""
    return timeout_s + size_bytes / SLOWEST_BYTES_PER_S


def client_address(address: str | None, where: str = "endpoint_url") -> str | None:
    """The address without user and password, which clients would print in logs and errors.

    Raises:
        DeniedError: it is not the address of a server.
    """
    if address is None:
        return None
    if problem := endpoint_problem(address):
        raise DeniedError(f"{where} {problem}")
    scheme, _, rest = address.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"
