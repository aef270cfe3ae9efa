"""Named points at which a process is killed or disturbed: what a store was just asked shows where a save or load is.

A process that a launcher starts is reached through the environment: `TEST_FAULT=name[:rank[:count]]` kills it by
SIGKILL at the count-th visit of that point on that rank (0 and 1 by default), in the job's first life alone.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable
from typing import Any

from foundry_moe.checkpoint.store_cloud import CloudStore
from foundry_moe.checkpoint.store_file import FileStore
from foundry_moe.checkpoint.store_s3 import S3Store

VARIABLE = "TEST_FAULT"
POINTS = (
    "save.begun",  # a rank is about to write its object
    "save.half_written",  # in the milliseconds after that
    "save.written",
    "commit.sizes_checked",  # all objects have their sizes, and the manifest is about to be written
    "commit.manifest_written",
    "commit.recorded",  # the checkpoint exists from here on
    "commit.confirmed",  # its data was still there after that
    "retention.record_deleted",  # an old commit is gone, its data not yet
    "retention.data_deleted",
    "collect.listed",  # stale attempts, if there are any, are about to be deleted
    "load.listed",
    "load.manifest_read",
    "load.range_read",
)
Visit = Callable[[str], None]


def install(visit: Visit, set_attribute: Callable[..., None] = setattr) -> None:
    """Calls `visit` with each point's name, for every store of this process.

    Args:
        set_attribute: `monkeypatch.setattr`, where the stores are to be restored.
    """
    recorded: list[str] = []  # a commit, until its data is looked at again

    def before(call: str, key: str) -> None:
        if call == "put" and "/data/" in key:
            visit("save.begun")
            threading.Timer(random.uniform(0, 0.003), visit, ["save.half_written"]).start()
        elif call == "put" and key.endswith("/MANIFEST"):
            visit("commit.sizes_checked")

    def after(call: str, key: str) -> None:
        point = {
            ("put", "steps"): "save.written",
            ("put_new", "commits"): "commit.recorded",
            ("delete", "commits"): "retention.record_deleted",
            ("delete", "steps"): "retention.data_deleted",
            ("scan", "commits"): "load.listed",
            ("read_into", "steps"): "load.range_read",
        }.get((call, key.partition("/")[0]))
        if key.endswith("/MANIFEST"):
            point = {"put": "commit.manifest_written", "get": "load.manifest_read"}.get(call)
        elif call == "scan" and key == "steps/":
            point = "collect.listed"
        elif call == "scan" and key.startswith("steps/") and recorded:
            point = "commit.confirmed"
        recorded[:] = [key] if point == "commit.recorded" else [] if call == "scan" else recorded
        if point is not None:
            visit(point)

    def watched(call: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def run(store: Any, first: Any = "", *rest: Any, **keys: Any) -> Any:
            first = list(first) if call == "delete" else first
            name = (first[0] if first else "") if call == "delete" else first
            before(call, name)
            result = method(store, first, *rest, **keys)
            result = list(result) if call == "scan" else result
            after(call, name)
            return iter(result) if call == "scan" else result

        return run

    for kind in (FileStore, S3Store, CloudStore):
        for call in ("put", "put_new", "get", "read_into", "scan", "delete"):
            set_attribute(kind, call, watched(call, getattr(kind, call)))


def kill_at(fault: str | None, rank: int) -> None:
    """Kills this process where `fault`, `name[:rank[:count]]`, says, if that is on this rank."""
    if not fault:
        return
    name, _, rest = fault.partition(":")
    wanted_rank, _, count = rest.partition(":")
    assert name in POINTS, name
    if int(wanted_rank or 0) != rank:
        return
    left = [None] * int(count or 1)

    def kill(visited: str) -> None:
        if visited == name:
            left.pop()
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)

    install(kill)


def kill_from_environment() -> None:
    """For processes of a launcher; a restarted job lives."""
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        kill_at(os.environ.get(VARIABLE), int(os.environ.get("RANK", "0")))
