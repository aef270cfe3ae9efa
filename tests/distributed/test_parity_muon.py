"""Muon on meshes: losses, updates and checkpoints of one process, in fp64; one launch of four processes."""

from __future__ import annotations

from dataclasses import replace

from tests.helpers.small_training import CASES, TOLERANCE, certify, largest
from tests.helpers.stacks import trainable

MESHES = trainable([(1, 1, 4), (1, 2, 2), (1, 4, 1), (2, 2, 1)])
# empty ranks, tied weights and clipping, rows of one expert on several ranks


def test_a_mesh_equals_one_process() -> None:
    cases = [replace(case, muon=True) for case in (CASES[0], CASES[1], CASES[4])]
    table = certify(MESHES, cases=cases)
    rows = {row for cases in table.values() for found in cases.values() for row in found}
    assert {"weights w1_EFD", "weights w2_HD", "weights mix", "weights embed", "checkpoint"} <= rows
    assert largest(table)[0] < TOLERANCE, largest(table)
