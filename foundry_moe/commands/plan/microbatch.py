"""Chooses the microbatch, the mesh and resharding where they are `auto`, and says what fits if memory runs out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from foundry_moe.commands.plan.planner import MICROBATCH, Machine, RunPlan, plan_run, search_meshes
from foundry_moe.commands.plan.step import GIB
from foundry_moe.config import AUTO, RESHARD
from foundry_moe.launch.run_config import MODEL
from foundry_moe.models.loss_head import is_installed
from foundry_moe.parallel.mesh import DIMENSIONS, can_replicate
from foundry_moe.schema import UserError, section

LESS = 0.9  # of the memory that a run lacked, at most: the planner is within 4%


def choose_microbatch(run: Mapping[str, Any], machine: Machine) -> RunPlan:
    """The plan with the largest microbatch that fits."""
    run = _with_loss_of_here(run)
    try:
        plan = plan_run({**run, MICROBATCH: AUTO}, machine)
    except UserError as error:
        raise UserError(f"{MICROBATCH} (auto): {error}; or give a number") from None
    if not plan.fits:
        raise UserError(
            f"{MICROBATCH} (auto): one sequence needs {_gib(plan.memory_bytes)} by the plan, and a GPU has "
            f"{_gib(machine.gpu_bytes)} free; {_advice(run, plan)}; or give a number to try it"
        )
    return plan


def choose_mesh(run: Mapping[str, Any], machine: Machine, device_type: str) -> tuple[dict[str, int], str]:
    """The widths of the fastest mesh that fits, and a line about it; the one with the least memory if none fits."""
    try:
        plans, invalid = search_meshes(_with_loss_of_here(run), machine)
    except UserError as error:
        raise UserError(f"mesh (auto): {error}; or give the widths") from None
    plan = next((p for p in plans if p.mesh.replicate == 1 or can_replicate(device_type)), None)
    if plan is None:
        raise UserError(f"mesh (auto): {next(iter(invalid.values()))}")
    sizes = f"{_gib(plan.memory_bytes)} of {_gib(machine.gpu_bytes)} on each GPU by the plan"
    said = f"mesh: {plan.mesh} (auto: {sizes}{'' if plan.fits else '; no mesh fits'})"
    return {name: getattr(plan.mesh, name) for name in DIMENSIONS}, said


def choose_reshard(run: Mapping[str, Any], machine: Machine | None) -> tuple[bool, str]:
    """The value of `reshard_after_forward: auto`, and a line about it. machine: None without GPUs."""
    run, fsdp = _with_loss_of_here(run), section(run, "fsdp_config")
    resharded, said = True, "no GPU" if machine is None else f"{MICROBATCH} is auto"
    if machine is not None and run.get(MICROBATCH, AUTO) != AUTO:
        keys = [{**run, "fsdp_config": {**fsdp, RESHARD: value}} for value in (AUTO, False, True)]
        try:
            chosen, kept, again = (plan_run(values, machine) for values in keys)
            resharded, sizes = chosen.step.resharded, [_gib(plan.memory_bytes) for plan in (kept, again)]
            said = f"false {sizes[0]}, true {sizes[1]}, of {_gib(machine.gpu_bytes)} on each GPU by the plan"
        except UserError as error:
            said = str(error)
    return resharded, f"{RESHARD}: {str(resharded).lower()} (auto: {said})"


def out_of_memory(run: Mapping[str, Any], machine: Machine, where: str) -> str:
    """The sentence for a run that ran out of memory.

    Args:
        machine: with the memory that the run could use.
        where: such as "in batch 1".
    """
    failed = f"out of memory {where} on a GPU with {_gib(machine.gpu_bytes)} for this run"
    run = _with_loss_of_here(run)
    try:
        plan = plan_run(run, machine)
    except UserError:  # a model that the planner does not support
        return f"{failed}: lower {MICROBATCH} ({run.get(MICROBATCH)}), or use more GPUs"
    return (
        f"{failed}: {MICROBATCH} ({plan.microbatch}) needs {_gib(plan.memory_bytes)} by the plan; {_advice(run, plan)}"
    )


def _advice(run: Mapping[str, Any], failed: RunPlan) -> str:
    """The changes with which the run fits by the plan, with at most `LESS` of the memory of a plan that failed."""
    machine, shape = failed.machine, failed.shape

    def helps(plan: RunPlan) -> bool:
        return plan.fits and not plan.tight and plan.memory_bytes <= LESS * failed.memory_bytes

    options = []
    smaller = [size for size in range(failed.microbatch - 1, 0, -1) if failed.sequences % size == 0]
    plans = (plan_run({**run, MICROBATCH: size}, machine, shape=shape) for size in smaller)
    if (found := next(filter(helps, plans), None)) is not None:
        options.append(f"{MICROBATCH}: {found.microbatch} ({_gib(found.memory_bytes)})")
    run = {**run, MICROBATCH: failed.microbatch}
    if machine.gpus > 1:  # LLM Foundry drops `fsdp_config` on one
        for key in (RESHARD, "activation_checkpointing"):
            changed = {**section(run, "fsdp_config"), key: True}
            found = plan_run({**run, "fsdp_config": changed}, machine, shape=shape)
            if helps(found):
                options.append(f"fsdp_config.{key}: true ({_gib(found.memory_bytes)})")
        found = next(filter(helps, search_meshes(run, replace(machine, gpus=failed.mesh.world_size), shape)[0]), None)
        if found is not None:
            mesh = found.mesh
            sizes = f"{{replicate: {mesh.replicate}, shard: {mesh.shard}, expert: {mesh.expert}}}"
            options.append(f"mesh: {sizes} ({_gib(found.memory_bytes)})")
    if options:
        return f"these fit: {'; '.join(options)}"
    return f"no smaller microbatch, recomputation or other mesh fits {machine.gpus} GPUs: use more, or a smaller model"


def _with_loss_of_here(run: Mapping[str, Any]) -> Mapping[str, Any]:
    """The run with the loss that `auto` is on this machine: without Liger-Kernel it holds all logits."""
    model = section(run, "model")
    if model.get("name") != MODEL or model.get("loss_fn", AUTO) != AUTO or is_installed():
        return run
    return {**run, "model": {**model, "loss_fn": "torch_crossentropy"}}


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"
