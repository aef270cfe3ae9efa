"""Plans a run from its YAML: mesh, bytes on each GPU, messages and time of a step, and warnings.

A plan is calculated without creating weights. Expert loads are assumed to be nearly even (see `step.UNEVEN`). A search
varies only the mesh.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from foundry_moe.commands.plan.constants import Constants, shipped_constants
from foundry_moe.commands.plan.shape import ModelShape, read_shape
from foundry_moe.commands.plan.step import GIB, Message, Step, memory_of, messages_of, step_time
from foundry_moe.config import AUTO, RESHARD, MeshConfig, check_batch_size
from foundry_moe.launch.run_config import mesh_of, plan_experts
from foundry_moe.launch.spares import ranks_in_use
from foundry_moe.parallel.mesh import Mesh, MeshPlan, divisors
from foundry_moe.schema import UserError, section

MICROBATCH = "device_train_microbatch_size"
TIGHT_SHARE = 0.92  # of the GPU's memory; the allocator reserves more than it allocates
SLOW_SHARE, SLOW_S = 0.3, 0.01  # exposed messages above both, a share of the step and seconds, give a warning
OPTIMIZER_BYTES = {"adam": 8, "muon": 8, "lion": 4}  # of state for each parameter: two fp32 moments, or one
FEW_ROWS = 256  # of an expert in a microbatch, below which matrix products are slow


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The GPUs of a run. gpu_bytes: memory of one."""

    gpus: int
    gpus_per_node: int
    gpu_bytes: float
    constants: Constants = field(default_factory=lambda: shipped_constants("h100"))


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """The plan of a run on one mesh.

    microbatch: sequences in the largest microbatch of a GPU. sequences: of a GPU in a step.
    memory: bytes on each GPU by what they are for. time: seconds of a step by what they are spent on.
    """

    machine: Machine
    mesh: MeshPlan
    shape: ModelShape
    step: Step
    microbatch: int
    sequences: int
    memory: dict[str, float]
    messages: tuple[Message, ...]
    time: dict[str, float]

    @property
    def spares(self) -> int:
        """Idle GPUs (`mesh.spares`)."""
        return self.machine.gpus - self.mesh.world_size

    @property
    def memory_bytes(self) -> float:
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        return self.memory_bytes <= self.machine.gpu_bytes

    @property
    def tight(self) -> bool:
        """Whether uneven loads or fragmentation may exceed the memory."""
        return self.fits and self.memory_bytes > TIGHT_SHARE * self.machine.gpu_bytes

    @property
    def step_s(self) -> float:
        return sum(self.time.values())

    @property
    def step_tokens(self) -> int:
        """Of all GPUs."""
        return self.sequences * self.shape.sequence * self.mesh.world_size

    @property
    def tokens_per_s(self) -> float:
        """Of one GPU."""
        return self.sequences * self.shape.sequence / self.step_s

    @property
    def warnings(self) -> list[str]:
        """Reasons why the run does not fit or is slow, each with what to change."""
        found = []
        sizes = f"{self.memory_bytes / GIB:.0f} GiB of {self.machine.gpu_bytes / GIB:.0f}"
        if not self.fits:
            found.append(
                f"will not fit: {sizes}; lower device_train_microbatch_size, raise mesh.shard or mesh.expert, or set "
                "fsdp_config.activation_checkpointing: true"
            )
        if self.tight:
            found.append(f"tight: {sizes}; uneven loads may need more")
        if self.mesh.expert_nodes > 1:
            found.append(
                f"mesh.expert ({self.mesh.expert}) spans {self.mesh.expert_nodes} nodes: tokens cross the network twice"
                f" in every MoE layer; {self.mesh.ranks_per_node} or fewer stay on NVLink"
            )
        exposed_s = self.time.get("all-to-all", 0.0) + self.time.get("other messages", 0.0)
        if exposed_s > max(SLOW_SHARE * self.step_s, SLOW_S):
            found.append(
                f"slow: {exposed_s:.2f} s of a step of {self.step_s:.2f} s are messages that arithmetic does not hide; "
                "use more sequences per step, or a smaller mesh.shard with more mesh.replicate"
            )
        rows = self.step.tokens * self.shape.moe.top_k * self.mesh.expert / self.shape.moe.num_experts
        if rows < FEW_ROWS:
            found.append(
                f"slow: {rows:.0f} tokens per expert in a microbatch; matrix products are fast from {FEW_ROWS} on"
            )
        return found


