"""`foundry-moe plan --search`: every mesh of the given GPUs, fastest first, with the reason why others are slower.

Everything but the mesh's three widths is the run's own: its batch, microbatch and so on.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from foundry_moe.commands.plan.memory import GIB
from foundry_moe.commands.plan.planner import Machine, RunPlan, plan_on, shape_of
from foundry_moe.commands.plan.shape import ModelShape, planned_moe
from foundry_moe.config import AUTO, MeshConfig
from foundry_moe.parallel.mesh import Mesh, divisors
from foundry_moe.schema import from_mapping

TIGHT = 0.92  # share of the memory above which a mesh sorts behind meshes with room: the allocator keeps a reserve
DAY_S, HOUR_S = 86400.0, 3600.0
_DURATION = re.compile(r"(\d+)(ba|tok|sp)")


@dataclass(frozen=True, kw_only=True)
class Found:
    """One mesh. plan: None if the mesh is invalid. why: the reason why it is slower, does not fit or is invalid."""

    mesh: Mesh
    plan: RunPlan | None
    why: str = ""
    days: float | None = None
    gpu_hours: float | None = None

    @property
    def fits(self) -> bool:
        return self.plan is not None and self.plan.fits

    @property
    def tight(self) -> bool:
        return self.plan is not None and any(warning.startswith("tight") for warning in self.plan.warnings)


def steps_of(run: Mapping[str, Any], plan: RunPlan) -> float | None:
    """Steps until `max_duration`; None where that is in epochs, whose length the YAML does not say."""
    found = _DURATION.fullmatch(str(run.get("max_duration", "")))
    if found is None:
        return None
    number, unit = int(found[1]), found[2]
    sequences = plan.sequences * plan.mesh.world_size
    return number / {"ba": 1, "sp": sequences, "tok": plan.step_tokens}[unit]


def search_meshes(run: Mapping[str, Any], machine: Machine, shape: ModelShape | None = None) -> list[Found]:
    """All meshes: those that fit, fastest first; then those that do not fit, by memory; then invalid ones.

    Raises:
        ValueError: no experts, a model that is not read, or keys that cannot be.
    """
    moe, keys = planned_moe(run)
    given = from_mapping(MeshConfig, keys, "mesh")
    shape = shape_of(run) if shape is None else shape
    found: dict[Mesh, Found] = {}
    for expert, shard in _widths(moe.num_experts, machine.gpus, given.spares):
        replicate = machine.gpus // (expert * shard)
        # with spares as many replicas as the batch divides by
        widths = {"replicate": AUTO if given.spares else replicate, "shard": shard, "expert": expert}
        try:
            plan = plan_on(run, shape, moe, replace(given, **widths), machine)  # type: ignore[arg-type]
        except ValueError as error:
            mesh = (replicate, shard, expert)
            found.setdefault(mesh, Found(mesh=mesh, plan=None, why=str(error)))
            continue
        mesh = (plan.mesh.replicate, shard, expert)
        found[mesh] = _costed(run, mesh, plan, machine)
    fit = sorted((f for f in found.values() if f.fits), key=lambda f: (f.tight, f.plan.time.step_s))  # type: ignore[union-attr]
    large = sorted((f for f in found.values() if f.plan and not f.fits), key=lambda f: f.plan.memory_bytes)  # type: ignore[union-attr]
    impossible = [f for f in found.values() if f.plan is None]
    if fit:
        best = fit[0].plan
        assert best is not None
        fit = [fit[0], *(replace(f, why=_why_slower(f.plan, best, f.tight)) for f in fit[1:] if f.plan)]
    return [*fit, *large, *impossible]


def _widths(num_experts: int, gpus: int, spares: bool) -> list[tuple[int, int]]:
    """(expert, shard) of every mesh; with spares, where not all GPUs must take part, powers of two beside divisors."""
    found = []
    for expert in divisors(num_experts):
        groups = gpus // expert
        if groups and (spares or gpus % expert == 0):
            powers = {2**power for power in range(groups.bit_length())} if spares else set()
            found += [(expert, shard) for shard in sorted(powers | set(divisors(groups)))]
    return found


def _costed(run: Mapping[str, Any], mesh: Mesh, plan: RunPlan, machine: Machine) -> Found:
    lacking = plan.memory_bytes - machine.gpu_bytes
    steps = steps_of(run, plan)
    seconds = None if steps is None else steps * plan.time.step_s
    return Found(
        mesh=mesh,
        plan=plan,
        why="" if plan.fits else f"does not fit by {lacking / GIB:.1f} GiB",
        days=None if seconds is None else seconds / DAY_S,
        gpu_hours=None if seconds is None else seconds * machine.gpus / HOUR_S,
    )


def _why_slower(plan: RunPlan, best: RunPlan, tight: bool) -> str:
    """The part of a step that takes most more than in the best mesh."""
    more = {name: seconds - best.time.parts.get(name, 0.0) for name, seconds in plan.time.parts.items()}
    name = max(more, key=lambda part: more[part])
    room = f"tight, {plan.memory_bytes / GIB:.0f} GiB; " if tight else ""
    if more[name] < 0.001 * best.time.step_s:
        return f"{room}as fast"
    where = ""
    if name == "all-to-all" and plan.mesh.expert_nodes > 1:
        where = " between nodes"
    elif name == "other messages" and plan.time.network_s > best.time.network_s:
        where = f" ({plan.time.network_s:.2f} s of them between nodes, with what is hidden)"
    was = best.time.parts.get(name, 0.0)
    return f"{room}{name}{where} {plan.time.parts[name]:.3g} s, not {was:.3g}"
