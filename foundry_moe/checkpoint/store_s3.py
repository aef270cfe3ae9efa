"""A store on S3 and what speaks its protocol, through boto3. The only module that imports boto3.

Endpoint, region and credentials come the way boto3's users expect: arguments, environment, profile, instance role.
What boto3 retries (503, resets) it retries; what it does not (a body cut short, 409 on a conditional write) we do.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from email.utils import parsedate_to_datetime
from typing import Any

import boto3
import botocore.exceptions as bce
from botocore.config import Config

from foundry_moe.checkpoint.errors import (
    ClockError,
    DeniedError,
    FullError,
    NotAnObjectError,
    NotFoundError,
    StoreError,
)
from foundry_moe.checkpoint.store import Entry, Store, StoreOptions, checked_key, with_retries

SEND_BYTES = 2**20
MAX_PARTS = 10_000  # S3's own limit
DELETE_BATCH = 1_000  # S3's own limit
MISSING = {"NoSuchKey", "404", "NotFound", "NoSuchUpload"}
DENIED = {"AccessDenied", "403", "Forbidden", "AllAccessDisabled", "AccountProblem"}
WRONG_KEYS = {"InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken", "TokenRefreshRequired"}
SKEWED = {"RequestTimeTooSkewed", "RequestExpired"}
FULL = {"QuotaExceeded", "InsufficientStorage", "XMinioStorageFull", "507"}


class _View:
    """A piece of memory as a file that boto3 can send without a copy.

    `read` may return more than it was asked for: the HTTP client sends what it gets, and in blocks of 16 KiB it
    would hold the interpreter's lock most of the time.
    """

    def __init__(self, data: memoryview) -> None:
        self.data, self.position = data, 0

    def __len__(self) -> int:
        return len(self.data)

    def read(self, count: int = -1) -> bytes | memoryview:
        count = len(self.data) if count < 0 else max(count, SEND_BYTES)
        piece = self.data[self.position : self.position + count]
        self.position += len(piece)
        return piece if len(piece) else b""

    def seek(self, offset: int, whence: int = 0) -> int:
        self.position = offset + (0, self.position, len(self.data))[whence]
        return self.position

    def tell(self) -> int:
        return self.position


class S3Store(Store):
    """Objects below `s3://bucket/prefix`."""

    def __init__(self, folder: str, options: StoreOptions | None = None) -> None:
        self.options = options or StoreOptions()
        self.bucket, _, prefix = folder.removeprefix("s3://").partition("/")
        self.prefix = prefix.strip("/") + "/" if prefix.strip("/") else ""
        self.url = f"s3://{self.bucket}/{self.prefix}".rstrip("/")
        self._lock = threading.Lock()
        self._made: Any = None

    @property
    def _client(self) -> Any:
        with self._lock:
            if self._made is None:
                self._made = self._make_client()
            return self._made

    def _make_client(self) -> Any:
        options = self.options
        config = Config(
            connect_timeout=min(options.timeout_s, 10.0),
            read_timeout=options.timeout_s,
            retries={"mode": "standard", "total_max_attempts": options.attempts},
            max_pool_connections=max(10, 2 * options.parts_in_flight),
            tcp_keepalive=True,
            request_checksum_calculation="when_required",  # blocks carry hashes of our own
            response_checksum_validation="when_required",
        )
        try:
            session = boto3.session.Session(profile_name=options.profile, region_name=options.region)
            return session.client("s3", endpoint_url=options.endpoint_url, config=config)
        except (bce.BotoCoreError, ValueError) as error:
            raise self._translate(error, "reach") from error

    def _key(self, key: str) -> str:
        return self.prefix + checked_key(key)

    def exists(self) -> bool:
        return next(self.scan(), None) is not None

    def _call(self, action: str, operation: str, **arguments: Any) -> Any:
        try:
            return getattr(self._client, operation)(Bucket=self.bucket, **arguments)
        except (bce.BotoCoreError, bce.ClientError, OSError) as error:
            raise self._translate(error, action) from error

    def put(self, key: str, data: bytes) -> None:
        self._call(f"write {key}", "put_object", Key=self._key(key), Body=data)

    def put_new(self, key: str, data: bytes) -> bool:
        def attempt() -> bool:
            try:
                self._client.put_object(Bucket=self.bucket, Key=self._key(key), Body=data, IfNoneMatch="*")
                return True
            except bce.ClientError as error:
                if _code(error) in ("PreconditionFailed", "412"):
                    return False
                raise self._translate(error, f"write {key}") from error
            except (bce.BotoCoreError, OSError) as error:
                raise self._translate(error, f"write {key}") from error

        return with_retries(attempt, attempts=self.options.attempts)  # 409: another conditional write was under way

    def put_large(self, key: str, data: memoryview, *, on_part: Callable[[], None] = lambda: None) -> None:
        part_bytes = max(self.options.part_bytes, -(-len(data) // MAX_PARTS))
        if len(data) <= part_bytes:
            self._call(f"write {key}", "put_object", Key=self._key(key), Body=_View(data))
            on_part()
            return
        name = self._key(key)
        upload = self._call(f"write {key}", "create_multipart_upload", Key=name)["UploadId"]

        def send(number: int) -> dict[str, Any]:
            piece = data[(number - 1) * part_bytes : number * part_bytes]
            answer = self._call(
                f"write part {number} of {key}",
                "upload_part",
                Key=name,
                UploadId=upload,
                PartNumber=number,
                Body=_View(piece),
            )
            on_part()
            return {"PartNumber": number, "ETag": answer["ETag"]}

        try:
            with ThreadPoolExecutor(self.options.parts_in_flight, "checkpoint-upload") as pool:
                futures = [pool.submit(send, n) for n in range(1, -(-len(data) // part_bytes) + 1)]
                _, waiting = wait(futures, return_when=FIRST_EXCEPTION)
                for future in waiting:
                    future.cancel()
            parts = [future.result() for future in futures if not future.cancelled()]
            self._complete(key, upload, parts, len(data))
        except BaseException:
            with contextlib.suppress(StoreError):  # retention collects it later
                self._call("abort", "abort_multipart_upload", Key=name, UploadId=upload)
            raise

    def _complete(self, key: str, upload: str, parts: list[dict[str, Any]], size_bytes: int) -> None:
        try:
            self._call(
                f"complete {key}",
                "complete_multipart_upload",
                Key=self._key(key),
                UploadId=upload,
                MultipartUpload={"Parts": parts},
            )
        except NotFoundError:
            if self.size_bytes(key) != size_bytes:  # else an earlier try won and its answer was lost
                raise

    def get(self, key: str) -> bytes:
        def attempt() -> bytes:
            answer = self._call(f"read {key}", "get_object", Key=self._key(key))
            try:
                return answer["Body"].read()
            except (bce.BotoCoreError, OSError) as error:
                raise self._translate(error, f"read {key}") from error

        return with_retries(attempt, attempts=self.options.attempts)

    def read_into(self, key: str, start: int, out: memoryview) -> None:
        if not len(out):
            return

        def attempt() -> None:
            wanted = f"bytes={start}-{start + len(out) - 1}"
            answer = self._call(f"read {key}", "get_object", Key=self._key(key), Range=wanted)
            done = 0
            try:
                while done < len(out) and (count := answer["Body"].readinto(out[done:])):
                    done += count
            except (bce.BotoCoreError, OSError) as error:
                raise self._translate(error, f"read {key}") from error
            finally:
                answer["Body"].close()
            if done < len(out):
                raise StoreError(f"{self.url}/{key}: {done} of {len(out)} bytes came from byte {start} on")

        with_retries(attempt, attempts=self.options.attempts)

    def size_bytes(self, key: str) -> int | None:
        name = self._key(key)
        try:
            return self._call(f"look at {key}", "head_object", Key=name)["ContentLength"]
        except NotFoundError:
            return None

    def scan(self, prefix: str = "") -> Iterator[Entry]:
        arguments: dict[str, Any] = {"Prefix": self.prefix + prefix}
        while True:
            page = self._call(f"list {prefix}".rstrip(), "list_objects_v2", **arguments)
            for item in page.get("Contents", ()):
                key = item["Key"].removeprefix(self.prefix)
                try:
                    checked_key(key)
                except NotAnObjectError:
                    continue  # `steps/` as the S3 console makes it, or a name by which somebody wants to lead us out
                yield Entry(key=key, size_bytes=item["Size"], modified_s=item["LastModified"].timestamp())
            if not page.get("IsTruncated"):
                return
            arguments["ContinuationToken"] = page["NextContinuationToken"]

    def delete(self, keys: Iterable[str]) -> None:
        todo = [{"Key": self._key(key)} for key in keys]
        for start in range(0, len(todo), DELETE_BATCH):
            batch = {"Objects": todo[start : start + DELETE_BATCH], "Quiet": True}
            answer = self._call("delete old objects", "delete_objects", Delete=batch)
            for failed in answer.get("Errors", ()):
                if failed.get("Code") not in MISSING:
                    raise DeniedError(
                        f"could not delete {failed.get('Key')} in {self.url}: {failed.get('Message')}; "
                        "allow s3:DeleteObject or remove old checkpoints another way"
                    )

    def discard_unfinished(self, prefix: str, *, older_than_s: float) -> int:
        limit_s = self.now_s() - older_than_s
        stale = [upload for upload in self._unfinished(prefix) if upload["Initiated"].timestamp() <= limit_s]
        for upload in stale:
            self._call("abort", "abort_multipart_upload", Key=upload["Key"], UploadId=upload["UploadId"])
        return len(stale)

    def _unfinished(self, prefix: str) -> Iterator[dict[str, Any]]:
        arguments: dict[str, Any] = {"Prefix": self.prefix + prefix}
        while True:
            page = self._call("list unfinished uploads", "list_multipart_uploads", **arguments)
            yield from page.get("Uploads", ())
            if not page.get("IsTruncated"):
                return
            arguments["KeyMarker"] = page["NextKeyMarker"]
            arguments["UploadIdMarker"] = page["NextUploadIdMarker"]

    def now_s(self) -> float:
        page = self._call("list", "list_objects_v2", Prefix=self.prefix, MaxKeys=1)
        return parsedate_to_datetime(page["ResponseMetadata"]["HTTPHeaders"]["date"]).timestamp()

    def _translate(self, error: Exception, action: str) -> StoreError:
        where = f"could not {action} in {self.url}"
        if isinstance(error, bce.NoCredentialsError | bce.PartialCredentialsError):
            return DeniedError(
                f"{where}: no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, "
                "or give the machine a role"
            )
        if isinstance(error, bce.ProfileNotFound):
            return DeniedError(f"{where}: {error}; correct `profile` or AWS_PROFILE")
        if isinstance(error, bce.EndpointConnectionError):
            return StoreError(f"{where}: no answer from {error.kwargs.get('endpoint_url')}; check `endpoint_url`")
        if not isinstance(error, bce.ClientError):
            return StoreError(f"{where}: {error}")
        code, message = _code(error), error.response.get("Error", {}).get("Message", "")
        if code == "NoSuchBucket":
            return NotFoundError(f"{where}: bucket {self.bucket!r} does not exist; create it or correct `folder`")
        if code in MISSING:
            return NotFoundError(f"{where}: no such object")
        if code in DENIED:
            return DeniedError(f"{where}: no permission; allow s3:ListBucket, GetObject, PutObject and DeleteObject")
        if code in WRONG_KEYS:
            return DeniedError(f"{where}: the store refuses these credentials ({code}); renew them")
        if code in SKEWED:
            return ClockError(f"{where}: this machine's clock is far off ({message}); set it right, for example by NTP")
        if code in FULL:
            return FullError(f"{where}: the store is full ({code}); free some space or lower `keep`")
        return StoreError(f"{where}: {code} {message}".rstrip())


def _code(error: bce.ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))
