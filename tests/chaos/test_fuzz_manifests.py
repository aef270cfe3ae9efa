"""Forged manifests, records and stores' answers at random.

`python -m tests.chaos.fuzz_manifests` and `python -m tests.chaos.hostile_answers` run as many as one likes.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.fuzz_manifests import run


def test_forged_manifests_and_records_are_damage_or_whole() -> None:
    outcomes = run(300, 1, long=False)
    assert outcomes["step 1"] > 100 and outcomes["step 2"] > 5, outcomes


@pytest.mark.slow
def test_ten_thousand_forged_manifests_and_records() -> None:
    outcomes = run(10_000, 2, long=True)
    assert sum(outcomes.values()) >= 10_000 and outcomes["step 1"] > 5000, outcomes


def hostile(answers: int) -> str:
    """In a process of its own, whose memory is measured."""
    words = [sys.executable, "-m", "tests.chaos.hostile_answers", "--answers", str(answers), "--seed", "3"]
    done = subprocess.run(words, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_answers_that_no_store_gives_end_in_an_error_or_a_result() -> None:
    assert "hostile answers, none bad" in hostile(300)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_thousand_answers_that_no_store_gives() -> None:
    assert "hostile answers, none bad" in hostile(10_000)
