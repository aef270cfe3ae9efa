"""`device_train_microbatch_size: auto`, and the options that a run out of memory is offered, which fit by the plan."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import yaml

from foundry_moe import train
from foundry_moe.commands.plan import microbatch
from foundry_moe.commands.plan.command import format_plan
from foundry_moe.commands.plan.microbatch import choose_mesh, choose_microbatch, choose_reshard, out_of_memory
from foundry_moe.commands.plan.planner import MICROBATCH, Machine, RunPlan, plan_run
from foundry_moe.commands.plan.step import GIB
from foundry_moe.schema import section
from tests.helpers.plans import load

pytestmark = pytest.mark.quick


def machine(gib: float, gpus: int = 4) -> Machine:
    return Machine(gpus=gpus, gpus_per_node=gpus, gpu_bytes=gib * GIB)


def olmoe(**overrides: Any) -> dict[str, Any]:
    return load("yamls/bench/olmoe_1b_7b.yaml", **overrides)


@pytest.mark.parametrize("gib", [60, 90, 141])
def test_auto_is_the_largest_size_that_fits_with_room(gib: float) -> None:
    run = olmoe(global_train_batch_size=64)
    del run[MICROBATCH]  # LLM Foundry's default is auto
    plan = choose_microbatch(run, machine(gib))
    assert plan.fits and not plan.tight and 16 % plan.microbatch == 0
    larger = plan_run({**run, MICROBATCH: 2 * plan.microbatch}, machine(gib))
    assert plan.microbatch == 16 or larger.tight or not larger.fits
    assert plan_run({**run, MICROBATCH: "auto"}, machine(gib)).microbatch == plan.microbatch


@pytest.mark.parametrize("gpus", [1, 2, 8, 16])
def test_a_mesh_that_is_auto_fits_any_number_of_gpus(gpus: int) -> None:
    run = olmoe(global_train_batch_size=64)
    section(run, "model", "moe")["mesh"] = "auto"
    widths, said = choose_mesh(run, machine(139, gpus), "cuda")
    plan = plan_run(run, machine(139, gpus))
    assert plan.mesh.world_size == gpus and widths == {name: getattr(plan.mesh, name) for name in widths}
    assert f"mesh: {plan.mesh} (auto: " in said and ("no mesh fits" in said) != plan.fits
    with pytest.raises(ValueError, match=r"^mesh \(auto\): global_train_batch_size \(64\) must be a multiple of"):
        choose_mesh(run, machine(139, 3), "cuda")


def test_auto_counts_the_logits_that_a_machine_without_liger_kernel_holds(monkeypatch) -> None:
    run = olmoe(global_train_batch_size=64)
    with_kernels = choose_microbatch(run, machine(90))
    monkeypatch.setattr(microbatch, "is_installed", lambda: False)
    without = choose_microbatch(run, machine(90))
    logits_bytes = 50304 * 4096 * without.microbatch * (2 + 4)  # in bf16, and at least one fp32 tensor beside them
    fused = plan_run({**run, MICROBATCH: without.microbatch}, machine(90))
    assert without.microbatch < with_kernels.microbatch
    assert without.memory_bytes > fused.memory_bytes + logits_bytes


def test_a_run_of_shorter_sequences_than_its_model_is_planned_with_its_own_length() -> None:
    long = olmoe(global_train_batch_size=64)
    short = {**long, "max_seq_len": long["model"]["max_seq_len"] // 4}
    plan, longer = choose_microbatch(short, machine(60)), choose_microbatch(long, machine(60))
    assert plan.step_tokens == 64 * short["max_seq_len"] and plan.microbatch > longer.microbatch
    assert "1,024 tokens on a GPU" in format_plan(plan)


def resharding(**overrides: Any) -> dict[str, Any]:
    return olmoe(fsdp_config={"reshard_after_forward": "auto"}, **overrides)


def test_weights_stay_gathered_where_that_leaves_room() -> None:
    kept = plan_run(olmoe(fsdp_config={"reshard_after_forward": False}), machine(141))
    again = plan_run(olmoe(), machine(141))
    # in bf16, the experts of one GPU and all other parameters but those outside blocks
    blocks_bytes = 2 * ((kept.shape.num_params - kept.shape.experts) + kept.shape.experts / 4 - 2 * 50304 * 2048)
    assert kept.memory_bytes - again.memory_bytes == pytest.approx(blocks_bytes, rel=0.01)
    assert kept.step_s < again.step_s
    sizes = f"false {kept.memory_bytes / GIB:.1f} GiB, true {again.memory_bytes / GIB:.1f} GiB"
    for gib, value in ((kept.memory_bytes / GIB / 0.91, False), (kept.memory_bytes / GIB / 0.93, True)):
        chosen, said = choose_reshard(resharding(), machine(gib))
        assert chosen is value and plan_run(resharding(), machine(gib)).step.resharded is value
        words = f"reshard_after_forward: {str(value).lower()} (auto: {sizes}, of {gib:.1f} GiB on each GPU by the plan)"
        assert said == words
        assert f"memory of a GPU, reshard_after_forward {str(value).lower()}:" in format_plan(
            plan_run(resharding(), machine(gib))
        )


def test_weights_are_gathered_again_where_no_plan_says_otherwise() -> None:
    other = {**resharding(), "model": {"name": "own"}}
    for run, on, why in (
        (resharding(), None, "no GPU"),
        (resharding(**{MICROBATCH: "auto"}), machine(1000), f"{MICROBATCH} is auto"),
        (other, machine(1000), "model"),
    ):
        chosen, said = choose_reshard(run, on)
        assert chosen is True and said.startswith("reshard_after_forward: true (auto: ") and why in said
    assert plan_run(resharding(**{MICROBATCH: "auto"}), machine(141)).step.resharded
    alone = resharding(model__moe__mesh={"expert": 1}, global_train_batch_size=4)
    assert not plan_run(alone, machine(1, gpus=1)).step.resharded, "one GPU gathers nothing"


@pytest.mark.parametrize(("gib", "value"), [(141, False), (50, True)])
def test_the_command_takes_the_memory_of_this_machines_fullest_gpu(monkeypatch, capsys, gib: int, value: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(train, "_least_memory", lambda: gib * GIB)
    assert train._choose_reshard(resharding(), 4) is value
    assert capsys.readouterr().out.startswith(f"reshard_after_forward: {str(value).lower()} (auto: false ")


def test_a_run_that_keeps_weights_gathered_is_offered_to_gather_them_again() -> None:
    run = olmoe(fsdp_config={"reshard_after_forward": False}, model__moe__mesh={"expert": 1})
    sentence = out_of_memory(run, machine(50), "in batch 1")
    assert "fsdp_config.reshard_after_forward: true (" in sentence
    assert "reshard_after_forward" not in out_of_memory(
        olmoe(model__moe__mesh={"expert": 1}), machine(50), "in batch 1"
    )


def test_auto_that_cannot_fit_is_a_sentence() -> None:
    with pytest.raises(ValueError, match=r"\(auto\): one sequence needs .* GiB by the plan, .* use more, or a smaller"):
        choose_microbatch(olmoe(), machine(12))
    with pytest.raises(ValueError, match=r"\(auto\): the run has no experts.*; or give a number"):
        choose_microbatch(olmoe(model__moe=None, model__name="mpt_causal_lm"), machine(80))


def offered(sentence: str, run: dict[str, Any], on: Machine) -> list[RunPlan]:
    """The plans of what a sentence offers."""
    plans = []
    if found := re.search(rf"{MICROBATCH}: ([0-9]+) ", sentence):
        plans.append(plan_run({**run, MICROBATCH: int(found[1])}, on))
    if "activation_checkpointing: true" in sentence:
        plans.append(plan_run({**run, "fsdp_config": {"activation_checkpointing": True}}, on))
    if found := re.search(r"mesh: (\{.*?\})", sentence):
        moe = {**run["model"]["moe"], "mesh": yaml.safe_load(found[1])}
        plans.append(plan_run({**run, "model": {**run["model"], "moe": moe}}, on))
    return plans


@pytest.mark.parametrize(
    ("overrides", "gib", "words"),
    [
        ({MICROBATCH: 16}, 80, [MICROBATCH + ": ", "activation_checkpointing"]),
        ({MICROBATCH: 1, "model__moe__mesh": {"expert": 1, "shard": 1, "replicate": 4}}, 80, ["mesh: {replicate: "]),
    ],
)
def test_what_is_offered_after_an_out_of_memory_error_fits(
    overrides: dict[str, Any], gib: float, words: list[str]
) -> None:
    run, on = olmoe(global_train_batch_size=64, **overrides), machine(gib)
    sentence = out_of_memory(run, on, "in batch 1")
    assert sentence.startswith(f"out of memory in batch 1 on a GPU with {gib}.0 GiB"), sentence
    assert all(word in sentence for word in words), sentence
    plans = offered(sentence, run, on)
    assert plans and all(plan.fits and not plan.tight for plan in plans), sentence


def test_one_gpu_is_offered_neither_recomputation_nor_a_mesh() -> None:
    run = load("yamls/pretrain/1gpu.yaml", **{MICROBATCH: 64, "global_train_batch_size": 64})
    sentence = out_of_memory(run, machine(40, gpus=1), "in batch 2")
    assert "activation_checkpointing" not in sentence and "mesh" not in sentence
    assert re.search(rf"these fit: {MICROBATCH}: [0-9]+ \(", sentence), sentence


def test_a_run_that_should_fit_is_offered_less_than_it_had() -> None:
    """The plan was wrong: loads are uneven, or other processes take memory."""
    run = olmoe(global_train_batch_size=64, **{MICROBATCH: 4})
    on = machine(1000)
    failed = plan_run(run, on)
    plans = offered(out_of_memory(run, on, "in batch 1"), run, on)
    assert plans and all(plan.memory_bytes <= 0.9 * failed.memory_bytes for plan in plans)


def test_a_model_that_the_planner_does_not_know_is_told_to_lower_the_microbatch() -> None:
    run = {**olmoe(), "model": {"name": "own"}, MICROBATCH: 8}
    assert out_of_memory(run, machine(80), "in batch 1").endswith(f"lower {MICROBATCH} (8), or use more GPUs")
