"""Copies of hot experts change no number: the certificate has them in two cases; here with recomputed blocks."""

from __future__ import annotations

from dataclasses import replace

from foundry_moe.config import MeshConfig
from foundry_moe.launch.processes import run_processes
from tests.distributed import parity_worker
from tests.helpers.launching import PRELOAD
from tests.helpers.small_training import CASES, TOLERANCE, compare, run_case


def test_copies_and_recomputed_blocks_train_as_one_process() -> None:
    case = replace(CASES[0], crowd=True)
    mesh = MeshConfig(expert=4, shard=1)
    seen, shares = run_processes(parity_worker.with_hot_experts, case, mesh, world_size=4, preload=PRELOAD)
    rows = compare(seen, run_case(case, None))
    assert {"loss", "gradient w1_EFD", "gradient v1_EFD", "gradient w2_EDF", "weights w1_EFD"} <= rows.keys()
    assert max(rows.values()) < TOLERANCE, rows
    # every token goes to one expert and two others; in the first of three steps there are no loads yet
    assert min(shares) > 0.05, shares
