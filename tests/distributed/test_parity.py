"""Every mesh trains as one process does: the certificate that `foundry-moe verify` prints, held under 1e-10 in fp64."""

from __future__ import annotations

import pytest
import torch

from foundry_moe.commands.verify.meshes import (
    TOLERANCE,
    certify,
    compare,
    distance,
    failing,
    format_table,
    own_units,
    run_alone,
    worst,
)
from foundry_moe.commands.verify.parity import CASES, run_case
from foundry_moe.launch.processes import run_processes
from tests.distributed import parity_worker
from tests.helpers.launching import PRELOAD
from tests.helpers.stacks import needs_replicas, trainable

MESHES = {
    1: [(1, 1, 1)],
    2: [(1, 1, 2), (1, 2, 1), (2, 1, 1)],
    4: [(1, 1, 4), (1, 2, 2), (2, 1, 2), (2, 2, 1)],
    8: [(2, 2, 2)],
}


@pytest.mark.parametrize(
    "processes",
    [
        pytest.param(size, marks=pytest.mark.quick if size == 2 else needs_replicas if size == 8 else ())
        for size in MESHES
    ],
)
def test_meshes_equal_one_process_in_fp64(processes: int) -> None:
    table = certify(trainable(MESHES[processes]), timeout_s=300.0, preload=PRELOAD)  # before the test's own limit
    rows = {row for cases in table.values() for rows in cases.values() for row in rows}
    assert {"loss", "clipped norm", "checkpoint"} <= rows
    for kind in ("embed", "head", "norm", "mix", "gate", "shared", "w1_EFD", "v1_EFD", "w2_EDF"):
        assert {f"gradient {kind}", f"weights {kind}"} <= rows
    # rounding alone measures some 3e-15
    assert worst(table) < TOLERANCE["fp64"], format_table(table, TOLERANCE["fp64"])


def test_hierarchical_exchange_over_four_nodes_equals_one_process() -> None:
    table = certify([(1, 1, 8)], cases=CASES[:1], ranks_per_node=2, all_to_all="hierarchical", preload=PRELOAD)
    assert worst(table) < TOLERANCE["fp64"], format_table(table, TOLERANCE["fp64"])


def test_certificate_fails_where_expert_gradients_are_too_large_by_the_expert_degree() -> None:
    wrong = run_processes(parity_worker.without_gradient_scale, world_size=2, preload=PRELOAD)
    expected = run_case(CASES[0], None)
    key = "grad/0/w1_EFD/blocks.0.ffn.experts.w1_EFD"
    # the slip of databricks/megablocks issue 86: twice the gradient on two ranks
    torch.testing.assert_close(wrong[key], 2 * expected[key], rtol=1e-10, atol=1e-14)
    rows = compare(wrong, expected)
    assert rows["gradient w1_EFD"] > 0.5 and rows["clipped norm"] > 1e-3


def test_crowded_case_leaves_experts_without_tokens() -> None:
    seen = run_case(CASES[2], None)
    gradient_EFD = seen["grad/0/w1_EFD/blocks.0.ffn.experts.w1_EFD"]
    assert gradient_EFD[0].abs().max() > 0
    assert gradient_EFD[1:].abs().max() == 0


@pytest.mark.parametrize(
    ("mesh", "num_experts", "hidden_size"),
    [
        ((1, 2, 2), 4, 6),
        pytest.param((2, 1, 2), 4, 6, marks=needs_replicas),
        ((1, 4, 1), 4, 12),
        ((1, 4, 1), 5, 12),
        ((1, 4, 1), 5, 6),
        ((1, 1, 4), 8, 5),
        ((1, 2, 2), 4, (6, 2, 3, 5)),
        ((1, 4, 1), 3, (5, 3, 8)),
        ((1, 4, 1), 3, (5, 3, 7)),
    ],
)
def test_experts_drawn_shard_by_shard_equal_those_drawn_whole(
    mesh: tuple[int, int, int], num_experts: int, hidden_size: int | tuple[int, ...]
) -> None:
    arguments = (mesh, num_experts, hidden_size)
    assert run_processes(parity_worker.draw_on_meta, *arguments, world_size=4, preload=PRELOAD) == 0.0


@pytest.mark.slow
def test_bf16_is_as_far_from_fp32_on_a_mesh_as_alone_and_a_doubled_gradient_would_show() -> None:
    cases = CASES[:1]
    table = certify([(1, 1, 2)], cases=cases, precision="bf16", preload=PRELOAD)
    assert worst(table) < TOLERANCE["bf16"], format_table(table, TOLERANCE["bf16"])
    alone = run_processes(run_alone, cases, "bf16", "cpu", None, {}, world_size=1, preload=PRELOAD)
    base, own = (alone[name][(1, 1, 1), cases[0].name] for name in ("base", "own"))
    doubled = {key: 2 * value if "/w1_EFD/" in key and key.startswith("grad") else value for key, value in base.items()}
    units = own_units({"only": compare(own, base, distance)}, "only")
    row = "gradient w1_EFD"
    assert compare(doubled, base, distance)[row] > 2 * TOLERANCE["bf16"] * units[row]


def test_no_distance_passes_beside_one_gpu_that_is_not_a_number() -> None:
    rows = {"gradient x": 0.01, "clipped norm": 0.001, "loss": 0.002}
    units = own_units({"good": rows, "bad": {**rows, "gradient x": float("inf")}}, "bad")
    assert units == {"gradient x": 0.0, "clipped norm": 0.0, "loss": 0.002}
    assert own_units({"good": rows}, "good") == {**rows, "clipped norm": 0.01}


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_nccl_meshes_equal_one_gpu(precision: str) -> None:
    gpus = torch.cuda.device_count()
    meshes = [mesh for size, group in MESHES.items() if size <= gpus for mesh in group]
    table = certify(meshes, precision=precision, device_type="cuda", preload=PRELOAD)
    assert worst(table) < TOLERANCE[precision], format_table(failing(table, TOLERANCE[precision]), TOLERANCE[precision])
