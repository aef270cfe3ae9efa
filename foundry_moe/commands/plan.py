"""What a run needs on a cluster, from its YAML: mesh, bytes on each GPU, messages in a step, and warnings.

Arithmetic alone: nothing is started, and only a Hugging Face model is built, without weights. Loads are taken as even,
as a balance loss makes them.

Letters: D, F, E, K, S, V as in shape.py; T tokens of a GPU's microbatch; P ranks that divide the experts.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from foundry_moe.commands.model_shape import HUGGING_FACE, ModelShape, planned_moe, read_shape
from foundry_moe.commands.planned_backend import planned_backend
from foundry_moe.config import MeshConfig, MoEConfig, can_cut_rows, check_batch_size
from foundry_moe.launch.run_config import check_run, load_run, plain
from foundry_moe.launch.spares import ranks_in_use
from foundry_moe.parallel.mesh import HIERARCHICAL, MeshPlan, check_expert_widths, plan_mesh
from foundry_moe.schema import from_mapping, section

GIB = 2**30
# Bytes a parameter of optimizer state: two fp32 moments, or one.
OPTIMIZER_BYTES = {"adam": 8, "lion": 4}
CONTEXT_BYTES = int(1.0 * GIB)  # an allowance for what CUDA and NCCL take beside the allocator
NODE_BYTES_PER_S, NETWORK_BYTES_PER_S = 300e9, 50e9  # NVLink all-to-all of 256 MB on H200s; a 400 Gb/s NIC a GPU
SAID_S = 0.01  # of messages in a step; with less, the step is too small for these rates to mean anything
FLOPS_PER_S = 0.4 * 989e12  # 40% of an H100's or H200's dense bf16


@dataclass(frozen=True, kw_only=True)
class Message:
    """One kind of message of a step, as one GPU sends it.

    count: in a step. ranks: of its group. bytes: sent by this GPU in one. across: it leaves the node.
    """

    name: str
    count: int
    ranks: int
    bytes: float
    across: bool


@dataclass(frozen=True, kw_only=True)
class Step:
    """What a GPU does in a step, as far as memory and messages depend on it.

    tokens: T. microbatches: in a step.
    reductions: how often in a step gradients are summed over `shard`; once for all microbatches, they are held
        unsharded until then.
    chunks: of `MeshConfig`; backend, memory: of `MoEConfig`.
    width: bytes of a number in matrix products. state: bytes of optimizer state for a parameter.
    checkpointed: activations are computed again. resharded: weights are gathered again for the backward pass.
    """

    tokens: int
    microbatches: int
    reductions: int
    chunks: int
    backend: str
    memory: str
    width: int
    state: int
    checkpointed: bool
    resharded: bool


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """Everything that `foundry-moe plan` prints.

    memory: bytes on each GPU by what they are for.
    microbatch: sequences at most; microbatches: in a step; sequences: of a GPU in a step.
    spares: GPUs that wait (`mesh.spares`).
    """

    mesh: MeshPlan
    spares: int
    shape: ModelShape
    microbatch: int
    microbatches: int
    sequences: int
    memory: dict[str, float]
    messages: tuple[Message, ...]
    warnings: tuple[str, ...]


def ranks_per_token(num_experts: int, top_k: int, ranks: int) -> float:
    """Expected ranks that a token goes to, with `top_k` different experts chosen evenly of `num_experts`."""
    local = num_experts // ranks
    missed = math.comb(num_experts - local, top_k) / math.comb(num_experts, top_k)
    return ranks * (1.0 - missed)


def read_step(run: Mapping[str, Any], moe: MoEConfig, mesh: MeshConfig, *, tokens: int, microbatches: int) -> Step:
    """The step of a run whose GPUs have so many microbatches of so many tokens."""
    fsdp = run.get("fsdp_config") or {}
    optimizer = str((run.get("optimizer") or {}).get("name", "decoupled_adamw"))
    return Step(
        tokens=tokens,
        microbatches=microbatches,
        reductions=1 if mesh.reduce == "batch" else microbatches,
        chunks=mesh.chunks,
        backend=moe.backend,
        memory=moe.memory,
        width=2 if "16" in str(run.get("precision", "amp_bf16")) else 4,
        state=next((size for name, size in OPTIMIZER_BYTES.items() if name in optimizer), 0),
        checkpointed=bool(fsdp.get("activation_checkpointing")),
        resharded=bool(fsdp.get("reshard_after_forward", True)),
    )


def memory_of(shape: ModelShape, mesh: MeshPlan, step: Step) -> dict[str, float]:
    """Bytes on one GPU at the worst moment of a step: what torch has allocated, and CUDA's and NCCL's own.

    Against five runs of OLMoE's shape on H200s: within 2% (benchmarks/RESULTS.md).
    """
    tokens, width = step.tokens, step.width
    held = shape.dense / mesh.dense_shard + shape.experts / (mesh.shard * mesh.expert)
    layer = _saved_by_layer(shape, mesh, step)
    if step.checkpointed:
        saved = shape.layers * tokens * shape.d_model * width + layer
    else:
        saved = shape.moe_layers * layer + (shape.layers - shape.moe_layers) * _saved_by_dense(shape, tokens, width)
    # two moments compete: the loss, with all activations; and the end of the backward pass, with all gradients and
    # one layer's activations. Gradients of earlier microbatches are there at both.
    logits = tokens * shape.vocab_size * (width + 4 + 4 + width)
    kept = shape.dense + shape.experts / mesh.expert if step.reductions < step.microbatches else held
    at_loss = saved + logits + (4 * kept if step.microbatches > 1 else 0.0)
    unit = shape.experts_a_layer / mesh.expert + shape.moe_block
    # a unit and the next one gathered, and the gradients of one, as computed and in fp32 for the reduction
    at_end = 4 * held + layer + (2 * width + width + 4) * unit
    if step.chunks > 1:  # each chunk's gradient of experts is added to the others'
        at_end += width * shape.experts_a_layer / mesh.expert
    gathered = width * (shape.total if mesh.world_size == 1 else shape.outside_blocks)
    return {
        "weights": 4 * held,
        "optimizer": step.state * held,
        "gathered weights": gathered,
        "activations and logits" if at_loss > at_end else "gradients and a layer": max(at_loss, at_end),
        "CUDA and NCCL": CONTEXT_BYTES,
    }


def _saved_by_attention(shape: ModelShape, tokens: int, width: int) -> float:
    """Input, norm, queries, keys and values before and after positions, and the output."""
    return tokens * width * (4 * shape.d_model + 4 * shape.key_width)


def _saved_by_dense(shape: ModelShape, tokens: int, width: int) -> float:
    ffn = 2 * shape.d_model + 2 * (shape.ffn_matrices - 1) * shape.ffn_hidden
    return _saved_by_attention(shape, tokens, width) + tokens * width * ffn


def _saved_by_layer(shape: ModelShape, mesh: MeshPlan, step: Step) -> float:
    """What the backward pass of a block with experts needs of T tokens."""
    tokens, width = step.tokens, step.width
    d, k = shape.d_model, shape.top_k
    f = shape.widest_expert  # block-sparse: of different widths, all rows have room for the widest
    received = ranks_per_token(shape.num_experts, k, mesh.expert) if mesh.expert > 1 else 0.0
    hidden = shape.expert_matrices - 1
    if step.backend in ("grouped", "reference"):
        rows = k * (2 * d + 2 * hidden * f)  # rows in and out, and each step of the activation
    else:
        rows = 0 if step.memory == "recompute" else k * hidden * f  # block-sparse: pre-activations alone
    numbers = 2 * d + received * d + rows + 2 * hidden * shape.shared_hidden
    router = 4 * d + 4 * 3 * shape.num_experts  # fp32 copy of the input; logits, probabilities, sorted ones
    return _saved_by_attention(shape, tokens, width) + tokens * (width * numbers + router)


def messages_of(shape: ModelShape, mesh: MeshPlan, step: Step) -> tuple[Message, ...]:
    """What one GPU sends in a step."""
    tokens, width, microbatches, chunks = step.tokens, step.width, step.microbatches, step.chunks
    gathers = 2 if step.resharded else 1
    again = 1 if step.checkpointed else 0
    units = {"dense": (shape.layers + 1, shape.dense / (shape.layers + 1), mesh.dense_shard, mesh.dense_shard)}
    if shape.moe_layers:
        units["experts"] = (shape.moe_layers, shape.experts_a_layer / mesh.expert, mesh.shard, mesh.dense_shard)
    found = []
    for kind, (count, parameters, ranks, span) in units.items():
        across = span > mesh.ranks_per_node and ranks > 1
        part = parameters * (ranks - 1) / ranks
        found += [
            Message(
                name=f"all-gather {kind}",
                count=count * gathers * microbatches,
                ranks=ranks,
                bytes=part * width,
                across=across,
            ),
            Message(
                name=f"reduce-scatter {kind}", count=count * step.reductions, ranks=ranks, bytes=part * 4, across=across
            ),
            Message(
                name=f"all-reduce {kind}",
                count=count,
                ranks=mesh.replicate,
                bytes=2 * parameters / ranks * 4 * (mesh.replicate - 1) / mesh.replicate,
                across=mesh.nodes > 1,
            ),
        ]
    if mesh.expert > 1:
        leave = ranks_per_token(shape.num_experts, shape.top_k, mesh.expert) * (1 - 1 / mesh.expert)
        stages = 2 if mesh.all_to_all == HIERARCHICAL else 1
        passes = (2 + again, 2)
        found.append(
            Message(
                name=f"all-to-all tokens ({mesh.all_to_all})",
                count=shape.moe_layers * microbatches * sum(passes) * stages * chunks,
                ranks=mesh.expert,
                bytes=tokens * leave * shape.d_model * width / chunks,
                across=mesh.expert_nodes > 1,
            )
        )
        found.append(
            Message(
                name="all-to-all weights and counts",
                count=shape.moe_layers * microbatches * ((2 + again) * chunks + 1 + again) * stages,
                ranks=mesh.expert,
                bytes=tokens * leave * 2 * shape.top_k * 4 / chunks,
                across=mesh.expert_nodes > 1,
            )
        )
    found.append(
        Message(
            name="all-reduce expert counts",
            count=shape.moe_layers * microbatches,
            ranks=mesh.world_size,
            bytes=8 * shape.num_experts,
            across=mesh.nodes > 1,
        )
    )
    return tuple(message for message in found if message.ranks > 1)


def plan_run(run: Mapping[str, Any], *, gpus: int, gpus_per_node: int, gpu_bytes: float) -> RunPlan:
    """Plans a run.

    Raises:
        ValueError: no experts, a model that is not read, or a mesh or batch that cannot be.
    """
    moe, mesh_keys = planned_moe(run)
    if section(run, "model").get("name") == HUGGING_FACE:
        from foundry_moe.commands.hugging_face_shape import count_shape  # imports transformers

        shape = count_shape(run, moe)
    else:
        shape = read_shape(run)
    mesh_config = from_mapping(MeshConfig, mesh_keys, "mesh")
    machine: dict[str, int] = {"ranks_per_node": gpus_per_node, "num_experts": moe.num_experts}
    batch = run.get("global_train_batch_size")
    used = ranks_in_use(mesh_config, world_size=gpus, batch_size=batch, **machine)
    spares, gpus = gpus - used, used
    mesh = plan_mesh(mesh_config, world_size=gpus, **machine)
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
    microbatch = min(microbatch, batch // gpus)
    microbatches = math.ceil(batch // gpus / microbatch)
    step = read_step(run, moe, mesh_config, tokens=microbatch * shape.sequence, microbatches=microbatches)
    memory, messages = memory_of(shape, mesh, step), messages_of(shape, mesh, step)
    return RunPlan(
        mesh=mesh,
        spares=spares,
        shape=shape,
        microbatch=microbatch,
        microbatches=microbatches,
        sequences=batch // gpus,
        memory=memory,
        messages=messages,
        warnings=tuple(_warnings(shape, mesh, step, memory, messages, gpu_bytes)),
    )


def message_seconds(messages: tuple[Message, ...]) -> tuple[float, float]:
    """Of a step's messages: those between nodes, and those within them."""
    network, node = (sum(m.count * m.bytes for m in messages if m.across is across) for across in (True, False))
    return network / NETWORK_BYTES_PER_S, node / NODE_BYTES_PER_S


