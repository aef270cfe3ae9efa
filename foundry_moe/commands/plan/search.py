"""`foundry-moe plan --search`: every mesh of the given GPUs, fastest first, with the reason why others are slower.

Only the three widths of the mesh vary.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from foundry_moe.commands.plan.planner import Machine, RunPlan, plan_run
from foundry_moe.commands.plan.shape import ModelShape, planned_moe, read_shape
from foundry_moe.commands.plan.step import GIB
from foundry_moe.parallel.mesh import Mesh, divisors

DAY_S, HOUR_S = 86400.0, 3600.0
_DURATION = re.compile(r"(\d+)(ba|tok|sp)")


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One mesh. plan: None if the mesh is invalid. why: the reason why it is slower, does not fit or is invalid.

    days, gpu_hours: until `max_duration`; None if that is in epochs, whose length the YAML does not give.
    """

    mesh: Mesh
    plan: RunPlan | None
    why: str = ""
    days: float | None = None
    gpu_hours: float | None = None

    @property
    def fits(self) -> bool:
        return self.plan is not None and self.plan.fits


def steps_of(run: Mapping[str, Any], plan: RunPlan) -> float | None:
    """Steps until `max_duration`; None if that is in epochs."""
    found = _DURATION.fullmatch(str(run.get("max_duration", "")))
    if found is None:
        return None
    sequences = plan.sequences * plan.mesh.world_size
    return int(found[1]) / {"ba": 1, "sp": sequences, "tok": plan.step_tokens}[found[2]]


def search_meshes(run: Mapping[str, Any], machine: Machine, shape: ModelShape | None = None) -> list[Candidate]:
    """All meshes: those that fit, fastest first; then those that do not fit, by memory; then invalid ones.

    Raises:
        ValueError: the run has no experts, its model is not supported, or a key is invalid.
    """
    moe, given = planned_moe(run)
    shape = shape or read_shape(run)
    plans, invalid = [], []
    for expert in divisors(moe.num_experts):
        for shard in divisors(machine.gpus // expert) if machine.gpus % expert == 0 else ():
            mesh = (machine.gpus // (expert * shard), shard, expert)
            config = replace(given, replicate=mesh[0], shard=shard, expert=expert, spares=False)
            try:
                plans.append(plan_run(run, machine, shape=shape, mesh=config))
            except ValueError as error:
                invalid.append(Candidate(mesh=mesh, plan=None, why=str(error)))
    plans.sort(key=lambda plan: (plan.tight, plan.step_s) if plan.fits else (2, plan.memory_bytes))
    return [*(_candidate(run, plan, plans[0]) for plan in plans), *invalid]


def _candidate(run: Mapping[str, Any], plan: RunPlan, best: RunPlan) -> Candidate:
    steps = steps_of(run, plan)
    seconds = None if steps is None else steps * plan.step_s
    return Candidate(
        mesh=(plan.mesh.replicate, plan.mesh.shard, plan.mesh.expert),
        plan=plan,
        why=_why_not(plan, best),
        days=None if seconds is None else seconds / DAY_S,
        gpu_hours=None if seconds is None else seconds * plan.machine.gpus / HOUR_S,
    )


def _why_not(plan: RunPlan, best: RunPlan) -> str:
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
