"""A store on S3 and compatible servers through boto3. The only module that imports boto3.

Endpoint, region and credentials come from arguments, environment, profile or instance role, as usual for boto3. boto3
retries 503 and connection resets; this module retries truncated bodies and 409 of conditional writes.
"""

from __future__ import annotations

import contextlib
import datetime
import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import Any
from urllib.parse import urlsplit

import boto3
import botocore.exceptions as bce
import numpy as np
from botocore.config import Config
from botocore.parsers import ResponseParserError
from urllib3.exceptions import HTTPError

from foundry_moe.checkpoint.errors import DeniedError, ExistsError, NotFoundError, StoreError
from foundry_moe.checkpoint.store import Entry, endpoint_problem
from foundry_moe.checkpoint.store_remote import CODES, Codes, RemoteStore, client_address, limit_of

PIECE_BYTES = 2**18  # largest read from a connection
OF_ENVIRONMENT = "the endpoint_url of AWS_ENDPOINT_URL, AWS_ENDPOINT_URL_S3 or the profile"
MAX_PARTS = 10_000  # S3's own limit
DELETE_BATCH = 1_000  # S3's own limit
MISSING = ("NoSuchKey", "404", "NotFound", "NoSuchUpload")
DENIED = ("AccessDenied", "403", "Forbidden", "AllAccessDisabled", "AccountProblem")
WRONG_KEYS = ("InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken", "TokenRefreshRequired")
_DENIED = (DeniedError, "no permission; allow s3:ListBucket, GetObject, PutObject and DeleteObject")
S3_CODES: Codes = {
    **dict.fromkeys(("PreconditionFailed", "412"), (ExistsError, "the object exists")),
    **dict.fromkeys(MISSING, (NotFoundError, "no such object")),
    **dict.fromkeys(DENIED, _DENIED),
    **dict.fromkeys(WRONG_KEYS, (DeniedError, "the store refuses these credentials ({code}); renew them")),
}
ALWAYS: dict[str, dict[str, type]] = {  # fields of every S3 response,
    "list_objects_v2": {"Name": str},
    "put_object": {"ETag": str},
    "upload_part": {"ETag": str},
    "create_multipart_upload": {"UploadId": str},
    "complete_multipart_upload": {"ETag": str},
    "get_object": {"ETag": str, "ContentLength": int},
    "head_object": {"ETag": str, "ContentLength": int},
}
LISTED = {"Key": str, "Size": int, "LastModified": datetime.datetime}  # fields of each entry of a listing
MAX_PAGES = 20_000  # limit of a listing, 1,000 objects each
ANSWER_BYTES = 2**26  # limit of a response that is not an object; a full page of a listing has 4 MB
UNREADABLE = (ResponseParserError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)


def _body(data: bytes | memoryview) -> bytearray:
    """A copy that is sent in one call; a file is sent in pieces of 16 KiB, each of which takes the GIL."""
    body = bytearray(len(data))
    np.frombuffer(body, np.uint8)[:] = np.frombuffer(data, np.uint8)  # releases the GIL
    return body


class _Limited:
    """A botocore HTTP session with a time limit for each request; botocore only limits each wait for a byte.

    A request above the limit continues in its thread, which ends when the store closes the connection.
    """

    def __init__(self, session: Any, timeout_s: float) -> None:
        self._session, self._timeout_s = session, timeout_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def send(self, request: Any) -> Any:
        sent_bytes = int(request.headers.get("Content-Length") or 0)
        limit_s = 2 * limit_of(self._timeout_s, sent_bytes)  # botocore's own timeouts, which say more, come first
        answer: Future[Any] = Future()

        def work() -> None:
            try:
                answer.set_result(self._receive(request))
            except BaseException as error:
                answer.set_exception(error)

        threading.Thread(target=work, name="checkpoint-request", daemon=True).start()
        if not wait([answer], limit_s).done:
            raise bce.ReadTimeoutError(endpoint_url=urlsplit(request.url).hostname)
        return answer.result()

    def _receive(self, request: Any) -> Any:
        """Sends a request and reads its response up to a limit; botocore has none. Objects are streamed."""
        is_object, request.stream_output = request.stream_output, True
        response = self._session.send(request)
        if not is_object or response.status_code >= 300:
            body = bytearray()
            try:
                while len(body) <= ANSWER_BYTES and (piece := response.raw.read1(PIECE_BYTES)):
                    body += piece
            except (HTTPError, OSError) as error:  # the error that botocore retries
                raise bce.ConnectionClosedError(endpoint_url=request.url, error=error) from error
            if len(body) > ANSWER_BYTES:
                response.raw.close()
                raise bce.ResponseStreamingError(error=f"an answer has more than {ANSWER_BYTES} bytes")
            response._content = bytes(body)
        return response