def _warnings(
    shape: ModelShape,
    mesh: MeshPlan,
    step: Step,
    memory: dict[str, float],
    messages: tuple[Message, ...],
    gpu_bytes: float,
) -> list[str]:
    found = []
    need = sum(memory.values())
    if need > gpu_bytes:
        found.append(
            f"will not fit: {need / GIB:.0f} GiB of {gpu_bytes / GIB:.0f}; lower device_train_microbatch_size, raise "
            "mesh.shard or mesh.expert, or set fsdp_config.activation_checkpointing: true"
        )
    elif need > 0.92 * gpu_bytes:
        found.append(f"tight: {need / GIB:.0f} GiB of {gpu_bytes / GIB:.0f}; uneven loads may need more")
    if mesh.expert_nodes > 1:
        found.append(
            f"mesh.expert ({mesh.expert}) spans {mesh.expert_nodes} nodes: tokens cross the network twice in every MoE "
            f"layer; {mesh.ranks_per_node} or fewer stay on NVLink"
        )
    compute_s = step.tokens * step.microbatches * shape.flops_per_token / FLOPS_PER_S
    network_s, node_s = message_seconds(messages)
    if network_s > max(0.5 * compute_s, SAID_S):
        found.append(
            f"slow: {network_s:.2f} s of messages between nodes at 50 GB/s a GPU beside {compute_s:.2f} s of "
            "arithmetic in a step; more sequences a step, or a smaller mesh.shard with more mesh.replicate, help"
        )
    if node_s > max(0.5 * compute_s, SAID_S):
        found.append(f"slow: {node_s:.2f} s of messages within nodes beside {compute_s:.2f} s of arithmetic in a step")
    rows = step.tokens * shape.top_k * mesh.expert / shape.num_experts
    if rows < 256:
        found.append(f"slow: {rows:.0f} tokens an expert in a microbatch; its matrix products want 256 or more")
    return found


