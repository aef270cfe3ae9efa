"""Stores on Google Cloud Storage (`gs://`) and Azure Blob Storage (`az://`) through obstore. Its only importer.

obstore reads credentials from the environment (`GOOGLE_*`, `AZURE_*`), a file, or the machine's identity. It retries
failed requests; this module limits time and size.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PermissionDeniedError, UnauthenticatedError
from obstore.store import AzureStore, GCSStore

from foundry_moe.checkpoint.errors import DeniedError, ExistsError, NotFoundError, StoreError, without_secrets
from foundry_moe.checkpoint.store import PART_BYTES, Entry
from foundry_moe.checkpoint.store_remote import CLOCK, RemoteStore, client_address, limit_of

PIECE_BYTES = 2**18  # minimum chunk of obstore's streams
REQUEST_BYTES = PART_BYTES  # size for which the time limit of a request is computed
MAX_PARTS = 10_000  # Google's limit; Azure's is 50,000
MAX_OBJECTS = 20_000_000  # limit of a listing
LISTED_AT_ONCE = 1000
ERRORS = (BaseError, OSError, ValueError, TypeError, KeyError, OverflowError)
CREDENTIALS = {
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS or GOOGLE_SERVICE_ACCOUNT, or give the machine a service account",
    "az": "set AZURE_STORAGE_ACCOUNT_NAME, and AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN or give the "
    "machine an identity",
}
ROLES = {"gs": "the role Storage Object Admin", "az": "the role Storage Blob Data Contributor"}
ENDPOINTS = ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT", "GOOGLE_BASE_URL")


class CloudStore(RemoteStore):
    """Objects below `gs://bucket/prefix` or `az://container/prefix`."""

    def _make_client(self) -> Any:
        options, limit_s = self.options, limit_of(self.options.timeout_s, REQUEST_BYTES)
        endpoint = client_address(options.endpoint_url)
        plain = any((address or "").startswith("http://") for address in (endpoint, *map(os.getenv, ENDPOINTS)))
        given: Any = {} if endpoint is None else {"endpoint" if self.scheme == "az" else "base_url": endpoint}
        kind: Any = AzureStore if self.scheme == "az" else GCSStore
        backoff = {"init_backoff": timedelta(seconds=0.2), "max_backoff": timedelta(seconds=5), "base": 2}
        try:
            return kind(
                self.bucket,
                config=given,
                client_options={
                    "allow_http": plain,
                    "connect_timeout": timedelta(seconds=min(options.timeout_s, 10.0)),
                    "read_timeout": timedelta(seconds=options.timeout_s),
                    "timeout": timedelta(seconds=limit_s),
                },
                retry_config={
                    "max_retries": options.attempts - 1,
                    "retry_timeout": timedelta(seconds=limit_s),
                    "backoff": backoff,
                },
            )
        except ERRORS as error:
            raise self._translate(error, "reach") from None

    def _call(self, action: str, function: Callable[..., Any], *arguments: Any, **more: Any) -> Any:
        client = self._client
        try:
            return function(client, *arguments, **more)
        except ERRORS as error:
            raise self._translate(error, action) from None

    def _create(self, key: str, data: bytes) -> None:
        self._call(f"write {key}", obstore.put, self._key(key), data, mode="create")

    def put(self, key: str, data: bytes | memoryview) -> None:
        part_bytes = max(self.options.part_bytes, -(-len(data) // MAX_PARTS))
        if len(data) <= part_bytes:
            self._call(f"write {key}", obstore.put, self._key(key), data, use_multipart=False)
            return

        def attempt() -> None:
            def parts() -> Iterator[bytes | memoryview]:
                for start in range(0, len(data), part_bytes):
                    yield (part := data[start : start + part_bytes])
                    self.sent_bytes += len(part)

            more = {"chunk_size": part_bytes, "max_concurrency": self.options.parts_in_flight}
            try:
                self._call(f"write {key}", obstore.put, self._key(key), parts(), **more)
            except StoreError:
                if self.size_bytes(key) != len(data):  # equal: it was completed and the response was lost
                    raise

        self._retry(attempt)

    @contextlib.contextmanager
    def open(self, key: str, span: tuple[int, int] | None) -> Iterator[tuple[int, Iterator[bytes]]]:
        action = f"read {key}"
        wanted = {} if span is None else {"range": (span[0], sum(span))}
        answer = self._call(action, obstore.get, self._key(key), options=wanted)
        begin, end = answer.range
        if begin != (span[0] if span else 0) or end < begin:
            raise self._strange(action, f"it sent bytes {begin} to {end}, which were not asked for")
        stream = answer.stream(min_chunk_size=PIECE_BYTES)

        def pieces() -> Iterator[bytes]:
            try:
                yield from stream
            except ERRORS as error:
                raise self._translate(error, action) from None

        yield end - begin, pieces()

    def size_bytes(self, key: str) -> int | None:
        try:
            return self._call(f"look at {key}", obstore.head, self._key(key))["size"]
        except NotFoundError:
            return None

    def scan(self, prefix: str = "") -> Iterator[Entry]:
        action, whole = f"list {prefix}".rstrip(), self.prefix + prefix

        def attempt() -> list[Any]:
            with ThreadPoolExecutor(1, "checkpoint-list") as pool:  # the caller's thread may run an event loop
                try:
                    return pool.submit(asyncio.run, self._list(self._client, whole, action)).result()
                except ERRORS as error:
                    raise self._translate(error, action) from None

        found = self._retry(attempt)
        if not found and self.size_bytes(f"{CLOCK}-{secrets.token_hex(8)}") is not None:
            # obstore reads an HTML page as an empty listing
            raise self._strange(action, "it reports that an object with a random name exists")
        below = [item for item in found if item["path"].startswith(whole)]
        entries = (self._entry(item["path"], item["size"], item["last_modified"], action) for item in below)
        return iter(sorted((entry for entry in entries if entry is not None), key=lambda entry: entry.key))

    async def _list(self, client: Any, prefix: str, action: str) -> list[Any]:
        """All objects below the folder of a prefix. The time limit also ends endless empty pages."""
        above = prefix.rpartition("/")[0] or None
        stream, found = obstore.list(client, above, chunk_size=LISTED_AT_ONCE).__aiter__(), []
        limit_s = limit_of(self.options.timeout_s, REQUEST_BYTES)
        while True:
            try:
                found += await asyncio.wait_for(stream.__anext__(), limit_s)
            except StopAsyncIteration:
                return found
            except (asyncio.TimeoutError, TimeoutError) as error:
                raise StoreError(f"could not {action} in {self.url}: nothing came in {limit_s:.0f} s") from error
            if len(found) > MAX_OBJECTS:
                raise StoreError(f"could not {action} in {self.url}: its listing has more than {MAX_OBJECTS} objects")

    def delete(self, keys: Iterable[str]) -> None:
        todo = [self._key(key) for key in keys]
        for start in range(0, len(todo), LISTED_AT_ONCE):
            batch = todo[start : start + LISTED_AT_ONCE]
            try:
                self._call("delete old objects", obstore.delete, batch)
            except NotFoundError:  # one is missing, and then others may not have been deleted
                for name in batch:
                    with contextlib.suppress(NotFoundError):
                        self._call("delete old objects", obstore.delete, name)

    def _translate(self, error: Exception, action: str) -> StoreError:
        """Raise it from None: the cause has the address with its query."""
        where = f"could not {action} in {self.url}"
        if isinstance(error, AlreadyExistsError):
            return ExistsError(f"{where}: the object exists")
        text = " ".join(str(error).partition("\n\nDebug source")[0].split())
        text = without_secrets(text)  # a query may hold a signature
        status, code = (re.search(form, text) for form in (r"status code: (\d+)", r"<Code>(\w+)</Code>"))
        text = text.partition(" <")[0][:400] + (f" ({code[1]})" if code else "")
        number, name = status[1] if status else "", code[1] if code else ""
        known = self._known(name, action) or self._known(number, action)
        if known is not None:
            return known
        if isinstance(error, FileNotFoundError):
            return NotFoundError(f"{where}: no such object")
        if isinstance(error, PermissionDeniedError | UnauthenticatedError | PermissionError) or number in (
            "401",
            "403",
        ):
            return DeniedError(
                f"{where}: the store refuses these credentials, or they lack permission: give them "
                f"{ROLES[self.scheme]}, or {CREDENTIALS[self.scheme]} ({text})"
            )
        if re.search(r"token request|must be specified|[Cc]redential|Access Key|account", text):
            return DeniedError(f"{where}: no valid credentials: {CREDENTIALS[self.scheme]} ({text})")
        return StoreError(f"{where}: {text}")
