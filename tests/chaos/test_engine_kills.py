"""A hundred kills of the checkpoint engine, every named point among them; `make chaos` does a thousand."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.faults import POINTS

ROOT = Path(__file__).parents[2]


def kill(count: int, s3: float) -> str:
    """In a process of its own, which forks: this one has threads."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos.engine_kills", "--kills", str(count), "--s3", str(s3), "--seed", "7"],
        cwd=ROOT,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=3000,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout


def test_no_kill_leaves_a_checkpoint_that_loads_wrong() -> None:
    output = kill(100, s3=0.15)
    assert "85 kills, none left" in output and "15 kills, none left" in output
    assert all(point in output for point in POINTS)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_thousand_kills() -> None:
    assert "750 kills, none left" in kill(1000, s3=0.25)
