"""Servers that answer in place of S3."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

from foundry_moe.checkpoint import open_store
from foundry_moe.checkpoint.store import Store, StoreOptions


@contextlib.contextmanager
def served(handler: type[BaseHTTPRequestHandler], **options) -> Iterator[Store]:
    """A store on S3 where this handler answers."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield open_store("s3://bucket/run", StoreOptions(endpoint_url=url, **options))
    finally:
        server.shutdown()
        server.server_close()
