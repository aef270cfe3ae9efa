"""A rank that raises, dies or hangs ends the run on all ranks, in time, with its message."""

from __future__ import annotations

import multiprocessing
import time

import pytest

from foundry_moe.parallel.launch import run_processes
from tests.distributed import parity_worker
from tests.distributed.launching import PRELOAD


@pytest.mark.parametrize(
    ("kind", "timeout_s", "message"),
    [
        ("raises", 120.0, "rank 2 of 4 failed:(.|\n)*the data of step 3 is torn"),
        ("dies", 120.0, "rank 2 of 4 died of SIGKILL"),
        ("hangs", 8.0, "ranks still ran after 8 s|[Tt]imed out"),
    ],
)
def test_a_failing_rank_ends_the_run(kind: str, timeout_s: float, message: str) -> None:
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=message):
        run_processes(parity_worker.fail, kind, 2, world_size=4, timeout_s=timeout_s, preload=PRELOAD)
    # raising and dying must not wait for the timeout
    assert time.monotonic() - started < 60
    assert not [p for p in multiprocessing.active_children() if p.name.startswith("rank")]
