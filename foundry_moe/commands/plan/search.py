"""`foundry-moe plan --search`: every mesh of the given GPUs, fastest first, with the reason why others are slower.

Only the three widths of the mesh vary.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from foundry_moe.commands.plan.planner import Machine, RunPlan, plan_run
from foundry_moe.commands.plan.shape import ModelShape, planned_moe, read_shape
from foundry_moe.commands.plan.step import GIB
from foundry_moe.parallel.mesh import Mesh, divisors

DAY_S = 86400.0
_DURATION = re.compile(r"(\d+)(ba|tok|sp)")


def search_meshes(
    run: Mapping[str, Any], machine: Machine, shape: ModelShape | None = None
) -> tuple[list[RunPlan], dict[Mesh, str]]:
    """Plans of all meshes, and the reasons why other meshes are invalid.

    Returns:
        Meshes that fit, fastest first, with tight ones last; then those that do not fit, by memory. The reasons by
        (replicate, shard, expert).

    Raises:
        ValueError: the run has no experts, its model is not supported, or a key is invalid.
    """
    moe, given = planned_moe(run)
    shape = shape or read_shape(run)
    plans, invalid = [], {}
    for expert in divisors(moe.num_experts):
        for shard in divisors(machine.gpus // expert) if machine.gpus % expert == 0 else ():
            replicate = machine.gpus // (expert * shard)
            mesh = replace(given, replicate=replicate, shard=shard, expert=expert, spares=False)
            try:
                plans.append(plan_run(run, machine, shape=shape, mesh=mesh))
            except ValueError as error:
                invalid[replicate, shard, expert] = str(error)
    return sorted(plans, key=lambda p: (p.tight, p.step_s) if p.fits else (2, p.memory_bytes)), invalid


def days_of(run: Mapping[str, Any], plan: RunPlan) -> float | None:
    """Days until `max_duration`; None if that is in epochs, whose length the YAML does not give."""
    found = _DURATION.fullmatch(str(run.get("max_duration", "")))
    if found is None:
        return None
    sequences = plan.sequences * plan.mesh.world_size
    steps = int(found[1]) / {"ba": 1, "sp": sequences, "tok": plan.step_tokens}[found[2]]
    return steps * plan.step_s / DAY_S


def why_not(plan: RunPlan, best: RunPlan) -> str:
    """The memory that is missing, or the part of a step with the largest increase over the best mesh."""
    if not plan.fits:
        return f"does not fit by {(plan.memory_bytes - plan.machine.gpu_bytes) / GIB:.1f} GiB"
    if plan is best:
        return ""
    more = {name: seconds - best.time.get(name, 0.0) for name, seconds in plan.time.items()}
    name = max(more, key=lambda part: more[part])
    room = f"tight, {plan.memory_bytes / GIB:.0f} GiB; " if plan.tight else ""
    if more[name] < 0.001 * best.step_s:
        return f"{room}as fast"
    where = " between nodes" if name == "all-to-all" and plan.mesh.expert_nodes > 1 else ""
    return f"{room}{name}{where} {plan.time[name]:.3g} s, not {best.time.get(name, 0.0):.3g}"
