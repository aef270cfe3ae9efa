"""Both stores keep the same promises, through the faults that S3 has, and name what a user can correct."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from types import SimpleNamespace

import pytest

from foundry_moe.checkpoint import open_store
from foundry_moe.checkpoint.committer import Retention
from foundry_moe.checkpoint.errors import (
    DeniedError,
    NotAnObjectError,
    NotFoundError,
    StoreError,
)
from foundry_moe.checkpoint.ledger import Ledger
from foundry_moe.checkpoint.store import StoreOptions
from foundry_moe.launch.checkpoint_settings import checkpoint_config
from tests.helpers.s3_servers import served

LARGE = os.urandom(2**20) * 11 + b"tail"  # three parts of 5 MiB, the last one short


@pytest.mark.quick
def test_objects_come_back_as_they_were(every_store) -> None:
    store = every_store
    store.put("a/b", b"one")
    store.put("a/b", b"two")
    store.put("a/empty", b"")
    assert store.get("a/b") == b"two" and store.get("a/empty") == b""
    assert store.size_bytes("a/b") == 3 and store.size_bytes("a/c") is None
    assert [(entry.key, entry.size_bytes) for entry in store.scan("a/")] == [("a/b", 3), ("a/empty", 0)]
    assert abs(next(iter(store.scan())).modified_s - store.now_s()) < 60
    store.delete(["a/b", "a/never"])
    assert [entry.key for entry in store.scan()] == ["a/empty"]
    with pytest.raises(NotFoundError, match="a/b"):
        store.get("a/b")


def test_large_objects_go_in_parts_and_come_in_ranges(every_store) -> None:
    store = every_store
    store.put("large", memoryview(LARGE))
    assert store.size_bytes("large") == len(LARGE)
    for start, size in ((0, len(LARGE)), (7_000_001, 17), (len(LARGE) - 4, 4), (5, 0)):
        out = bytearray(size)
        store.read_into("large", start, memoryview(out))
        assert out == LARGE[start : start + size]
    with pytest.raises(StoreError):
        store.read_into("large", len(LARGE) - 4, memoryview(bytearray(5)))


@pytest.mark.quick
def test_of_many_writers_of_a_new_object_one_wins(every_store) -> None:
    store = every_store
    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(lambda n: store.put_new("commit", str(n).encode()), range(8)))
    writer = int(store.get("commit"))
    # a remote store's answer may be lost: the write is tried again, and finds the object that it made
    assert sum(won) == 1 or (store.url.split(":")[0] in ("s3", "gs", "az") and not any(won))
    assert won.index(True) == writer if any(won) else writer in range(8)


@pytest.mark.quick
def test_an_interrupted_upload_shows_nothing_and_is_collected(every_store) -> None:
    store = every_store

    class Interrupted:
        """Bytes of which the second part is not given."""

        def __len__(self) -> int:
            return len(LARGE)

        def __getitem__(self, span: slice) -> memoryview:
            if span.start:
                raise KeyboardInterrupt
            return memoryview(LARGE)[span]

    with pytest.raises(KeyboardInterrupt):
        store.put("steps/1/x", Interrupted())
    assert list(store.scan()) == []


def test_what_a_killed_upload_left_goes_with_its_attempt(tmp_path) -> None:
    store = open_store(str(tmp_path))
    folder = tmp_path / "steps" / "000000000001" / "20260101T000000-deadbeef" / "data"
    folder.mkdir(parents=True)
    (folder / ".unfinished-1-000000.bin").write_bytes(b"half")
    assert Retention(Ledger(store)).collect(3600) == {}
    assert len(Retention(Ledger(store)).collect(-1)) == 1 and list(store.scan()) == []


@pytest.mark.parametrize("fault", ["503", "cut", "drop", "stall"])
def test_a_passing_fault_is_got_over(s3, behind_proxy, fault) -> None:
    """Every second request fails; each call must still do exactly its work."""
    turn = iter(range(10**6))
    shaky, proxy = behind_proxy(s3, lambda method, path: fault if next(turn) % 2 == 0 else None)
    shaky.put("small", b"1234567890" * 10)
    shaky.put("large", memoryview(LARGE))
    out = bytearray(len(LARGE))
    shaky.read_into("large", 0, memoryview(out))
    assert out == LARGE and shaky.get("small") == b"1234567890" * 10
    assert {entry.key for entry in shaky.scan()} == {"small", "large"}
    assert proxy.seen[fault] >= 3


def test_a_lost_answer_to_a_won_conditional_write_is_told_apart_by_what_is_there(s3, behind_proxy) -> None:
    first = iter(["drop"])
    shaky, _ = behind_proxy(s3, lambda method, path: next(first, None))
    assert shaky.put_new("commit", b"mine") is False
    assert shaky.get("commit") == b"mine"


def refused(code: str, status: int) -> HTTPServer:
    """A server that answers everything with one S3 error."""
    body = f"<Error><Code>{code}</Code><Message>says the server</Message></Error>".encode()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_PUT = do_POST = do_DELETE = do_GET

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    return server


class Page(BaseHTTPRequestHandler):
    """Says 200 and a page to everything, as a login page does."""

    body = b"<html><body>Please log in</body></html>"

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(self.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(self.body)

    do_PUT = do_POST = do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("body", [Page.body, b"<!doctype html><p>no <b>XML", b"", b'{"error": "proxy"}'])
def test_what_is_not_s3_is_no_empty_folder(moto, body) -> None:
    with served(type("Handler", (Page,), {"body": body}), attempts=1) as store:
        for action in (
            store.check,
            lambda: list(store.scan()),
            lambda: list(store.scan("commits/")),
            lambda: store.put("x", b"1"),
            lambda: store.put_new("x", b"1"),
            lambda: store.put("x", memoryview(LARGE)),
            lambda: store.get("x"),
            lambda: store.read_into("x", 0, memoryview(bytearray(5))),
            lambda: store.size_bytes("x"),
        ):
            with pytest.raises(StoreError, match=r"did not answer as S3|500 Internal Server Error"):
                action()


class Trickle(BaseHTTPRequestHandler):
    """Sends a byte now and then, more often than any wait for one would end."""

    every_s, head_too, sent = 0.1, False, 0

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        head = b"HTTP/1.1 200 OK\r\nETag: x\r\nContent-Length: 1000\r\nContent-Type: binary/octet-stream\r\n\r\n"
        with contextlib.suppress(OSError):
            if not self.head_too:
                self.wfile.write(head)
            for byte in (head if self.head_too else b"") + b"<" * 1000:
                self.wfile.write(bytes([byte]))
                type(self).sent += 1
                time.sleep(self.every_s)

    do_PUT = do_POST = do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("head_too", [False, True])
@pytest.mark.parametrize("what", ["get", "range", "list", "put"])
def test_a_store_that_trickles_is_given_up_in_time(moto, head_too, what) -> None:
    """At this pace an answer would take 100 s, and no wait for a byte of it longer than 0.1 s."""
    if what == "put" and not head_too:
        return  # its answer is the head
    handler = type("Handler", (Trickle,), {"head_too": head_too})
    with served(handler, attempts=1, timeout_s=0.5) as store:
        with pytest.raises(StoreError):
            {
                "get": lambda: store.get("x"),
                "range": lambda: store.read_into("x", 0, memoryview(bytearray(1000))),
                "list": lambda: list(store.scan()),
                "put": lambda: store.put("x", b"1"),
            }[what]()
        assert handler.sent < 500


@pytest.mark.parametrize(
    ("code", "status", "kind", "words"),
    [
        ("AccessDenied", 403, DeniedError, "allow s3:ListBucket"),
        ("InvalidAccessKeyId", 403, DeniedError, "refuses these credentials"),
        ("RequestTimeTooSkewed", 403, DeniedError, "clock is far off"),
        ("NoSuchBucket", 404, NotFoundError, "bucket 'bucket' does not exist"),
        ("QuotaExceeded", 403, StoreError, "the store is full"),
    ],
)
def test_what_s3_refuses_is_one_sentence(moto, code, status, kind, words) -> None:
    server = refused(code, status)
    store = open_store("s3://bucket/run", StoreOptions(endpoint_url=f"http://127.0.0.1:{server.server_address[1]}"))
    try:
        for action in (store.check, lambda: store.put("x", b"1"), lambda: store.get("x")):
            with pytest.raises(kind, match=words):
                action()
    finally:
        server.shutdown()
        server.server_close()


def test_a_folder_that_can_be_used_is_left_as_it_was(store) -> None:
    store.check()
    assert list(store.scan()) == []


def test_a_folder_that_cannot_be_written_to_is_named_before_the_first_save(store, tmp_path, monkeypatch) -> None:
    late = open_store(str(tmp_path / "file" / "run"))
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(NotFoundError, match=r"could not write to .*/file/run: .*/file is a file, not a folder"):
        late.check()

    def deny(*_: object) -> None:
        raise DeniedError("no permission")

    monkeypatch.setattr(store, "delete", deny)
    store.check()
    monkeypatch.setattr(store, "put_new", deny)
    with pytest.raises(DeniedError):
        store.check()


def test_a_missing_bucket_is_named_by_the_real_server(moto) -> None:
    store = open_store("s3://nowhere/run", StoreOptions(endpoint_url=f"http://{moto[0]}:{moto[1]}"))
    with pytest.raises(NotFoundError, match="bucket 'nowhere' does not exist; create it or correct `folder`"):
        store.check()


def test_missing_credentials_say_what_to_set(moto, monkeypatch, tmp_path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    with pytest.raises(DeniedError, match="no credentials; set AWS_ACCESS_KEY_ID"):
        open_store("s3://bucket/run", StoreOptions(endpoint_url=f"http://{moto[0]}:{moto[1]}")).check()
    with pytest.raises(DeniedError, match="profile"):
        open_store("s3://bucket/run", StoreOptions(profile="nobody")).check()


def test_nobody_at_the_endpoint_is_one_sentence(moto) -> None:
    store = open_store("s3://bucket/run", StoreOptions(endpoint_url="http://127.0.0.1:9", attempts=2))
    with pytest.raises(StoreError, match=r"no answer from http://127\.0\.0\.1:9"):
        store.check()


@pytest.mark.parametrize(
    ("number", "kind", "words"),
    [
        (
            errno.ENOSPC,
            StoreError,
            r"write steps/7/x \(4 bytes\) .* the disk is full \(.*, [0-9,]{5,} bytes are free\)",
        ),
        (errno.EFBIG, StoreError, r"File too large, by a limit of file size \(ulimit -f, or the file system's\)"),
        (errno.EACCES, DeniedError, "no permission"),
    ],
)
def test_what_the_file_system_refuses_leaves_nothing_behind(tmp_path, monkeypatch, number, kind, words) -> None:
    store = open_store(str(tmp_path))

    def refuse(_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fdatasync", refuse)
    with pytest.raises(kind, match=words):
        store.put("steps/7/x", memoryview(b"data"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.quick
def test_an_object_is_on_the_device_before_it_has_its_name_and_its_name_before_the_call_returns(
    tmp_path, monkeypatch
) -> None:
    store, calls = open_store(str(tmp_path)), []
    store.put("a/first", b"makes the folders")
    for name in ("fdatasync", "fsync", "link", "replace"):
        real = getattr(os, name)

        def note(*arguments, name=name, real=real, **more):
            is_folder = name == "fsync" and stat.S_ISDIR(os.fstat(arguments[0]).st_mode)
            calls.append("fsync of the folder" if is_folder else name)
            return real(*arguments, **more)

        monkeypatch.setattr(os, name, note)
    store.put("a/b", b"one")
    assert store.put_new("a/c", b"two")
    assert calls == ["fdatasync", "replace", "fsync of the folder", "fdatasync", "link", "fsync of the folder"]


@pytest.mark.quick
def test_free_bytes_are_those_that_an_ordinary_user_can_write(tmp_path, monkeypatch) -> None:
    """Not those reserved for root; in fragments, which may be smaller than blocks."""
    found = SimpleNamespace(f_blocks=99, f_bfree=50, f_bavail=40, f_bsize=4096, f_frsize=512)
    monkeypatch.setattr(os, "statvfs", lambda path: found)
    store = open_store(str(tmp_path / "not" / "there"))
    assert store.free_bytes() == 40 * 512
    found.f_blocks = 0
    assert store.free_bytes() is None


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP])
def test_a_file_system_without_hard_links_is_named(tmp_path, monkeypatch, number) -> None:
    store = open_store(str(tmp_path))

    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(DeniedError, match=r"has no hard links .* use a folder on another .*, or s3://"):
        store.check()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_addresses_of_other_kinds_are_refused() -> None:
    for address, words in {
        "hdfs://host/run": r"hdfs: is not supported; use s3://bucket/run, gs://bucket/run, az://.*or a path",
        "oci://bucket/run": "S3 Compatibility API as endpoint_url",
        "dbfs:/Volumes/main/x/y/run": r"a path: write /Volumes/main/x/y/run$",
        "dbfs:/mnt/run": r"write /Volumes/CATALOG/SCHEMA/VOLUME/run$",
        "dbfs://Volumes/a/b/c": r"write /Volumes/a/b/c$",
        "hdfs:/host/run": r"hdfs: is not supported.*\./hdfs:\.\.\. for a local folder",
        "run:1/x": r"run: is not supported",
        "s3:///run": "names no bucket",
        "gs:/bucket/run": r"begins with gs://; write gs://bucket/run$",
        "az:container/run": r"begins with az://; write az://container/run$",
        "az:///run": "names no bucket: write az://bucket/run",
        "azure://container/run": "write az://container/run$",
        "abfss://container@account.dfs.core.windows.net/run": "write az://container/run$",
        "gcs://bucket/run": "write gs://bucket/run$",
    }.items():
        with pytest.raises(ValueError, match=words):
            open_store(address)
        with pytest.raises(ValueError, match=words):
            checkpoint_config({"folder": address})
    assert open_store("./run:1").url.endswith("/run:1")


def test_a_path_that_can_be_no_folder_is_refused_at_once(tmp_path) -> None:
    (tmp_path / "file").write_text("here first")
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    os.mkfifo(tmp_path / "pipe")
    for path, words in {
        tmp_path / "file": "file is a file, not a folder",
        tmp_path / "file" / "run": "file is a file, not a folder",
        tmp_path / "gone": "gone is a link to nothing",
        tmp_path / "pipe": "pipe is a device or pipe",
        "/dev/null": "/dev/null is a device or pipe, not a folder",
        "s3:/bucket/run": "an address begins with s3://; write s3://bucket/run",
        "S3:bucket/run": "write s3://bucket/run",
        "file:/data/run": "write file:///data/run",
    }.items():
        with pytest.raises(ValueError, match=words):
            open_store(str(path))
        with pytest.raises(ValueError, match=words):
            checkpoint_config({"folder": str(path)})
    for path in (tmp_path / "link", tmp_path / "folder" / "new" / "run", tmp_path / "a:b"):
        checkpoint_config({"folder": str(path)})
        open_store(str(path)).check()


@pytest.mark.quick
@pytest.mark.parametrize("key", ["../victim", "steps/../../victim", "/etc/victim", "steps//x", "", "a/./b", "a\0b"])
def test_no_key_leads_out_of_the_folder(store, key) -> None:
    store.put("steps/x", b"1")
    for action in (
        lambda: store.get(key),
        lambda: store.put(key, b"1"),
        lambda: store.put_new(key, b"1"),
        lambda: store.put(key, memoryview(b"1")),
        lambda: store.delete([key]),
        lambda: store.size_bytes(key),
        lambda: store.read_into(key, 0, memoryview(bytearray(1))),
    ):
        with pytest.raises(NotAnObjectError, match="cannot be the name of an object"):
            action()
    assert [entry.key for entry in store.scan()] == ["steps/x"]


def test_names_in_a_bucket_that_lead_out_are_not_listed(s3) -> None:
    s3.put("steps/x", b"1")
    for key in ("steps/../y", "steps/", "steps//y"):
        s3._client.put_object(Bucket="bucket", Key=s3.prefix + key, Body=b"1")
    assert [entry.key for entry in s3.scan()] == ["steps/x"]


def test_links_and_pipes_below_the_folder_are_refused(tmp_path, caplog) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_bytes(b"precious")
    store = open_store(str(tmp_path / "run"))
    store.put("steps/1/x", b"1")
    for name in ("steps/2", "steps/1/link", "holds"):
        (tmp_path / "run" / name).symlink_to(outside)
    (tmp_path / "run" / "steps" / "1" / "file").symlink_to(outside / "file")
    os.mkfifo(tmp_path / "run" / "steps" / "1" / "pipe")
    assert [entry.key for entry in store.scan()] == ["steps/1/x"]
    assert "Passed over 'steps/1/link'" in caplog.text and "Passed over 'steps/1/pipe'" in caplog.text
    for action in (
        lambda: store.get("steps/2/file"),
        lambda: store.get("steps/1/file"),
        lambda: store.put("steps/2/new", b"1"),
        lambda: store.delete(["steps/2/file"]),
        lambda: list(store.scan("steps/2/")),
        lambda: list(store.scan("holds/")),
        lambda: store.size_bytes("steps/1/link/file"),
    ):
        with pytest.raises(NotAnObjectError, match="is a symbolic link, which is not followed"):
            action()
    with pytest.raises(NotAnObjectError, match="pipe is not a regular file"):
        store.get("steps/1/pipe")
    store.delete(["steps/1/file", "steps/1/link"])  # the links themselves
    assert [path.name for path in outside.iterdir()] == ["file"] and (outside / "file").read_bytes() == b"precious"


RACER = """
import sys
from foundry_moe.checkpoint import open_store
store = open_store(sys.argv[1])
for n in range(400):
    store.put(f"holds/{sys.argv[2]}-{n}", b"1")
    store.delete([f"holds/{sys.argv[2]}-{n}"])
