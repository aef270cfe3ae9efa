"""The phases of a resume add up to the age of the process."""

from __future__ import annotations

import time

import psutil
import pytest

from foundry_moe.callbacks.run_checkpoints import ResumeTimes

pytestmark = pytest.mark.quick


def test_phases_add_up_to_the_age_of_the_process() -> None:
    times = ResumeTimes()
    times.mark("imports")
    time.sleep(0.1)
    times.mark("reading it")
    times.mark("imports")
    assert abs(times.total_s - (time.time() - psutil.Process().create_time())) < 0.1
    assert 0.1 <= times.phases["reading it"] < 1.0


def test_it_reads_as_a_sentence() -> None:
    times = ResumeTimes(time.time() - 2.0)
    times.mark("imports")
    times.mark("first batch")
    assert str(times) == "2.0 s (imports 2.0, first batch 0.0)"
