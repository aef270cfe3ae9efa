"""Plans a run from its YAML: mesh, bytes on each GPU, messages and time of a step, and warnings.

The plan is arithmetic. Only a Hugging Face model is built, without weights. Expert loads are assumed even, as with a
balance loss, unless `skew` is given.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from foundry_moe.commands.plan.constants import Constants, shipped_constants
from foundry_moe.commands.plan.memory import GIB, memory_of
from foundry_moe.commands.plan.shape import HUGGING_FACE, ModelShape, planned_moe, read_shape
from foundry_moe.commands.plan.step import Message, Step, messages_of, read_step
from foundry_moe.commands.plan.step_time import StepTime, step_time
from foundry_moe.config import MeshConfig, MoEConfig, can_cut_rows, check_batch_size
from foundry_moe.launch.spares import ranks_in_use
from foundry_moe.parallel.mesh import MeshPlan, check_expert_widths, plan_mesh
from foundry_moe.schema import from_mapping, section

NO_FIT = "will not fit"
SAID_S = 0.01  # exposed messages below this give no warning: such a step is too small for these rates
SLOW_SHARE = 0.3  # exposed messages above this share of a step give a warning


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The GPUs that a run is planned for. gpu_bytes: memory of one. skew: of the fullest expert rank over the mean."""

    gpus: int
    gpus_per_node: int
    gpu_bytes: float
    constants: Constants = field(default_factory=lambda: shipped_constants("h100"))
    skew: float = 1.0

    def __post_init__(self) -> None:
        if not 1 <= self.skew < math.inf:
            raise ValueError(f"--skew ({self.skew:g}) must be 1 or more: rows of the fullest expert rank over the mean")


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """The result of `foundry-moe plan`.

    memory: bytes on each GPU by what they are for.
    microbatch: sequences at most; microbatches: in a step; sequences: of a GPU in a step.
    spares: idle GPUs (`mesh.spares`).
    time: of a step; skew: the given one, at most the number of expert ranks.
    """

    mesh: MeshPlan
    spares: int
    shape: ModelShape
    microbatch: int
    microbatches: int
    sequences: int
    skew: float
    memory: dict[str, float]
    messages: tuple[Message, ...]
    time: StepTime
    constants: Constants
    warnings: tuple[str, ...]

    @property
    def memory_bytes(self) -> float:
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        return not any(warning.startswith(NO_FIT) for warning in self.warnings)

    @property
    def step_tokens(self) -> int:
        """Of all GPUs."""
        return self.sequences * self.shape.sequence * self.mesh.world_size


def shape_of(run: Mapping[str, Any]) -> ModelShape:
    """The shape of a run's model with its experts.

    Raises:
        ValueError: no experts, or a model that is not read.
    """
    moe, _ = planned_moe(run)
    if section(run, "model").get("name") == HUGGING_FACE:
        from foundry_moe.commands.plan.hugging_face import count_shape  # imports transformers

        return count_shape(run, moe)
    return read_shape(run)


def plan_run(run: Mapping[str, Any], machine: Machine, shape: ModelShape | None = None) -> RunPlan:
    """Plans a run.

    Args:
        shape: of its model, where it has been read.

    Raises:
        ValueError: no experts, a model that is not read, or a mesh or batch that cannot be.
    """
    moe, mesh_keys = planned_moe(run)
    shape = shape_of(run) if shape is None else shape
    return plan_on(run, shape, moe, from_mapping(MeshConfig, mesh_keys, "mesh"), machine)


