"""Answers that no S3 server gives: each ends in one sentence, in time, and without memory for what was not asked."""

from __future__ import annotations

import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from typing import Any

import psutil
import pytest

from foundry_moe.checkpoint import store_s3
from foundry_moe.checkpoint.errors import DeniedError, NotAnObjectError, StoreError
from foundry_moe.checkpoint.store import Store
from tests.helpers.s3_servers import served

ITEM = "<Contents><Key>run/a</Key><Size>1</Size><LastModified>2020-01-01T00:00:00.000Z</LastModified></Contents>"


def page(items: str = ITEM, more: str = "") -> bytes:
    return f"<ListBucketResult><Name>bucket</Name>{items}{more}</ListBucketResult>".encode()


class Answer(BaseHTTPRequestHandler):
    """Gives one answer to everything."""

    body, headers_sent, status = b"", {}, 200

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response_only(self.status)
        headers = {"Content-Length": str(len(self.body)), "ETag": "x", **self.headers_sent}
        for name, value in headers.items():
            if value:
                self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(self.body)

    do_PUT = do_POST = do_DELETE = do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        pass


def handler(**values: Any) -> type[BaseHTTPRequestHandler]:
    return type("Handler", (Answer,), values)


def listing(store: Store) -> Any:
    return list(store.scan())


LISTINGS = {
    "no time": page(ITEM.replace("<LastModified>2020-01-01T00:00:00.000Z</LastModified>", "")),
    "no size": page(ITEM.replace("<Size>1</Size>", "")),
    "no key": page(ITEM.replace("<Key>run/a</Key>", "")),
    "a size that is text": page(ITEM.replace(">1<", ">many<")),
    "a size below zero": page(ITEM.replace(">1<", ">-1<")),
    "a time that is text": page(ITEM.replace("2020-01-01T00:00:00.000Z", "yesterday")),
    "a time before the first year": page(ITEM.replace("2020-01-01T00:00:00.000Z", "0001-01-01T00:00:00")),
    "more, and no token": page(more="<IsTruncated>true</IsTruncated>"),
    "a page that follows itself": page(
        more="<IsTruncated>true</IsTruncated><NextContinuationToken>t</NextContinuationToken>"
    ),
    "no XML": b"<ListBucketResult><Name>",
}


@pytest.mark.parametrize("name", LISTINGS)
def test_a_listing_that_lacks_what_s3_gives_is_a_sentence(moto, name) -> None:
    with (
        served(handler(body=LISTINGS[name]), attempts=1) as store,
        pytest.raises(StoreError, match=r"as S3|500 Internal Server Error"),
    ):
        listing(store)


def test_a_clock_whose_object_is_not_listed_is_a_sentence(moto) -> None:
    with served(handler(body=page()), attempts=1) as store, pytest.raises(StoreError, match="clock cannot be read"):
        store.now_s()


@pytest.mark.parametrize("length", ["many", "-5", ""])
@pytest.mark.parametrize("what", ["size", "get"])
def test_a_length_that_is_no_number_is_a_sentence(moto, length, what) -> None:
    with served(handler(headers_sent={"Content-Length": length}), attempts=1) as store:
        with pytest.raises(StoreError):
            store.size_bytes("a") if what == "size" else store.get("a")


@pytest.mark.parametrize("status", [301, 307])
@pytest.mark.parametrize("call", [listing, lambda store: store.get("a"), lambda store: store.put("a", b"1")])
def test_a_redirect_to_itself_is_a_sentence(moto, status, call: Callable[[Store], Any]) -> None:
    body = b"<Error><Code>PermanentRedirect</Code><Endpoint>localhost</Endpoint><Bucket>bucket</Bucket></Error>"
    sent = {"Location": "/bucket", "x-amz-bucket-region": "us-east-1"}
    with served(handler(status=status, body=body, headers_sent=sent), attempts=1) as store:
        with pytest.raises(StoreError):
            call(store)


