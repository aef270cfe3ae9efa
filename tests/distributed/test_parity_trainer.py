"""Runs from YAML through LLM Foundry and Composer: every mesh ends with the weights of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foundry_moe.launch.processes import run_processes
from foundry_moe.parallel.mesh import can_replicate
from tests.distributed import trainer_worker
from tests.helpers.launching import PRELOAD
from tests.helpers.tiny_runs import KEPT, MIXED, YAML, largest_difference, mesh

# fp32, three steps of AdamW with eps 1e-3: sums in another order measure some 2e-7
TOLERANCE = 1e-5


def alone(microbatch: int, **more: Any) -> dict[str, Any]:
    """One process, with the microbatch of the whole job: the balance loss is taken over a microbatch."""
    run = {"device_train_microbatch_size": microbatch, **more}
    return run_processes(trainer_worker.train_runs, YAML, [run], world_size=1, preload=PRELOAD)[0]


def test_two_processes_equal_one() -> None:
    checkpointing = {"fsdp_config.activation_checkpointing": True}
    runs = [mesh(1, 1, 2), mesh(1, 1, 2, **checkpointing), mesh(1, 2, 1)]
    runs += [mesh(2, 1, 1)] if can_replicate("cpu") else []
    kept = len(runs)
    runs += [mesh(1, 2, 1, **KEPT)]
    value = {
        "algorithms.gradient_clipping.clipping_type": "value",
        "algorithms.gradient_clipping.clipping_threshold": 0.01,
    }
    runs.append(mesh(1, 1, 2, **{"optimizer.name": "decoupled_adamw_fused"}))
    expected_sizes = {"algorithms.dmoe.mesh.sizes": "expected"}
    runs += [mesh(1, 1, 2, **expected_sizes), mesh(1, 1, 2, **expected_sizes, **checkpointing)]
    runs.append(mesh(1, 1, 2, **value))
    results = run_processes(trainer_worker.train_runs, YAML, runs, world_size=2, preload=PRELOAD)
    expected = alone(2)
    assert "GradientClipping" in expected["algorithms"]
    # six units of FSDP2, three batches of four microbatches: twice in each, or once in a batch
    assert [results[run]["gathers"] for run in (2, kept)] == [144, 18]
    # of five units in each microbatch; once per batch, of the embedding twice, where weights are kept or replicas whole
    assert [results[run]["reductions"] for run in range(2, kept + 1)] == [60, *[18] * (kept - 2)]
    sizes = [run["sizes"] for run in results]
    assert sizes[:-3] + sizes[-1:] == [None] * (len(runs) - 2)
    assert sizes[-3:-1] == [(11 * 2, 0)] * 2, "twelve passes of two layers, and the first is exact"
    for run in results[:-1]:
        assert "MeshGradients" in run["algorithms"] and "GradientClipping" not in run["algorithms"]
        assert len(run["norms"]) == 3 and min(run["norms"]) > 0.5, "the threshold must bite"
        assert run["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        assert largest_difference(run, expected) < TOLERANCE
    fused = alone(2, **{"optimizer.name": "decoupled_adamw_fused"})
    assert "MeshGradients" in fused["algorithms"], "clips inside the optimizer"
    assert largest_difference(fused, expected) < TOLERANCE
    assert largest_difference(results[-1], alone(2, **value)) < TOLERANCE
    assert largest_difference(results[-1], expected) > 100 * TOLERANCE, "clipping by value is another training"


def test_gradients_in_bf16_are_added_up_in_fp32_or_reduced_one_by_one() -> None:
    """Where weights are kept. Nothing else changes: sums in fp32 differ by their order."""
    runs = [
        mesh(1, 2, 1, **{"fsdp_config.mixed_precision": mixed, "fsdp_config.reshard_after_forward": resharded})
        for mixed in ({"param_dtype": "bf16", "reduce_dtype": dtype} for dtype in ("fp32", "bf16"))
        for resharded in (True, False)
    ]
    results = run_processes(trainer_worker.train_runs, YAML, runs, world_size=2, preload=PRELOAD)
    assert [run["reductions"] for run in results] == [60, 18, 60, 60]
    assert largest_difference(results[1], results[0]) < TOLERANCE
    assert largest_difference(results[3], results[2]) == 0


@pytest.mark.parametrize(
    "launch",
    [
        pytest.param(
            {"preload": PRELOAD},
            marks=pytest.mark.skipif(not can_replicate("cpu"), reason="FSDP2 of torch 2.7 reduces by itself"),
            id="gloo",
        ),
        # a process that has started CUDA must not fork, and LLM Foundry may start it at import
        pytest.param({"preload": (), "backend": "nccl"}, marks=pytest.mark.gpu, id="nccl"),
    ],
)
def test_messages_of_gradients_in_bf16_change_nothing(launch: dict[str, Any]) -> None:
    """Of two ranks, whose sums have one order; with sums of several microbatches, FSDP2's dtype is sent."""
    if "backend" in launch and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    one = {"device_train_microbatch_size": 4}
    runs = [mesh(1, 2, 1, **MIXED, **keys) for keys in ({}, one, KEPT, {**KEPT, **one})]
    runs += [mesh(2, 1, 1, **MIXED, **keys) for keys in ({}, one)]
    runs += [mesh(1, 1, 2, **MIXED, **one)]
    ours, theirs = (
        run_processes(train, YAML, runs, world_size=2, **launch)
        for train in (trainer_worker.train_runs, trainer_worker.train_runs_by_fsdp2)
    )
    assert [run["sent in bf16"] for run in ours] == [60, 15, 0, 15, 0, 15, 0]
    assert [run["sent in bf16"] for run in theirs] == [0] * len(runs)
    for own, expected in zip(ours, theirs, strict=True):
        assert own["losses"] == expected["losses"] and largest_difference(own, expected) == 0


