"""An S3 server (moto) in a process of its own, and an HTTP proxy with faults for an S3 server."""

from __future__ import annotations

import http.client
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.helpers.launching import free_port

FAULTS = ("503", "cut", "drop", "flip", "stall")
HOP = {"connection", "keep-alive", "transfer-encoding", "content-length"}
Choose = Callable[[str, str], str | None]

UNAVAILABLE = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"


class Proxy:
    """Answers 503, cuts bodies, drops answers, flips bytes or stalls, in a thread until `close`.

    `choose(method, path)` names the fault of a request, or None; `seen` counts the faults that happened.
    """

    def __init__(self, upstream: tuple[str, int], choose: Choose, *, port: int = 0, stall_s: float = 3.0) -> None:
        seen: Counter[str] = Counter()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                fault = choose(self.command, self.path)
                if fault:
                    seen[fault] += 1
                if fault == "503":
                    self.send_response(503)
                    self.send_header("Content-Length", str(len(UNAVAILABLE)))
                    self.end_headers()
                    self.wfile.write(UNAVAILABLE)
                    return
                if fault == "stall":
                    time.sleep(stall_s)
                link = http.client.HTTPConnection(*upstream, timeout=60)
                link.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
                for name, value in self.headers.items():
                    if name.lower() not in ("connection", "expect"):
                        link.putheader(name, value)
                link.endheaders(body)
                reply = link.getresponse()
                data = reply.read()
                link.close()
                if fault == "drop":  # the store did it, and the client never hears so
                    self.close_connection = True
                    return
                if fault == "flip" and self.command == "GET" and len(data) > 16:
                    place = random.randrange(len(data))
                    data = data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :]
                self.send_response(reply.status)
                for name, value in reply.getheaders():
                    if name.lower() not in HOP:
                        self.send_header(name, value)
                length = reply.getheader("Content-Length") if self.command == "HEAD" else str(len(data))
                self.send_header("Content-Length", length or "0")
                self.end_headers()
                if fault == "cut" and self.command == "GET" and len(data) > 1:
                    self.wfile.write(data[: len(data) // 2])
                    self.close_connection = True
                    return
                if self.command != "HEAD":
                    self.wfile.write(data)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = answer

            def handle(self) -> None:
                try:
                    super().handle()
                except (ConnectionError, BrokenPipeError, http.client.HTTPException, TimeoutError):
                    self.close_connection = True

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: object) -> None:
                pass  # the client went away, which is what faults are for

        self.seen = seen
        self._server = Server(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def at_random(rate: float, seed: int) -> Choose:
    """Each request fails with probability `rate`, in a random way."""
    draw = random.Random(seed)
    return lambda method, path: draw.choice(FAULTS) if draw.random() < rate else None


class Moto:
    """moto with the bucket `bucket`, in a process of its own so that forks never inherit its threads."""

    def __init__(self) -> None:
        self.port = free_port()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Moto:
        import boto3

        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            os.environ.setdefault(name, "testing")
        os.environ.setdefault("AWS_DEFAULT_REGION", "us-east-1")
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                break
            except OSError:
                assert self.process.poll() is None and time.monotonic() < deadline, "moto does not start"
                time.sleep(0.1)
        boto3.client("s3", endpoint_url=self.url).create_bucket(Bucket="bucket")
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