class S3Store(RemoteStore):
    """Objects below `s3://bucket/prefix`."""

    codes = CODES | S3_CODES

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
        address = client_address(options.endpoint_url)
        try:
            session = boto3.session.Session(profile_name=options.profile, region_name=options.region)
            client = session.client("s3", endpoint_url=address, config=config)
            found = client.meta.endpoint_url
            if (address := client_address(found, OF_ENVIRONMENT)) != found:
                client = session.client("s3", endpoint_url=address, config=config)
            # botocore has no option for the time limit of a whole request
            client._endpoint.http_session = _Limited(client._endpoint.http_session, options.timeout_s)
            return client
        except DeniedError:
            raise
        except ValueError:  # of botocore; its text may hold the address with the password
            raise DeniedError(f"{OF_ENVIRONMENT} {endpoint_problem('')}") from None
        except bce.BotoCoreError as error:
            raise self._translate(error, "reach") from None

    def _call(self, action: str, operation: str, **arguments: Any) -> Any:
        client = self._client  # outside of `try`: an error of the address is not one of a response
        try:
            answer = getattr(client, operation)(Bucket=self.bucket, **arguments)
        except (bce.BotoCoreError, bce.ClientError, OSError, *UNREADABLE) as error:
            raise self._translate(error, action) from error
        # a proxy may answer everything with 200 and a login page
        if operation == "get_object" and str(answer.get("ContentType", "")).startswith("text/html"):
            raise self._strange(action, "it returned HTML")
        return self._with_fields(answer, ALWAYS.get(operation, {}), action)

    def _with_fields(self, answer: Any, fields: Mapping[str, type], action: str) -> Any:
        """Returns a response or an entry of a listing; raises StoreError if it lacks one of the fields."""
        for name, kind in fields.items():
            value = answer.get(name) if isinstance(answer, Mapping) else None
            if not isinstance(value, kind) or (isinstance(value, int) and value < 0):
                raise self._strange(action, f"{name} is missing or invalid")
        return answer

    def _create(self, key: str, data: bytes) -> None:
        self._call(f"write {key}", "put_object", Key=self._key(key), Body=data, IfNoneMatch="*")

    def put(self, key: str, data: bytes | memoryview) -> None:
        part_bytes = max(self.options.part_bytes, -(-len(data) // MAX_PARTS))
        if len(data) <= part_bytes:
            self._call(f"write {key}", "put_object", Key=self._key(key), Body=_body(data))
            return
        name = self._key(key)
        upload = self._call(f"write {key}", "create_multipart_upload", Key=name)["UploadId"]

        def send(number: int) -> dict[str, Any]:
            piece = data[(number - 1) * part_bytes : number * part_bytes]
            part = {"UploadId": upload, "PartNumber": number, "Body": _body(piece)}
            answer = self._call(f"write part {number} of {key}", "upload_part", Key=name, **part)
            self.sent_bytes += len(piece)
            return {"PartNumber": number, "ETag": answer["ETag"]}

        try:
            with ThreadPoolExecutor(self.options.parts_in_flight, "checkpoint-upload") as pool:
                futures = [pool.submit(send, n) for n in range(1, -(-len(data) // part_bytes) + 1)]
                _, waiting = wait(futures, return_when=FIRST_EXCEPTION)
                for future in waiting:
                    future.cancel()
            parts = [future.result() for future in futures if not future.cancelled()]
            whole = {"UploadId": upload, "MultipartUpload": {"Parts": parts}}
            try:
                self._call(f"complete {key}", "complete_multipart_upload", Key=name, **whole)
            except NotFoundError:
                if self.size_bytes(key) != len(data):  # equal: it was completed and the response was lost
                    raise
        except BaseException:
            with contextlib.suppress(StoreError):
                self._call("abort", "abort_multipart_upload", Key=name, UploadId=upload)
            raise

    @contextlib.contextmanager
    def open(self, key: str, span: tuple[int, int] | None) -> Iterator[tuple[int, Iterator[bytes]]]:
        wanted = {} if span is None else {"Range": f"bytes={span[0]}-{sum(span) - 1}"}
        answer = self._call(f"read {key}", "get_object", Key=self._key(key), **wanted)
        size_bytes, body = answer["ContentLength"], answer["Body"]

        def pieces() -> Iterator[bytes]:
            left = size_bytes
            try:
                while left and (piece := body._raw_stream.read1(min(PIECE_BYTES, left))):
                    left -= len(piece)
                    yield piece
            except (bce.BotoCoreError, HTTPError, OSError) as error:
                raise self._translate(error, f"read {key}") from error

        with contextlib.closing(body):
            yield size_bytes, pieces()

    def size_bytes(self, key: str) -> int | None:
        name = self._key(key)
        try:
            return self._call(f"look at {key}", "head_object", Key=name)["ContentLength"]
        except NotFoundError:
            return None

    def scan(self, prefix: str = "") -> Iterator[Entry]:
        action, arguments = f"list {prefix}".rstrip(), {"Prefix": self.prefix + prefix}
        for _ in range(MAX_PAGES):
            page = self._call(action, "list_objects_v2", **arguments)
            items = page.get("Contents", [])
            if not isinstance(items, list):
                raise self._strange(action, "Contents is not a list")
            for item in items:
                self._with_fields(item, LISTED, action)
                entry = self._entry(item["Key"], item["Size"], item["LastModified"], action)
                if entry is not None:
                    yield entry
            if not page.get("IsTruncated"):
                return
            token = self._with_fields(page, {"NextContinuationToken": str}, action)["NextContinuationToken"]
            if token == arguments.get("ContinuationToken"):
                raise self._strange(action, "a page of the listing is followed by itself")
            arguments["ContinuationToken"] = token
        raise self._strange(action, f"its listing has more than {MAX_PAGES} pages")

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
        if isinstance(error, RecursionError):
            return self._strange(action, "it redirects without end")
        if isinstance(error, UNREADABLE):
            return self._strange(action, "its answer cannot be read")
        if not isinstance(error, bce.ClientError):
            return StoreError(f"{where}: {error}")
        details = error.response.get("Error", {})
        code, message = str(details.get("Code", "")), details.get("Message", "")
        return self._known(code, action) or StoreError(f"{where}: {code} {message}".rstrip())