def format_plan(plan: RunPlan) -> str:
    """The plan as text."""
    mesh, shape = plan.mesh, plan.shape
    tokens = plan.sequences * shape.sequence * mesh.world_size
    lines = [
        f"mesh: replicate {mesh.replicate} x shard {mesh.shard} x expert {mesh.expert} = {mesh.world_size} GPUs on "
        f"{mesh.nodes} node{'s' if mesh.nodes > 1 else ''}; all_to_all {mesh.all_to_all}"
        + (f"; {plan.spares} GPUs wait as spares" if plan.spares else ""),
        f"  experts: {shape.num_experts // mesh.expert} of {shape.num_experts} a GPU and layer, each cut in "
        f"{mesh.shard}; everything else cut in {mesh.dense_shard}",
        f"parameters: {shape.total / 1e9:.3f} B, {shape.active / 1e9:.3f} B active; {shape.experts / 1e9:.3f} B in "
        f"experts ({shape.moe_layers} of {shape.layers} layers)",
        f"step: {plan.microbatches} microbatch{'es' if plan.microbatches > 1 else ''} of "
        f"{'at most ' if plan.sequences % plan.microbatch else ''}{plan.microbatch} x {shape.sequence} tokens a GPU, "
        f"{tokens / 1e6:.2f} M tokens in all",
        "memory of a GPU:",
        *(f"  {name:28}{size / GIB:8.2f} GiB" for name, size in plan.memory.items()),
        f"  {'in all':28}{sum(plan.memory.values()) / GIB:8.2f} GiB",
        "messages of a GPU in a step:",
    ]
    for message in plan.messages:
        where = f"to {message.ranks} ranks, {'between nodes' if message.across else 'within a node'}"
        lines.append(f"  {message.count:6} x {message.name:34} {message.bytes / 1e6:10.3f} MB {where}")
    if not plan.messages:
        lines.append("  none")
    return "\n".join([*lines, *(f"warning: {warning}" for warning in plan.warnings)])


def plan_command(arguments: argparse.Namespace) -> int:
    """`foundry-moe plan`: 0 if the run fits, 1 if not."""
    run = plain(load_run(arguments.yaml, arguments.overrides))
    check_run(run)
    plan = plan_run(
        run,
        gpus=arguments.gpus,
        gpus_per_node=arguments.gpus_per_node,
        gpu_bytes=arguments.gpu_memory_gib * GIB,
    )
    print(format_plan(plan))
    print(planned_backend(run, plan.shape, arguments.chip))
    return 1 if any(warning.startswith("will not fit") for warning in plan.warnings) else 0
