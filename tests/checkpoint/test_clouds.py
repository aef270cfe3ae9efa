"""Google's and Azure's stores: checkpoints on them, what is wrong with an account, and answers that no cloud gives."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from foundry_moe.checkpoint import open_store, store_cloud
from foundry_moe.checkpoint.committer import Retention
from foundry_moe.checkpoint.engine import CheckpointEngine
from foundry_moe.checkpoint.errors import DeniedError, NotAnObjectError, NotFoundError, StoreError, TakenOverError
from foundry_moe.checkpoint.ledger import Ledger
from foundry_moe.checkpoint.owners import Heartbeat, Identity, Owners
from foundry_moe.checkpoint.store import Store, StoreOptions
from foundry_moe.launch.checkpoint_settings import checkpoint_config
from tests.helpers.checkpoints import blank, check, damage, save, steps_in
from tests.helpers.clouds import NO_ACCOUNT, Google, GoogleServer
from tests.helpers.s3 import Proxy

QUICK = {"timeout_s": 0.5, "attempts": 1}


@pytest.fixture(params=["gs", "az"])
def cloud(request) -> Store:
    return request.getfixturevalue(request.param)


def test_a_run_saves_resumes_and_removes_old_checkpoints(cloud) -> None:
    cloud.check()
    assert list(cloud.scan()) == []
    save(cloud, 1, 2, 3, keep=2)
    assert steps_in(cloud) == [3, 2]
    check(CheckpointEngine(cloud).load(blank()), 3)
    damage(cloud, 3, "bit flipped")
    check(CheckpointEngine(cloud).load(blank()), 2)
    retention = Retention(Ledger(cloud))
    cloud.put("steps/000000000009/20200101T000000-deadbeef/data/000000.bin", b"left by a dead process")
    assert len(retention.collect(-1.0, own=True)) == 1
    assert Ledger(cloud).newest_first() and retention.collect(-1.0, own=True, dry_run=True) == {}


def test_a_restart_takes_the_folder_over(cloud) -> None:
    owners = Owners(cloud)
    first = owners.acquire(Identity(run_name="run"), has_commits=lambda: False)
    second = owners.acquire(Identity(run_name="run"), has_commits=lambda: False)
    owners.check(second)
    with pytest.raises(TakenOverError):
        owners.check(first)
    assert owners.living_since_s() is not None
    Heartbeat(owners, second).stop()
    assert owners.living_since_s() is None


@pytest.mark.parametrize("fault", ["503", "cut", "drop", "stall"])
def test_a_passing_fault_is_got_over(gs, google, fault) -> None:
    """Every third request fails."""
    turn = iter(range(10**6))
    host, port = google.url.removeprefix("http://").split(":")
    proxy = Proxy((host, int(port)), lambda *_: fault if next(turn) % 3 == 0 else None, stall_s=1.5)
    shaky = open_store(gs.url, StoreOptions(endpoint_url=proxy.url, timeout_s=1.0, part_bytes=5 * 2**20))
    content = bytes(range(256)) * 2**16
    try:
        shaky.put("small", b"1234567890")
        won = shaky.put_new("new", b"mine")
        assert (won or fault == "drop") and shaky.get("new") == b"mine"
        shaky.put("large", memoryview(content))
        out = bytearray(len(content))
        shaky.read_into("large", 0, memoryview(out))
        assert out == content and shaky.get("small") == b"1234567890"
        assert {entry.key for entry in shaky.scan()} == {"small", "new", "large"}
    finally:
        proxy.close()
    assert proxy.seen[fault] >= 2


def test_a_bucket_that_is_not_there_is_named(google, azurite) -> None:
    for address, endpoint in (("gs://other/run", google.url), ("az://other/run", azurite)):
        with pytest.raises(NotFoundError, match=r"'other' does not exist; create it or correct `folder`"):
            open_store(address, StoreOptions(endpoint_url=endpoint)).check()


def test_credentials_that_are_refused_or_missing_are_said(azurite, monkeypatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "AAAA")
    with pytest.raises(DeniedError, match=r"Storage Blob Data Contributor.*AZURE_STORAGE_ACCOUNT_KEY"):
        open_store("az://bucket/run", StoreOptions(endpoint_url=azurite)).check()
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "no key")
    with pytest.raises(DeniedError, match=r"no valid credentials.*AZURE_STORAGE_ACCOUNT_KEY"):
        open_store("az://bucket/run", StoreOptions(endpoint_url=azurite)).check()
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME")
    with pytest.raises(DeniedError, match=r"no valid credentials.*AZURE_STORAGE_ACCOUNT_NAME"):
        open_store("az://bucket/run", StoreOptions()).check()
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", "/nowhere.json")
    monkeypatch.delenv("GOOGLE_SERVICE_ACCOUNT_KEY", raising=False)
    with pytest.raises(DeniedError, match="GOOGLE_SERVICE_ACCOUNT"):
        open_store("gs://bucket/run", StoreOptions()).check()


def test_neither_a_password_nor_a_signature_is_said(monkeypatch, caplog) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_KEY", raising=False)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", "sv=2020&sig=hunter2")
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", NO_ACCOUNT)
    for address in ("az://bucket/run", "gs://bucket/run"):
        store = open_store(address, StoreOptions(endpoint_url="http://user:hunter2@127.0.0.1:1/x", **QUICK))
        with caplog.at_level(logging.DEBUG), pytest.raises(StoreError) as error:
            store.put("a", b"1")
        assert "hunter2" not in str(error.value) + caplog.text + repr(store) + repr(store.options)
        assert str(error.value).startswith(f"could not write a in {address}")


def test_what_is_of_s3_alone_is_refused_elsewhere() -> None:
    with pytest.raises(ValueError, match=r"region \(x\) applies to s3:// only"):
        checkpoint_config({"folder": "gs://bucket/run", "region": "x"})
    with pytest.raises(ValueError, match=r"profile \(x\) applies to s3:// only"):
        checkpoint_config({"folder": "az://bucket/run", "profile": "x"})


@pytest.mark.parametrize("scheme", ["gs", "az"])
def test_a_missing_client_is_a_sentence_that_says_what_to_install(monkeypatch, scheme) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.delitem(sys.modules, "foundry_moe.checkpoint.store_cloud")
    with pytest.raises(ValueError, match=r"needs obstore.*pip install 'obstore>=0.12,<1'"):
        open_store(f"{scheme}://bucket/run")


# Hostile answers

ITEM = "<Contents><Key>run/a</Key><Size>1</Size><LastModified>2020-01-01T00:00:00Z</LastModified></Contents>"
LISTINGS = {
    "no time": ITEM.replace("<LastModified>2020-01-01T00:00:00Z</LastModified>", ""),
    "no size": ITEM.replace("<Size>1</Size>", ""),
    "no key": ITEM.replace("<Key>run/a</Key>", ""),
    "a size that is text": ITEM.replace(">1<", ">many<"),
    "a size below zero": ITEM.replace(">1<", ">-1<"),
    "a time that is text": ITEM.replace("2020-01-01T00:00:00Z", "yesterday"),
    "a key with an empty part": ITEM.replace("run/a", "run//a"),
    "no XML": "<Contents><Key>",
}


class Answer(Google):
    """Gives one answer to everything."""

    body, sent, status = b"", {}, 200

    def answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        headers = {"ETag": '"1"', "Last_Modified": "Tue, 24 Nov 2026 00:00:00 GMT", **self.sent}
        self.reply(self.status, self.body, **{name: value for name, value in headers.items() if value is not None})

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = answer


def hostile(handler: type[Google], **values: Any) -> tuple[GoogleServer, Store]:
    server = GoogleServer(type("Hostile", (handler,), values))
    return server, open_store("gs://bucket/run", StoreOptions(endpoint_url=server.url, **QUICK))


def listing(store: Store) -> Any:
    return list(store.scan())


@pytest.mark.parametrize("name", LISTINGS)
def test_a_listing_that_no_cloud_gives_is_a_sentence(google, name) -> None:
    server, store = hostile(Answer, body=f"<ListBucketResult>{LISTINGS[name]}</ListBucketResult>".encode())
    with server, pytest.raises(StoreError, match="could not list"):
        listing(store)


@pytest.mark.parametrize("key", ["other/a", "run/../a", "runaway/a", "run/&#10;a", "/etc/passwd", "run/a\\b", "run"])
def test_a_name_outside_of_the_folder_is_not_listed(google, key) -> None:
    item = ITEM.replace("run/a", key)
    server, store = hostile(Answer, body=f"<ListBucketResult>{item}</ListBucketResult>".encode())
    with server:
        with contextlib.suppress(StoreError):
            assert listing(store) == []


PAGES = (b"<html><body>Please log in</body></html>", b"<!doctype html><p>no <b>XML", b"", b'{"error": "proxy"}')


@pytest.mark.parametrize("body", PAGES)
def test_what_is_no_cloud_is_no_empty_folder(google, azurite, body) -> None:
    server, store = hostile(Answer, body=body, sent={"ETag": None, "Content_Type": "text/html"})
    azure = open_store("az://bucket/run", StoreOptions(endpoint_url=server.url, **QUICK))
    with server:
        for folder in (store, azure):
            for call in (
                type(store).check,
                *(CALLS[name] for name in ("get", "range", "size", "list", "put")),
            ):
                with pytest.raises(StoreError):
                    call(folder)


class Endless(Answer):
    """Pages without end: each says that another follows."""

    items = ""

    def answer(self) -> None:
        token = f"<NextContinuationToken>{next(self.numbers)}</NextContinuationToken>"
        self.body = f"<ListBucketResult>{self.items}{token}</ListBucketResult>".encode()
        super().answer()

    do_GET = answer


@pytest.mark.parametrize("items", ["", ITEM])
def test_a_listing_that_never_ends_is_given_up(google, monkeypatch, items) -> None:
    monkeypatch.setattr(store_cloud, "REQUEST_BYTES", 2**16)
    monkeypatch.setattr(store_cloud, "MAX_OBJECTS", 500)
    server, store = hostile(Endless, items=items)
    with server:
        with pytest.raises(StoreError, match="nothing came" if not items else "more than 500 objects"):
            listing(store)
        time.sleep(0.2)
        before = next(server.handler.numbers)
        time.sleep(0.3)
        assert next(server.handler.numbers) <= before + 2, "it goes on asking"


CALLS: dict[str, Callable[[Store], Any]] = {
    "get": lambda store: store.get("a"),
    "range": lambda store: store.read_into("a", 0, memoryview(bytearray(10))),
    "size": lambda store: store.size_bytes("a"),
    "list": listing,
    "put": lambda store: store.put("a", b"1"),
    "create": lambda store: store.put_new("a", b"1"),
    "parts": lambda store: store.put("a", memoryview(bytearray(6 * 2**20))),
    "delete": lambda store: store.delete(["a"]),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("status", "sent"),
    [
        (301, {"Location": "/bucket/run/a"}),
        (307, {"Location": "/bucket/run/a"}),
        (400, {}),
        (418, {}),
        (500, {}),
        (206, {"Content_Range": "bytes 5-1/3"}),
    ],
)
def test_a_status_that_says_nothing_is_a_sentence(google, status, sent, call) -> None:
    server, store = hostile(Answer, status=status, sent=sent)
    if status == 206 and call not in ("range", "list"):
        return  # to others it says that all went well
    with server, pytest.raises(StoreError):
        CALLS[call](store)


@pytest.mark.parametrize(
    "sent",
    [{"ETag": None}, {"Last_Modified": None}, {"Last_Modified": "soon"}, {"Content_Length": "many"}],
)
@pytest.mark.parametrize("call", ["get", "size"])
def test_an_answer_that_lacks_what_a_cloud_gives_is_a_sentence(google, sent, call) -> None:
    server, store = hostile(Answer, body=b"1", sent=sent)
    with server, pytest.raises(StoreError):
        CALLS[call](store)


@pytest.mark.parametrize(
    "sent",
    [
        {"Content_Range": "bytes 0-9/10", "Content_Length": "3221225472"},
        {"Content_Range": "bytes 0-3221225471/3221225472", "Content_Length": "3221225472"},
        {"Content_Length": "3221225472"},
    ],
)
@pytest.mark.parametrize("call", ["get", "range"])
def test_a_body_larger_than_was_asked_for_is_not_held(google, sent, call) -> None:
    class Gush(Answer):
        def answer(self) -> None:
            self.status = 206 if "Range" in self.headers else 200
            self.reply(self.status, **{"ETag": '"1"', "Last_Modified": "Tue, 24 Nov 2026 00:00:00 GMT", **sent})
            try:
                for _ in range(3 * 2**10):
                    self.wfile.write(b" " * 2**20)
            except OSError:
                self.close_connection = True

        do_GET = answer

    process = psutil.Process()
    before, began_s = process.memory_info().rss, time.monotonic()
    server, store = hostile(Gush)
    with server, pytest.raises(StoreError):
        CALLS[call](store)
    assert time.monotonic() - began_s < 60
    assert process.memory_info().rss - before < 2**28


class Trickle(Answer):
    """Sends a byte now and then, more often than any wait for one would end."""

    def answer(self) -> None:
        head = b"HTTP/1.1 200 OK\r\nETag: x\r\nLast-Modified: Tue, 24 Nov 2026 00:00:00 GMT\r\n"
        head += b"Content-Length: 1000\r\n\r\n"
        try:
            for byte in head + b"<" * 1000:
                self.wfile.write(bytes([byte]))
                time.sleep(0.1)
        except OSError:
            pass

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = answer


@pytest.mark.parametrize("call", ["get", "list", "put"])
def test_a_store_that_trickles_is_given_up_in_time(google, monkeypatch, call) -> None:
    monkeypatch.setattr(store_cloud, "REQUEST_BYTES", 2**16)
    server, store = hostile(Trickle)
    began_s = time.monotonic()
    with server, pytest.raises(StoreError):
        CALLS[call](store)
    assert time.monotonic() - began_s < 30


class Careless(Google):
    """Keeps objects and knows nothing of conditions."""

    def answer(self) -> None:
        del self.headers["x-goog-if-generation-match"]
        super().answer()

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = answer


def test_a_store_that_ignores_the_condition_is_refused_at_the_start(google) -> None:
    server, store = hostile(Careless)
    with server, pytest.raises(DeniedError, match="two runs could commit the same step"):
        store.check()


def test_a_small_object_is_read_within_its_limit(cloud) -> None:
    cloud.put("a", b"12345")
    assert cloud.get("a", 5) == b"12345"
    with pytest.raises(NotAnObjectError, match="more than the limit of 4"):
        cloud.get("a", 4)


def test_errors_fit_in_a_line(gs) -> None:
    with pytest.raises(NotFoundError) as error:
        gs.get("a")
    assert str(error.value) == f"could not read a in {gs.url}: no such object"
    assert "Debug" not in "".join(traceback.format_exception_only(error.value))