def plan_run(
    run: Mapping[str, Any], machine: Machine, *, shape: ModelShape | None = None, mesh: MeshConfig | None = None
) -> RunPlan:
    """Plans a run; with `device_train_microbatch_size: auto` that of the largest microbatch that fits.

    Args:
        shape: of its model, if it has been read.
        mesh: in place of the run's own.
    """
    shape = shape or read_shape(run)
    if mesh is None and shape.moe.mesh == AUTO:
        found, invalid = search_meshes(run, machine, shape)
        if not found:
            raise UserError(f"mesh (auto): {next(iter(invalid.values()))}")
        return found[0]
    config = mesh or mesh_of(run, shape.moe) or MeshConfig()
    batch = run.get("global_train_batch_size")
    gpus = ranks_in_use(
        config,
        world_size=machine.gpus,
        ranks_per_node=machine.gpus_per_node,
        num_experts=shape.moe.num_experts,
        batch_size=batch,
    )
    plan = plan_experts(config, shape.moe, shape.d_model, gpus=gpus, ranks_per_node=machine.gpus_per_node)
    sequences = check_batch_size(batch, gpus) // gpus
    microbatch = run.get(MICROBATCH, AUTO)
    fsdp = section(run, "fsdp_config")
    if fsdp.get(RESHARD) == AUTO:  # false if that fits with room, which a microbatch that is auto takes
        keys = [{**run, "fsdp_config": {**fsdp, RESHARD: value}} for value in (False, True)]
        kept, again = (plan_run(values, machine, shape=shape, mesh=config) for values in keys)
        return kept if gpus == 1 or (microbatch != AUTO and kept.fits and not kept.tight) else again
    if microbatch == AUTO:  # the largest that fits with room, or 1
        sizes = (size for size in range(sequences, 0, -1) if sequences % size == 0)
        plans = (plan_run({**run, MICROBATCH: size}, machine, shape=shape, mesh=config) for size in sizes)
        return next(found for found in plans if (found.fits and not found.tight) or found.microbatch == 1)
    if not isinstance(microbatch, int) or microbatch < 1:
        raise UserError(f"{MICROBATCH} ({microbatch!r}) must be a whole number of 1 or more, or auto")
    microbatch = min(microbatch, sequences)
    optimizer = str(section(run, "optimizer").get("name", "decoupled_adamw"))
    step = Step(
        tokens=microbatch * shape.sequence,
        microbatches=math.ceil(sequences / microbatch),
        width=2 if "16" in str(run.get("precision", "amp_bf16")) else 4,
        state_bytes=next((size for name, size in OPTIMIZER_BYTES.items() if name in optimizer), 0),
        muon=optimizer == "muon",
        checkpointed=bool(fsdp.get("activation_checkpointing")),
        resharded=bool(fsdp.get(RESHARD, True)),
        stored=2 if "16" in str(section(run, "model").get("master_weights_dtype")) else 4,
    )
    # memory is that of the largest microbatch, time that of the mean one
    mean = replace(step, tokens=sequences * shape.sequence // step.microbatches)
    return RunPlan(
        machine=machine,
        mesh=plan,
        shape=shape,
        step=step,
        microbatch=microbatch,
        sequences=sequences,
        memory=memory_of(shape, plan, step),
        messages=messages_of(shape, plan, step),
        time=step_time(shape, plan, mean, messages_of(shape, plan, mean), machine.constants),
    )


def search_meshes(
    run: Mapping[str, Any], machine: Machine, shape: ModelShape | None = None
) -> tuple[list[RunPlan], dict[Mesh, str]]:
    """Plans of all meshes, and the reasons why other meshes are invalid.

    Returns:
        Meshes that fit, fastest first, with tight ones last; then those that do not fit, by memory. The reasons by
        (replicate, shard, expert).
    """
    shape = shape or read_shape(run)
    given = mesh_of(run, shape.moe) or MeshConfig()
    plans, invalid = [], {}
    for expert in divisors(shape.moe.num_experts):
        for shard in divisors(machine.gpus // expert) if machine.gpus % expert == 0 else ():
            replicate = machine.gpus // (expert * shard)
            mesh = replace(given, replicate=replicate, shard=shard, expert=expert, spares=False)
            try:
                plans.append(plan_run(run, machine, shape=shape, mesh=mesh))
            except UserError as error:
                invalid[replicate, shard, expert] = str(error)
    return sorted(plans, key=lambda p: (p.tight, p.step_s) if p.fits else (2, p.memory_bytes)), invalid


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
