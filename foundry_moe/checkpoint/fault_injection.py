"""Named points at which a test kills or disturbs a process. In a run without such a test they do nothing.

`point(name)` is called by the engine wherever a crash has to be harmless; `POINTS` is the full list, and a test
visits every one. `FOUNDRY_MOE_FAULT=name[:rank[:count]]` in the environment kills the process by SIGKILL at the
count-th visit of that point on that rank (both default to 0 and 1), which reaches processes that a launcher starts.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

POINTS = (
    "save.planned",  # the staged bytes and the plan of this rank are known
    "save.part_written",  # one part of a rank's object is in the store
    "save.written",  # the whole of a rank's object is in the store
    "commit.sizes_checked",  # the coordinator found all objects with their sizes
    "commit.manifest_written",
    "commit.recorded",  # the checkpoint exists from here on
    "commit.confirmed",  # its data was still there after that
    "retention.record_deleted",  # an old commit is gone, its data not yet
    "retention.data_deleted",
    "collect.listed",  # stale attempts, if there are any, are about to be deleted
    "load.listed",  # the coordinator chose a commit
    "load.manifest_read",
    "load.range_read",  # a range was read and its hashes agree
    "load.done",
)

hook: Callable[[str], None] | None = None


def point(name: str) -> None:
    """Calls the hook, if a test has set one, with `name`."""
    assert name in POINTS, name
    if hook is not None:
        hook(name)


def hook_from_environment(value: str | None, rank: int) -> Callable[[str], None] | None:
    """The hook that `FOUNDRY_MOE_FAULT` asks for on this rank, or None."""
    if not value:
        return None
    name, _, rest = value.partition(":")
    wanted_rank, _, wanted_count = rest.partition(":")
    if name not in POINTS:
        raise ValueError(f"FOUNDRY_MOE_FAULT: {name!r} is not a fault point; known: {', '.join(POINTS)}")
    if int(wanted_rank or 0) != rank:
        return None
    visits_left = int(wanted_count or 1)

    def kill(visited: str) -> None:
        nonlocal visits_left
        if visited == name:
            visits_left -= 1
            if visits_left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    return kill
