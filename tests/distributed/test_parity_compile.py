"""Blocks that are compiled in place train as they do uncompiled, on meshes too."""

from __future__ import annotations

import pytest

from foundry_moe.launch.processes import run_processes
from tests.distributed import parity_worker, trainer_worker
from tests.helpers.launching import PRELOAD
from tests.helpers.small_training import CASES, TOLERANCE, Case, compare, run_case
from tests.helpers.tiny_runs import YAML, largest_difference, mesh

BLOCKS = {"algorithms.dmoe.mesh.compile": "blocks"}


def test_compiled_blocks_on_meshes_equal_one_process_in_fp64() -> None:
    """Without a code generator, whose order of sums is its own: graphs, breaks and gradients are the point."""
    adapters = Case(name="adapters", moe={**CASES[0].moe, "lora": {"r": 3, "alpha": 5}})
    cases = (*CASES[:2], adapters)
    results = run_processes(parity_worker.compiled, [(1, 1, 2), (1, 2, 1)], cases, world_size=2, preload=PRELOAD)
    for case in cases:
        expected = run_case(case, None)
        for mesh_, seen in results[case.name].items():
            rows = compare(seen, expected)
            assert max(rows.values()) < TOLERANCE, (case.name, mesh_, rows)
    assert results["frames"] > 0, "nothing was compiled"


@pytest.mark.slow
def test_a_run_from_yaml_with_compiled_blocks_equals_the_eager_one() -> None:
    runs = [
        mesh(1, 1, 2),
        mesh(1, 1, 2, **BLOCKS),
        mesh(1, 2, 1, **BLOCKS),
        mesh(1, 1, 2, **BLOCKS, **{"fsdp_config.activation_checkpointing": True}),
    ]
    eager, *compiled = run_processes(trainer_worker.train_runs, YAML, runs, world_size=2, preload=PRELOAD)
    for run in compiled:
        assert run["losses"] == pytest.approx(eager["losses"], rel=1e-5)
        # fp32 kernels that sum in another order, three steps of AdamW
        assert largest_difference(run, eager) < 1e-5
