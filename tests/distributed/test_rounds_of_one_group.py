"""Rounds in one expert group alone: its ranks still take part in the others' gathers and reductions in their order."""

from __future__ import annotations

from dataclasses import replace

from foundry_moe.config import MeshConfig
from foundry_moe.launch.processes import run_processes
from tests.distributed import parity_worker
from tests.helpers.launching import PRELOAD
from tests.helpers.small_training import CASES, TOLERANCE, compare


def test_a_crowd_in_one_group_changes_no_number_where_tokens_have_no_gradient() -> None:
    """Nothing below the first layer is trained. That group reduced gradients in another order: all waited for ever."""
    seen = {}
    for buffer in (1.0, 2.0):
        case = replace(CASES[0], share=(1, 1), buffer=buffer)
        launch = {"world_size": 4, "timeout_s": 120.0, "preload": PRELOAD}
        seen[buffer] = run_processes(
            parity_worker.with_a_crowd_in_one_group, case, MeshConfig(expert=2, shard=2), **launch
        )
    (in_rounds, rounds), (at_once, once) = seen.values()
    assert min(rounds) > 1 and max(once) == 1
    assert compare(in_rounds, at_once)["gradient w1_EFD"] > 0, "sums in another order"
    assert max(compare(in_rounds, at_once).values()) < TOLERANCE
