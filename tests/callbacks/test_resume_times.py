"""The parts of a resume's time add up, and read as a sentence."""

from __future__ import annotations

import time

import psutil
import pytest

from foundry_moe.callbacks.resume_times import ResumeTimes

pytestmark = pytest.mark.quick


def test_parts_add_up_to_the_time_since_the_process_began() -> None:
    times = ResumeTimes()
    times.mark("imports")
    time.sleep(0.1)
    times.mark("reading it")
    times.mark("imports")
    assert abs(times.total_s - (time.time() - psutil.Process().create_time())) < 0.1
    assert 0.1 <= times.parts["reading it"] < 1.0


def test_it_reads_as_a_sentence() -> None:
    times = ResumeTimes(time.time() - 2.0)
    times.mark("imports")
    times.mark("first batch")
    assert str(times) == "2.0 s (imports 2.0, first batch 0.0)"
