"""Answers that no store gives, to every call of the stores on S3, Google and Azure.

    python -m tests.chaos.hostile_answers --answers 10000

A server gives the right answer with random changes: another status, a header less or another, a body cut, changed,
repeated, in place of which a page comes. Each call must end in time, in a StoreError or in a result of its kind, and
with no more memory than the largest answer has.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import psutil

from foundry_moe.checkpoint import open_store
from foundry_moe.checkpoint.errors import StoreError
from foundry_moe.checkpoint.store import Entry, Store, StoreOptions
from tests.helpers.clouds import ACCOUNT, KEY, NO_ACCOUNT

DATE = "Tue, 24 Nov 2026 00:00:00 GMT"
DATA = bytes(range(200))
SECONDS, MEMORY_BYTES = 20.0, 2**28
HEADERS = {"ETag": '"1"', "Last-Modified": DATE, "Date": DATE, "Content-Type": "application/xml"}
S3_ITEM = (
    "<Contents><Key>run/a</Key><ETag>1</ETag><Size>200</Size><LastModified>2026-01-01T00:00:00Z</LastModified>"
    "</Contents>"
)
AZURE_ITEM = (
    f"<Blob><Name>run/a</Name><Properties><Last-Modified>{DATE}</Last-Modified><Content-Length>200</Content-Length>"
    "<Etag>1</Etag><BlobType>BlockBlob</BlobType></Properties></Blob>"
)
TEXTS = (
    *("", "-1", "0", "many", "1e9", "99999999999999999999", "2026-99-99T99:99:99Z", "\x1b[2J", "../../etc", "run/../x"),
    *("<html><body>Please log in</body></html>", "\u202e", "run//a", "&#0;", "&x;", "true", "bytes 5-1/3", "bytes */*"),
)
STATUSES = (
    200,
    201,
    204,
    206,
    301,
    302,
    307,
    308,
    400,
    401,
    403,
    404,
    409,
    411,
    412,
    416,
    418,
    429,
    500,
    503,
    507,
    599,
)


def right_answer(kind: str, method: str, path: str, headers: Any) -> tuple[int, dict[str, str], bytes]:
    query = parse_qs(urlsplit(path).query, keep_blank_values=True)
    if "uploads" in query and method == "POST":
        text = "<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>"
    elif "uploadId" in query and method == "POST":
        text = "<CompleteMultipartUploadResult><ETag>1</ETag></CompleteMultipartUploadResult>"
    elif "uploads" in query:
        item = "<Upload><Key>run/a</Key><UploadId>u</UploadId><Initiated>2026-01-01T00:00:00Z</Initiated></Upload>"
        text = f"<ListMultipartUploadsResult><Bucket>bucket</Bucket>{item}</ListMultipartUploadsResult>"
    elif "delete" in query:
        text = "<DeleteResult></DeleteResult>"
    elif query.get("comp") == ["list"]:
        text = f"<EnumerationResults><Blobs>{AZURE_ITEM * 2}</Blobs><NextMarker/></EnumerationResults>"
    elif "list-type" in query:
        text = f"<ListBucketResult><Name>bucket</Name>{S3_ITEM * 2}</ListBucketResult>"
    elif method in ("GET", "HEAD"):
        wanted = headers.get("Range") or headers.get("x-ms-range")
        if not wanted:
            return 200, HEADERS, DATA
        first, last = (int(number) for number in wanted.removeprefix("bytes=").split("-"))
        last = min(last, len(DATA) - 1)
        return 206, {**HEADERS, "Content-Range": f"bytes {first}-{last}/{len(DATA)}"}, DATA[first : last + 1]
    else:
        return {"DELETE": 202 if kind == "az" else 204}.get(method, 201 if kind == "az" else 200), HEADERS, b""
    return 200, HEADERS, text.encode()


def change(
    draw: random.Random, status: int, headers: dict[str, str], body: bytes
) -> tuple[int, dict[str, str], bytes, str]:
    """The answer with one to three changes; last its Content-Length."""
    headers, length = dict(headers), None
    for _ in range(draw.randint(1, 3)):
        what = draw.choice(("status", "drop", "header", "cut", "byte", "text", "tag", "repeat", "page", "length"))
        if what == "status":
            status = draw.choice(STATUSES)
            headers.setdefault("Location", draw.choice(("/bucket/run/a", "http://127.0.0.1:1/", "nowhere")))
        elif what == "drop" and headers:
            headers.pop(draw.choice(list(headers)))
        elif what == "header":
            value = draw.choice(TEXTS).encode("ascii", "ignore").decode().replace("\x1b", "")
            headers[draw.choice((*HEADERS, "Content-Range", "x-goog-generation", "Content-Encoding"))] = value
        elif what == "cut":
            body = body[: draw.randint(0, len(body))]
        elif what == "byte" and body:
            place = draw.randrange(len(body))
            body = body[:place] + bytes([draw.randrange(256)]) + body[place + 1 :]
        elif what in ("text", "tag") and b"<" in body:
            pieces = body.split(b">")
            place = draw.randrange(len(pieces))
            new = draw.choice(TEXTS).encode()
            pieces[place] = new + b"<" + pieces[place].partition(b"<")[2] if what == "text" else new
            body = b">".join(pieces)
        elif what == "repeat":
            times = draw.choice((2, 50, 5000))
            body = body * times if len(body) * times < 2**22 else body
        elif what == "page":
            body = draw.choice((b"<html>log in</html>", b"", b"{}", os.urandom(64), b"<a>" * 10_000))
        elif what == "length":
            length = draw.choice(("0", "1", "-1", "many", str(3 * 2**30), str(10**30)))
    return status, headers, body, length or str(len(body))


def make_handler(draw: random.Random, lock: threading.Lock, count: Counter) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        kind = "s3"

        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            with lock:
                count["answers"] += 1
                kind = "az" if self.path.startswith(f"/{ACCOUNT}/") else "s3"
                right = right_answer(kind, self.command, self.path, self.headers)
                status, headers, body, length = change(draw, *right)
            self.close_connection = True
            try:
                self.send_response_only(status)
                for name, value in {**headers, "Content-Length": length, "Connection": "close"}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)
            except OSError:
                pass

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = answer

        def log_message(self, *_: object) -> None:
            pass

    return Handler


def _read(store: Store) -> None:
    store.read_into("a", 3, memoryview(bytearray(100)))


CALLS: dict[str, tuple[Callable[[Store], Any], Callable[[Any], bool]]] = {
    "get": (lambda store: store.get("a"), lambda found: isinstance(found, bytes) and len(found) <= 2**20),
    "range": (_read, lambda found: found is None),
    "size": (lambda store: store.size_bytes("a"), lambda found: found is None or found >= 0),
    "list": (
        lambda store: list(store.scan()),
        lambda found: all(isinstance(e, Entry) and ".." not in e.key and e.key.isprintable() for e in found),
    ),
    "put": (lambda store: store.put("a", b"1"), lambda found: found is None),
    "create": (lambda store: store.put_new("a", b"1"), lambda found: isinstance(found, bool)),
    "parts": (lambda store: store.put("a", memoryview(bytes(3 * 2**16))), lambda found: found is None),
    "delete": (lambda store: store.delete(["a", "b"]), lambda found: found is None),
    "clock": (lambda store: store.now_s(), lambda found: isinstance(found, float)),
    "check": (lambda store: store.check(), lambda found: found is None),
}


def storm(answers: int, seed: int) -> Counter:
    """Calls until so many hostile answers were given; raises AssertionError for a call that does what it must not."""
    draw, lock, count = random.Random(seed), threading.Lock(), Counter()
    server = ThreadingHTTPServer(("127.0.0.1", 0), make_handler(draw, lock, count))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    options = {"timeout_s": 1.0, "attempts": 1, "part_bytes": 2**16}
    stores = [
        open_store("s3://bucket/run", StoreOptions(endpoint_url=endpoint, **options)),
        open_store("gs://bucket/run", StoreOptions(endpoint_url=endpoint, **options)),
        open_store("az://bucket/run", StoreOptions(endpoint_url=f"{endpoint}/{ACCOUNT}", **options)),
    ]
    process = psutil.Process()
    before = process.memory_info().rss
    pick = random.Random(seed + 1)
    while count["answers"] < answers:
        store, (name, (call, right)) = pick.choice(stores), pick.choice(list(CALLS.items()))
        what, began_s = f"{name} on {store.url}, answer {count['answers']}", time.monotonic()
        try:
            assert right(call(store)), what
            count["results"] += 1
        except StoreError as error:
            assert str(error).isprintable() and len(str(error)) < 2000, what
            count["errors"] += 1
        except AssertionError:
            raise
        except Exception as error:
            raise AssertionError(f"{what}: {error!r}") from error
        count["slowest, s"] = max(count["slowest, s"], round(time.monotonic() - began_s, 1))
        assert time.monotonic() - began_s < SECONDS, what
        assert process.memory_info().rss - before < MEMORY_BYTES, what
    server.shutdown()
    server.server_close()
    return count


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    arguments = parser.parse_args(argv)
    for name, value in {
        **{"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_DEFAULT_REGION": "us-east-1"},
        **{"AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT, "AZURE_STORAGE_ACCOUNT_KEY": KEY},
        "GOOGLE_SERVICE_ACCOUNT_KEY": NO_ACCOUNT,
    }.items():
        os.environ[name] = value
    print(f"seed {arguments.seed}", flush=True)
    count = storm(arguments.answers, arguments.seed)
    print(f"{count.pop('answers')} hostile answers, none bad: {dict(count)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
