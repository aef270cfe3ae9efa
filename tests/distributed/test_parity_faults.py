"""A rank that raises, dies or hangs ends the run on all ranks, in time, with its message."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from foundry_moe.launch.processes import run_processes
from tests.distributed import parity_worker
from tests.helpers.launching import PRELOAD


@pytest.mark.parametrize(
    ("kind", "timeout_s", "message"),
    [
        ("raises", 300.0, "rank 2 of 4 failed:(.|\n)*the data of step 3 is torn"),
        ("dies", 300.0, "rank 2 of 4 died of SIGKILL"),
        # gloo gathers counts in a ring: a rank may see that its neighbour, whose wait has timed out, is gone
        ("hangs", 8.0, "ranks still ran after 8 s|[Tt]imed out|Connection closed by peer"),
    ],
)
def test_a_failing_rank_ends_the_run(kind: str, timeout_s: float, message: str, tmp_path: Path) -> None:
    fault = tmp_path / "fault"
    with pytest.raises(RuntimeError, match=message):
        run_processes(parity_worker.fail, kind, 2, fault, world_size=4, timeout_s=timeout_s, preload=PRELOAD)
    # raising and dying must not wait for the timeout
    assert kind == "hangs" or time.time() - fault.stat().st_mtime < 60
    assert not [p for p in multiprocessing.active_children() if p.name.startswith("rank")]


def test_every_group_of_a_mesh_waits_as_long_as_the_job() -> None:
    """Torch gives a group that is made later 10 or 30 minutes, independent of `dist_timeout`."""
    limits = run_processes(
        parity_worker.time_limits, [(2, 1, 2), (1, 2, 2), (1, 1, 4)], world_size=4, timeout_s=77.0, preload=PRELOAD
    )
    assert len(limits) > 9 and set(limits.values()) == {77.0}, limits


def test_ranks_that_hang_tell_where() -> None:
    expected = (
        r"2 of 2 ranks still ran after 5 s\nrank 0, innermost call first:\n.*\n.*in wait_for_ever(.|\n)*rank 1, .*"
    )
    with pytest.raises(RuntimeError, match=expected):
        run_processes(parity_worker.wait_for_ever, world_size=2, timeout_s=5.0, preload=PRELOAD)


ROOT = Path(__file__).parents[2]
COMPOSER = (sys.executable, "-m", "composer.cli.launcher", "-n", "2", f"{ROOT}/foundry_moe/train.py")
OURS = (sys.executable, "-m", "foundry_moe.cli", "train", "-n", "2")


@pytest.mark.parametrize(
    ("launcher", "kind", "message"),
    [
        (COMPOSER, "raises", "the data of batch 1 is torn"),
        (OURS, "raises", "the data of batch 1 is torn"),
        (OURS, "dies", "rank 1 died of SIGKILL"),
        pytest.param(COMPOSER, "dies", "Rank 1 crashed with exit code -9", marks=pytest.mark.slow),
    ],
)
def test_a_failing_rank_ends_a_run_under_a_launcher(
    launcher: tuple[str, ...], kind: str, message: str, tmp_path: Path
) -> None:
    """The other rank waits in an all-to-all when the first goes."""
    fault = tmp_path / "fault"
    run = subprocess.run(
        [
            *launcher,
            f"{ROOT}/tests/distributed/tiny.yaml",
            "algorithms.dmoe.mesh.expert=2",
            f"code_paths=[{ROOT}/benchmarks/random_tokens.py,{ROOT}/tests/distributed/fault_callback.py]",
            f"callbacks.fail_at={{kind: {kind}, rank: 1, batch: 1, fault: {fault}}}",
            "dist_timeout=300",
        ],
        cwd=tmp_path,  # where the launcher keeps the output of failed ranks
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    assert run.returncode != 0
    assert message in run.stdout + run.stderr
    # the launcher ends the other rank: nobody waits for the timeout of a collective
    assert "Timed out" not in run.stdout + run.stderr
    assert time.time() - fault.stat().st_mtime < 150
