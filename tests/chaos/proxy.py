"""An HTTP proxy in front of an S3 server that answers 503, cuts bodies, drops answers, flips bytes and stalls.

    python -m tests.chaos.proxy --upstream 127.0.0.1:5000 --port 5001 --rate 0.05

In a test, `Proxy(upstream, choose)` runs in a thread; `choose(method, path)` names the fault of a request, or None.
"""

from __future__ import annotations

import argparse
import http.client
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

FAULTS = ("503", "cut", "drop", "flip", "stall")
HOP = {"connection", "keep-alive", "transfer-encoding", "content-length"}
Choose = Callable[[str, str], str | None]

UNAVAILABLE = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"


class Proxy:
    """Runs until `close`; `seen` counts the faults that struck."""

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--upstream", required=True, help="HOST:PORT of the S3 server")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--rate", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    host, _, port = arguments.upstream.partition(":")
    proxy = Proxy((host, int(port)), at_random(arguments.rate, arguments.seed), port=arguments.port)
    print(proxy.url, flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