"""


def test_processes_that_write_and_delete_in_one_folder_do_not_hurt_each_other(tmp_path) -> None:
    """Who deletes the last file of a folder removes the folder, while the other is about to write there."""
    racers = [
        subprocess.Popen([sys.executable, "-c", RACER, str(tmp_path), name], stderr=subprocess.PIPE, text=True)
        for name in "ab"
    ]
    for racer in racers:
        _, stderr = racer.communicate(timeout=120)
        assert racer.returncode == 0, stderr


def test_a_folder_removed_before_the_write_is_made_again(tmp_path, monkeypatch) -> None:
    store = open_store(str(tmp_path))
    real, visits = os.open, []

    def racing(path, flags, *rest, **keys):
        if str(path).startswith(".unfinished-") and len(visits) < 5:
            visits.append(path)
            os.rmdir(tmp_path / "holds")
        return real(path, flags, *rest, **keys)

    monkeypatch.setattr(os, "open", racing)
    store.put("holds/x", b"1")
    assert len(visits) == 5 and store.get("holds/x") == b"1"


def test_the_clock_of_files_is_the_one_that_stamps_them(tmp_path, monkeypatch) -> None:
    store = open_store(str(tmp_path))
    store.put("x", b"1")
    hours_off = time.time() - 5 * 3600
    monkeypatch.setattr(time, "time", lambda: hours_off)
    assert abs(store.now_s() - next(iter(store.scan())).modified_s) < 60
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


@pytest.mark.quick
def test_a_file_that_may_not_be_read_is_no_question_of_writing(tmp_path, monkeypatch) -> None:
    store = open_store(str(tmp_path))
    store.put("commits/a", b"1")

    def refuse(path, *arguments, **keys):
        if path == "a":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return real(path, *arguments, **keys)

    real = os.open
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(DeniedError, match=rf"could not read commits/a .*; give user {os.getuid()} access"):
        store.get("commits/a")
