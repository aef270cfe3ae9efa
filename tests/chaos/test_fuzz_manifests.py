"""Forged manifests and records at random; `python -m tests.chaos.fuzz_manifests` runs as many as one likes."""

from __future__ import annotations

import pytest

from tests.chaos.fuzz_manifests import run


def test_forged_manifests_and_records_are_damage_or_whole() -> None:
    outcomes = run(300, 1, long=False)
    assert outcomes["step 1"] > 100 and outcomes["step 2"] > 5, outcomes


@pytest.mark.slow
def test_ten_thousand_forged_manifests_and_records() -> None:
    outcomes = run(10_000, 2, long=True)
    assert sum(outcomes.values()) >= 10_000 and outcomes["step 1"] > 5000, outcomes
