"""Three kills of the demo's run under Composer's launcher; `make chaos` does two dozen."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def kill(data: Path, *options: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos.run_kills", "--data", str(data), *options],
        cwd=ROOT,
        env=dict(os.environ),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    return done.stdout


@pytest.mark.timeout(1500)
def test_three_kills_lose_steps_and_nothing_else(tiny_text) -> None:
    output = kill(tiny_text, "--kills", "3", "--batches", "8", "--meshes", "1,1,2", "2,1,2", "1,1,1", "--seed", "3")
    assert "3 kills in" in output and "commits at the end, all good" in output


@pytest.mark.timeout(1500)
def test_a_kill_of_a_run_that_saves_to_azure_loses_steps_and_nothing_else(tiny_text, azurite) -> None:
    words = ["--kills", "1", "--batches", "6", "--meshes", "1,1,2", "1,1,1", "--seed", "3"]
    output = kill(tiny_text, *words, "--folder", "az://bucket/run", "--endpoint-url", azurite)
    assert "1 kills in 2 lives" in output and "commits at the end, all good" in output


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_two_dozen_kills_on_four_two_eight_and_one_processes(tiny_text) -> None:
    assert "24 kills in" in kill(tiny_text, "--kills", "24", "--batches", "60")
