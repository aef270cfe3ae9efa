"""Azurite, which is Azure's emulator from npm, and a small server with the part of Google's XML API that stores use."""

from __future__ import annotations

import base64
import datetime
import fcntl
import hashlib
import hmac
import itertools
import os
import shutil
import socket
import subprocess
import threading
import time
import urllib.request
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from tests.helpers.launching import free_port

ACCOUNT = "devstoreaccount1"  # of every Azurite, with this key, which its documentation has
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
NO_ACCOUNT = '{"disable_oauth": true, "client_email": "", "private_key": "", "private_key_id": ""}'  # of Google's
VERSION = "3.37.0"
FOLDER = Path(__file__).parents[2] / "build" / f"azurite-{VERSION}"


def install_azurite() -> Path:
    """Azurite's program, installed once.

    Raises:
        RuntimeError: there is no npm, or it cannot install it.
    """
    program = FOLDER / "node_modules" / ".bin" / "azurite-blob"
    npm = shutil.which("npm")
    if npm is None:
        raise RuntimeError("Azurite needs npm, and there is none")
    FOLDER.mkdir(parents=True, exist_ok=True)
    with open(FOLDER / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (FOLDER / "complete").exists():
            words = [npm, "install", "--no-audit", "--no-fund", "--prefix", str(FOLDER), f"azurite@{VERSION}"]
            done = subprocess.run(words, capture_output=True, text=True, timeout=300)
            if done.returncode or not program.exists():
                raise RuntimeError(f"npm cannot install Azurite: {done.stderr[-300:]}")
            (FOLDER / "complete").touch()
    return program


class Azurite:
    """Azurite with the container `bucket`, in memory. Sets the environment's account and key."""

    def __init__(self) -> None:
        program = install_azurite()
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}/{ACCOUNT}"
        flags = ["--silent", "--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry"]
        self.process = subprocess.Popen(
            [str(program), "--blobHost", "127.0.0.1", "--blobPort", str(self.port), *flags],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def __enter__(self) -> Azurite:
        os.environ.setdefault("AZURE_STORAGE_ACCOUNT_NAME", ACCOUNT)
        os.environ.setdefault("AZURE_STORAGE_ACCOUNT_KEY", KEY)
        deadline = time.monotonic() + 120
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                break
            except OSError:
                assert self.process.poll() is None and time.monotonic() < deadline, "Azurite does not start"
                time.sleep(0.1)
        self._create("bucket")
        return self

    def _create(self, container: str) -> None:
        """obstore cannot create a container."""
        headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
        named = "\n".join(f"{name}:{value}" for name, value in headers.items())
        signed = "PUT" + "\n" * 12 + f"{named}\n/{ACCOUNT}/{ACCOUNT}/{container}\nrestype:container"
        signature = hmac.new(base64.b64decode(KEY), signed.encode(), hashlib.sha256).digest()
        headers["Authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(signature).decode()}"
        address = f"{self.url}/{container}?restype=container"
        urllib.request.urlopen(urllib.request.Request(address, method="PUT", headers=headers), timeout=60).close()

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()


class Google(BaseHTTPRequestHandler):
    """Objects with generations: a PUT with `x-goog-if-generation-match: 0` creates, or fails with 412."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    objects: dict[str, tuple[bytes, int, float]]  # by key: bytes, generation, time
    uploads: dict[str, dict[int, bytes]]
    numbers: Any
    lock: threading.Lock

    def log_message(self, *_: object) -> None:
        pass

    def reply(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content_Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def error(self, status: int, code: str) -> None:
        self.reply(status, f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode())

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        bucket, _, key = unquote(parts.path).lstrip("/").partition("/")
        if bucket != "bucket":
            self.error(404, "NoSuchBucket")
        elif "uploads" in query or "uploadId" in query:
            self.multipart(key, query, body)
        elif self.command == "PUT":
            with self.lock:
                if self.headers.get("x-goog-if-generation-match") == "0" and key in self.objects:
                    self.error(412, "PreconditionFailed")
                    return
                self.keep(key, body)
            self.reply(200, **self.tags(key))
        elif not key:
            self.listing(query)
        elif key not in self.objects:
            self.error(404, "NoSuchKey")
        elif self.command == "DELETE":
            self.objects.pop(key, None)
            self.reply(204)
        else:
            self.send_object(key)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = answer

    def keep(self, key: str, body: bytes) -> None:
        self.objects[key] = (body, next(self.numbers), time.time())

    def tags(self, key: str) -> dict[str, str]:
        _, generation, _ = self.objects[key]
        return {"ETag": f'"{generation}"', "x_goog_generation": str(generation)}

    def send_object(self, key: str) -> None:
        data, _, at = self.objects[key]
        headers = {**self.tags(key), "Last_Modified": formatdate(at, usegmt=True)}
        wanted = self.headers.get("Range")
        if wanted is None:
            self.reply(200, data, **headers)
            return
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        begin, end = int(first), min(int(last) + 1 if last else len(data), len(data))
        if begin >= len(data):
            self.error(416, "InvalidRange")
            return
        self.reply(206, data[begin:end], **headers, Content_Range=f"bytes {begin}-{end - 1}/{len(data)}")

    def listing(self, query: dict[str, str]) -> None:
        after = query.get("continuation-token") or query.get("start-after", "")
        keys = sorted(key for key in self.objects if key.startswith(query.get("prefix", "")) and key > after)
        page = keys[: int(query.get("max-keys", 1000))]
        items = ""
        for key in page:
            data, generation, at = self.objects[key]
            when = datetime.datetime.fromtimestamp(at, datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
            items += (
                f'<Contents><Key>{escape(key)}</Key><ETag>"{generation}"</ETag><Size>{len(data)}</Size>'
                f"<LastModified>{when}</LastModified></Contents>"
            )
        more = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if len(page) < len(keys) else ""
        self.reply(200, f"<ListBucketResult>{items}{more}</ListBucketResult>".encode())

    def multipart(self, key: str, query: dict[str, str], body: bytes) -> None:
        if "uploads" in query:
            name = str(next(self.numbers))
            self.uploads[name] = {}
            self.reply(
                200,
                f"<InitiateMultipartUploadResult><UploadId>{name}</UploadId></InitiateMultipartUploadResult>".encode(),
            )
        elif query["uploadId"] not in self.uploads:
            self.error(404, "NoSuchUpload")
        elif self.command == "PUT":
            self.uploads[query["uploadId"]][int(query["partNumber"])] = body
            self.reply(200, ETag=f'"{query["partNumber"]}"')
        elif self.command == "DELETE":
            self.uploads.pop(query["uploadId"])
            self.reply(204)
        else:
            parts = self.uploads.pop(query["uploadId"])
            self.keep(key, b"".join(parts[number] for number in sorted(parts)))
            tag = self.tags(key)["ETag"]
            self.reply(
                200, f"<CompleteMultipartUploadResult><ETag>{tag}</ETag></CompleteMultipartUploadResult>".encode()
            )


class GoogleServer:
    """Google's XML API with the bucket `bucket`, in a thread."""

    def __init__(self, handler: type[Google] = Google) -> None:
        kept = {"objects": {}, "uploads": {}, "numbers": itertools.count(1), "lock": threading.Lock()}
        self.handler = type("Handler", (handler,), kept)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self.handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def __enter__(self) -> GoogleServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