def test_a_listing_that_never_ends_is_given_up(moto, monkeypatch) -> None:
    monkeypatch.setattr(store_s3, "MAX_PAGES", 20)
    seen = []

    class Endless(Answer):
        def do_GET(self) -> None:
            seen.append(self.path)
            token = f"<IsTruncated>true</IsTruncated><NextContinuationToken>{len(seen)}</NextContinuationToken>"
            self.body = page(more=token)
            super().do_GET()

    with served(Endless, attempts=1) as store, pytest.raises(StoreError, match="more than 20 pages"):
        listing(store)
    assert len(seen) == 20


class Gush(Answer):
    """A body of 3 GB, whatever was said before."""

    total, listed = 3 * 2**30, False

    def do_GET(self) -> None:
        self.send_response_only(200)
        self.send_header("ETag", "x")
        self.send_header("Content-Length", str(10 if self.command == "HEAD" else self.total))
        self.end_headers()
        if self.command == "HEAD":
            return
        piece = b" " * 2**20
        try:
            for _ in range(0, self.total, len(piece)):
                self.wfile.write(piece)
        except OSError:
            pass  # hung up on, as it should be


@pytest.mark.parametrize("call", [lambda store: store.get("a"), listing])
def test_an_answer_larger_than_was_asked_for_is_not_held(moto, call: Callable[[Store], Any]) -> None:
    process, most = psutil.Process(), 0
    before = process.memory_info().rss

    class Watched(Gush):
        def do_GET(self) -> None:
            super().do_GET()

    with served(Watched, attempts=1) as store:
        began_s = time.monotonic()
        with pytest.raises(StoreError) as failed:
            call(store)
        assert time.monotonic() - began_s < 60
        most = process.memory_info().rss - before
    assert most < 2**29
    assert "3221225472 bytes, more than" in str(failed.value) or "has more than 67108864 bytes" in str(failed.value)


def test_no_part_is_begun_after_one_was_denied(moto, monkeypatch) -> None:
    begun = []

    def answer(action: str, call: str, **given: Any) -> dict[str, Any]:
        if call == "upload_part":
            begun.append(given["PartNumber"])
            if given["PartNumber"] == 2:
                raise DeniedError("denied")
            time.sleep(0.5)
        return {"UploadId": "u", "ETag": "e"}

    with served(Answer, attempts=1, part_bytes=2**20, parts_in_flight=2) as store:
        monkeypatch.setattr(store, "_call", answer)
        with pytest.raises(DeniedError):
            store.put("a", bytes(20 * 2**20))
    assert len(begun) <= 4


def test_a_small_object_is_read_within_its_limit(store) -> None:
    store.put("a", b"12345")
    assert store.get("a", 5) == b"12345"
    with pytest.raises(NotAnObjectError, match="more than the limit of 4"):
        store.get("a", 4)


class Careless(Answer):
    """A store that keeps objects and knows nothing of conditions."""

    objects: dict[str, bytes]

    def do_PUT(self) -> None:
        self.objects[self.path] = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.reply(200, b"")

    def do_GET(self) -> None:
        self.reply(200, page(""))

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.reply(200, b"<DeleteResult></DeleteResult>")

    def reply(self, status: int, body: bytes) -> None:
        self.send_response_only(status)
        self.send_header("ETag", "x")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def test_a_store_that_ignores_the_condition_is_refused_at_the_start(moto) -> None:
    with served(type("Handler", (Careless,), {"objects": {}}), attempts=1) as store:
        with pytest.raises(DeniedError, match=r"ignores the condition .* two runs could commit the same step"):
            store.check()


def test_a_store_that_keeps_the_condition_passes_where_others_check_at_the_same_time(store, monkeypatch) -> None:
    real, calls = store.put_new, []

    def put_new(key: str, data: bytes) -> bool:
        calls.append(key)
        if len(calls) == 2:
            store.delete([key])  # another run's check, between the two writes of ours
        return real(key, data)

    monkeypatch.setattr(store, "put_new", put_new)
    store.check()
    assert len(calls) == 4


def test_text_of_an_error_cannot_move_a_terminal(moto) -> None:
    body = "<Error><Code>Strange\x9b2J</Code><Message>\x9b31m\u202ered</Message></Error>".encode()
    with served(handler(status=400, body=body), attempts=1) as store, pytest.raises(StoreError) as failed:
        store.put("a", b"1")
    assert str(failed.value).isprintable() and "x9b31m" in str(failed.value)