def plan_on(
    run: Mapping[str, Any], shape: ModelShape, moe: MoEConfig, mesh_config: MeshConfig, machine: Machine
) -> RunPlan:
    """`plan_run`, with a model's shape that has been read and a mesh that may be another than the run's."""
    gpus = machine.gpus
    widths: dict[str, int] = {"ranks_per_node": machine.gpus_per_node, "num_experts": moe.num_experts}
    batch = run.get("global_train_batch_size")
    used = ranks_in_use(mesh_config, world_size=gpus, batch_size=batch, **widths)
    spares, gpus = gpus - used, used
    mesh = plan_mesh(mesh_config, world_size=gpus, **widths)
    cut = [(shape.d_model, "d_model")]
    if isinstance(moe.expert_hidden_size, tuple):
        check_expert_widths(moe.expert_hidden_size, mesh.expert)
    else:
        cut.insert(0, (shape.widest_expert, "expert_hidden_size"))
    for rows, what in cut:
        if not can_cut_rows(rows, shard=mesh.shard, expert=mesh.expert):
            raise ValueError(f"mesh.shard ({mesh.shard}) must divide {what} ({rows}), the rows of experts' matrices")
    microbatch = run.get("device_train_microbatch_size")
    batch = check_batch_size(batch, gpus)
    if not isinstance(microbatch, int) or microbatch < 1:
        raise ValueError(
            f"device_train_microbatch_size ({microbatch!r}) must be a number to plan with: FSDP2 has no auto"
        )
    sequences = batch // gpus
    microbatch = min(microbatch, sequences)
    microbatches = math.ceil(sequences / microbatch)
    skew = min(machine.skew, mesh.expert)
    step = read_step(run, moe, mesh_config, tokens=microbatch * shape.sequence, microbatches=microbatches, skew=skew)
    memory, messages = memory_of(shape, mesh, step), messages_of(shape, mesh, step)
    even = replace(step, tokens=sequences * shape.sequence // microbatches)  # the last microbatch may be smaller
    time = step_time(shape, mesh, even, messages_of(shape, mesh, even), machine.constants)
    return RunPlan(
        mesh=mesh,
        spares=spares,
        shape=shape,
        microbatch=microbatch,
        microbatches=microbatches,
        sequences=sequences,
        skew=skew,
        memory=memory,
        messages=messages,
        time=time,
        constants=machine.constants,
        warnings=tuple(_warnings(shape, mesh, step, memory, time, machine)),
    )


def _warnings(
    shape: ModelShape, mesh: MeshPlan, step: Step, memory: dict[str, float], time: StepTime, machine: Machine
) -> list[str]:
    found = []
    need, gpu_bytes = sum(memory.values()), machine.gpu_bytes
    if need > gpu_bytes:
        found.append(
            f"{NO_FIT}: {need / GIB:.0f} GiB of {gpu_bytes / GIB:.0f}; lower device_train_microbatch_size, raise "
            "mesh.shard or mesh.expert, or set fsdp_config.activation_checkpointing: true"
        )
    elif need > 0.92 * gpu_bytes:
        found.append(f"tight: {need / GIB:.0f} GiB of {gpu_bytes / GIB:.0f}; uneven loads may need more")
    if mesh.expert_nodes > 1:
        found.append(
            f"mesh.expert ({mesh.expert}) spans {mesh.expert_nodes} nodes: tokens cross the network twice in every MoE "
            f"layer; {mesh.ranks_per_node} or fewer stay on NVLink"
        )
    waiting = time.parts.get("all-to-all", 0.0) + time.parts.get("other messages", 0.0)
    if waiting > max(SLOW_SHARE * time.step_s, SAID_S):
        busy = time.step_s - waiting
        where = (
            f"{time.network_s:.2f} s of messages between nodes"
            if time.network_s > 0.5 * waiting
            else "messages within nodes"
        )
        found.append(
            f"slow: {where}, of which {waiting:.2f} s cannot be hidden by {busy:.2f} s of arithmetic in a step; more "
            "sequences a step, or a smaller mesh.shard with more mesh.replicate, help"
        )
    rows = step.tokens * shape.top_k * mesh.expert / shape.num_experts
    if rows < 256:
        found.append(f"slow: {rows:.0f} tokens an expert in a microbatch; its matrix products want 256 or more")
    return found
