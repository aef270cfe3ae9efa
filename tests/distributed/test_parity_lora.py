"""LoRA adapters on meshes: losses, gradients, updates and checkpoints of one process, in fp64."""

from __future__ import annotations

import pytest

from tests.helpers.small_training import CASES, LORA, TOLERANCE, Case, certify, largest, run_case
from tests.helpers.stacks import needs_replicas

MIXED = Case(
    name="adapters, uneven and empty ranks",
    moe={"num_experts": 8, "top_k": 3, "lora": LORA, "loss": {"balance": 0.1}},
    microbatches=2,
    share=(3, 0, 1, 2),
)
CROWDED = Case(
    name="adapters, every token to one expert in rounds, biases",
    moe={**CASES[2].moe, "lora": {**LORA, "targets": ["w2"]}},
    crowd=True,
    buffer=1.0,
    share=(1, 2),
    max_norm=0.05,
)


def test_frozen_weights_have_no_gradient_and_do_not_move() -> None:
    seen = run_case(MIXED, None)
    moved = {key.split("/")[-1].split(".experts.")[-1] for key in seen if key.startswith("grad/") and "experts" in key}
    assert moved == {f"{name}_{factor}" for name, factor in (
        ("w1", "A_EDL"), ("w1", "B_EFL"), ("v1", "A_EDL"), ("v1", "B_EFL"), ("w2", "A_EFL"), ("w2", "B_EDL")
    )}  # fmt: skip
    states = [key for key in seen if key.startswith("checkpoint/optimizer") and "w1_EFD" in key]
    assert not states, "a frozen parameter has no state"


@pytest.mark.parametrize(
    "mesh", [(1, 1, 2), (1, 2, 1), (1, 2, 2), pytest.param((2, 1, 2), marks=needs_replicas)], ids=str
)
def test_a_mesh_equals_one_process(mesh: tuple[int, int, int]) -> None:
    table = certify([mesh], cases=(MIXED, CROWDED))
    rows = {row for cases in table.values() for found in cases.values() for row in found}
    assert {"gradient w1_A_EDL", "weights w2_B_EDL", "weights w1_EFD", "checkpoint"} <= rows
    assert largest(table)[0] < TOLERANCE, largest(table)