@pytest.mark.skipif(not can_replicate("cpu"), reason="FSDP2 of torch 2.7 reduces by itself")
def test_messages_in_bf16_between_more_than_two_ranks() -> None:
    """Sums in fp32 differ by their order. Four replicas of whole weights are left to FSDP2."""
    one = {"device_train_microbatch_size": 2}
    runs = [mesh(*of, **MIXED, **one) for of in ((1, 4, 1), (2, 2, 1), (2, 1, 2), (4, 1, 1))]
    ours, theirs = (
        run_processes(train, YAML, runs, world_size=4, preload=PRELOAD)
        for train in (trainer_worker.train_runs, trainer_worker.train_runs_by_fsdp2)
    )
    assert [run["sent in bf16"] for run in ours] == [15, 15, 6, 0]
    for own, expected in zip(ours, theirs, strict=True):
        assert own["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        assert largest_difference(own, expected) < TOLERANCE


def test_four_processes_equal_one() -> None:
    runs = [mesh(1, 2, 2), mesh(1, 1, 4)] + ([mesh(2, 1, 2)] if can_replicate("cpu") else [])
    runs.append(mesh(1, 2, 2, **{"algorithms.dmoe.mesh.sizes": "expected"}))
    results = run_processes(trainer_worker.train_runs, YAML, runs, world_size=4, preload=PRELOAD)
    expected = alone(4)
    assert results[-1]["sizes"][0] > 0
    for run in results:
        assert largest_difference(run, expected) < TOLERANCE
    name = "model.transformer.blocks.0.ffn.experts.w1_EFD"
    assert results[0]["placements"][name] == "(Shard(dim=1), Shard(dim=0))"
    if can_replicate("cpu"):
        assert results[2]["placements"][name] == "(Replicate(), Shard(dim=1), Shard(dim=0))"


def test_passes_that_are_repeated_for_want_of_room_change_nothing() -> None:
    """Every second pass of six; in the second one a single expert group has too little room, and both repeat it."""
    sizes = {"algorithms.dmoe.mesh.sizes": "expected"}
    runs = [mesh(1, 2, 2, **sizes), mesh(1, 2, 2, **sizes, **{"fsdp_config.activation_checkpointing": True})]
    results = run_processes(trainer_worker.train_runs_short_of_room, YAML, runs, world_size=4, preload=PRELOAD)
    expected = alone(4)
    for run in results:
        assert run["sizes"][1] == 3
        assert run["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        assert largest_difference(run, expected) < TOLERANCE


def test_model_entry_with_a_mesh_equals_one_process() -> None:
    moe = {"num_experts": 4, "top_k": 2, "loss": {"balance": 0.1, "z": 0.01}}
    entry = {"model.name": "dmoe_causal_lm", "model.moe": moe, "algorithms.dmoe": None}
    on_mesh = {**entry, "model.moe": {**moe, "mesh": {"expert": 2, "shard": 1}}}
    single = {**entry, "device_train_microbatch_size": 2}
    run = run_processes(trainer_worker.train_runs, YAML, [on_mesh], world_size=2, preload=PRELOAD)[0]
    assert "MoEMesh" in run["algorithms"] and "MeshGradients" in run["algorithms"]
    expected = run_processes(trainer_worker.train_runs, YAML, [single], world_size=1, preload=PRELOAD)[0]
    assert largest_difference(run, expected) < TOLERANCE
    # FSDP2 shards the output projection by itself: the loss is computed while its weight is whole
    without_logits = {**on_mesh, "model.loss_fn": "fused_linear_crossentropy"}
    run = run_processes(
        trainer_worker.train_runs_without_logits, YAML, [without_logits], world_size=2, preload=PRELOAD
    )[0]
    assert run["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert largest_difference(run, expected) < TOLERANCE


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (mesh(1, 1, 4), r"mesh.expert \(4\).* does not fit the number of GPUs \(2\)"),
        (
            {**mesh(1, 1, 2), "algorithms.dmoe.num_experts": 3},
            r"mesh.expert \(2\) must divide num_experts \(3\)",
        ),
        (
            {**mesh(1, 1, 2), "algorithms.gradient_clipping.clipping_type": "adaptive"},
            r"clipping_type \(adaptive\) does not support a mesh: use norm or value",
        ),
    ],
)
def test_what_cannot_be_is_one_sentence_on_all_ranks(overrides: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RuntimeError, match=sentence):
        run_processes(trainer_worker.train_runs, YAML, [overrides], world_size=2, preload=PRELOAD)
