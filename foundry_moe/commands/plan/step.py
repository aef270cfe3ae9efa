"""One GPU's part of a training step: its messages, its memory at the worst moment, and its time.

The numbers in this module belong to this package's code, those in `Constants` to a machine. They were fitted once to
nine steps of two models on one to four H200s (benchmarks/RESULTS.md, "Planner").
Letters: D, F, E, K, V, S as in shape.py; T tokens of a GPU's microbatch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from foundry_moe.commands.plan.constants import Constants, rate_at
from foundry_moe.commands.plan.shape import ModelShape
from foundry_moe.parallel.mesh import HIERARCHICAL, MeshPlan

GATHER, REDUCE, ALL_REDUCE, TOKENS = "all-gather", "reduce-scatter", "all-reduce", "all-to-all"
GIB = 2**30
CONTEXT_BYTES = 1 * GIB  # an allowance for memory that CUDA and NCCL take outside torch's allocator
# reads and writes of a block's residual, queries and keys between matrix products, forward and backward
PASSES = 78
LOGIT_BYTES = 30  # for each logit, forward and backward: cast to fp32, log-softmax, loss, and their gradients
CLIP_BYTES, STEP_BYTES = 12, 20  # for each parameter: norm and scaling of its gradient; AdamW, beside its state
CAST_BYTES, COPY_BYTES = 6, 4  # fp32 part to bf16; a gathered parameter to where it is used
GRADIENT_BYTES, REDUCED_BYTES = 6, 8  # bf16 gradient to fp32, laid out by rank; the reduced part to its place
# A later microbatch's gradient, in fp32 or bf16, to the sum of the earlier ones. On an H200 each of 15 microbatches
# took 10.7 ms more than the first (RESULTS.md, Muon: OLMoE with AdamW); 12 bytes take 9.1.
ADDED_BYTES, ADDED_BF16_BYTES = 12, 10
# Rows of the fullest rank over the mean, less 1, if many ranks share experts with a balance loss: in a profile of mesh
# (1, 1, 4) the all-to-all takes 84 ms, of which its bytes and launches take 57 and the wait for the fullest rank 27.
UNEVEN = 0.2
LAUNCHES = 260  # kernels that the host launches for a block, forward and backward
LAUNCHES_WAITED = 25  # launches that the device waits for after the host has waited for counts
FORWARD = 1 / 3  # share of a block's work; activation checkpointing repeats it


@dataclass(frozen=True, kw_only=True)
class Step:
    """The settings of a step that memory, messages and time depend on.

    tokens: of a microbatch on one GPU. microbatches: in a step.
    width: bytes of a number in matrix products. stored: of a parameter but an adapter's. state_bytes: of the
        optimizer, for each fp32 parameter; it has the parameter's dtype. muon: hidden matrices have one moment.
    checkpointed: activations are recomputed. resharded: weights are freed after each pass, and gradients reduced in
        each microbatch; else once per batch.
    """

    tokens: int
    microbatches: int
    width: int
    state_bytes: int
    checkpointed: bool
    resharded: bool
    stored: int = 4
    muon: bool = False

    @property
    def gathers(self) -> int:
        """Gathers of each weight: for both passes of each microbatch, or one that is kept to the end of the batch."""
        return 2 * self.microbatches if self.resharded else 1

    @property
    def reductions(self) -> int:
        """Reductions of each gradient over `shard`."""
        return self.microbatches if self.resharded else 1


def held_parameters(shape: ModelShape, mesh: MeshPlan) -> float:
    """Parameters that one GPU stores."""
    experts = shape.moe_layers * (shape.experts_per_layer + shape.adapters_per_layer)
    return shape.dense / mesh.dense_shard + experts / (mesh.shard * mesh.expert)


def trained_parameters(shape: ModelShape, mesh: MeshPlan) -> float:
    """Of these, the ones with gradients and optimizer state."""
    dense, experts = _gradients(shape, mesh)
    return dense / mesh.dense_shard + experts / mesh.shard


def _gradients(shape: ModelShape, mesh: MeshPlan) -> tuple[float, float]:
    """Numbers in the gradients that one GPU computes, before they are reduced over `shard`: dense ones and experts'."""
    return shape.dense * shape.trained_share, shape.moe_layers * shape.trained_experts_per_layer / mesh.expert


def _orthogonalised(shape: ModelShape, mesh: MeshPlan, step: Step) -> tuple[float, float]:
    """Of these, the ones that Muon orthogonalises: outside experts, and of experts."""
    if not step.muon:
        return 0.0, 0.0
    dense = (shape.dense - shape.outside_blocks) * shape.trained_share / mesh.dense_shard
    experts = 0.0 if shape.adapter else shape.moe_layers * shape.trained_experts_per_layer
    return dense, experts / (mesh.shard * mesh.expert)


def ranks_per_token(num_experts: int, top_k: int, ranks: int) -> float:
    """Expected number of ranks that a token is sent to, if its `top_k` experts are drawn evenly."""
    local = num_experts // ranks
    missed = math.comb(num_experts - local, top_k) / math.comb(num_experts, top_k)
    return ranks * (1.0 - missed)


@dataclass(frozen=True, kw_only=True)
class Message:
    """One kind of message of a step, as one GPU sends it.

    kind: `GATHER` and so on. count: in a step. ranks, nodes: of its group. bytes: sent by this GPU in one message.
    network_bytes: of these, through this GPU's network card; the GPUs of a node share the traffic of their group.
    """

    name: str
    kind: str
    count: int
    ranks: int
    nodes: int
    bytes: float
    network_bytes: float = 0.0


def messages_of(shape: ModelShape, mesh: MeshPlan, step: Step) -> tuple[Message, ...]:
    """The messages that one GPU sends in a step, without the sum of the experts' counts (under 0.3% of its time)."""
    # FSDP's units: their number, the parameters of one, those with gradients, the ranks that shard it, and the
    # distance between these ranks
    block = shape.dense / (shape.layers + 1)
    units = {"dense": (shape.layers + 1, block, block * shape.trained_share, mesh.dense_shard, 1)}
    if shape.moe_layers:
        size = (shape.experts_per_layer + shape.adapters_per_layer) / mesh.expert
        trained = shape.trained_experts_per_layer / mesh.expert
        units["experts"] = (shape.moe_layers, size, trained, mesh.shard, mesh.expert)
    found = []
    for what, (units_, size, trained, ranks, stride) in units.items():
        found += [
            _collective(mesh, GATHER, what, units_ * step.gathers, step.width * size, (ranks, stride)),
            # fp32: the constants were fitted before gradients of a single microbatch were sent in bf16
            _collective(mesh, REDUCE, what, units_ * step.reductions, 4 * trained, (ranks, stride)),
            # two messages of 4 bytes per parameter: a reduce-scatter and an all-gather of this rank's part
            _collective(mesh, ALL_REDUCE, what, units_, 8 * trained / ranks, (mesh.replicate, mesh.dense_shard)),
        ]
    if mesh.expert > 1:
        found += _token_messages(shape, mesh, step)
    return tuple(message for message in found if message.ranks > 1)


def _collective(
    mesh: MeshPlan, kind: str, what: str, count: int, whole_bytes: float, group: tuple[int, int]
) -> Message:
    """A gather or reduction of `whole_bytes` over a group: its number of ranks, and their distance."""
    ranks, stride = group
    nodes = 1
    if (ranks - 1) * stride >= mesh.ranks_per_node or mesh.ranks_per_node % stride:
        nodes = -(-ranks // max(1, min(ranks, mesh.ranks_per_node // stride)))
    return Message(
        name=f"{kind} {what}",
        kind=kind,
        count=count,
        ranks=ranks,
        nodes=nodes,
        bytes=whole_bytes * (ranks - 1) / ranks,
        # ranks of one node forward to each other what comes from other nodes
        network_bytes=whole_bytes * (nodes - 1) / nodes / (ranks / nodes),
    )


def _token_messages(shape: ModelShape, mesh: MeshPlan, step: Step) -> list[Message]:
    again = 1 if step.checkpointed else 0
    sent_to = ranks_per_token(shape.moe.num_experts, shape.moe.top_k, mesh.expert) * (1 - 1 / mesh.expert)
    # a hierarchical all-to-all has two stages, one between nodes
    stages = 2 if mesh.all_to_all == HIERARCHICAL else 1
    elsewhere = (mesh.expert - mesh.expert_ranks_per_node) / (mesh.expert - 1) if mesh.expert_nodes > 1 else 0.0
    return [
        Message(
            name=name,
            kind=TOKENS,
            count=shape.moe_layers * step.microbatches * count * stages,
            ranks=mesh.expert,
            nodes=mesh.expert_nodes,
            bytes=step.tokens * sent_to * token_bytes,
            network_bytes=step.tokens * sent_to * token_bytes * elsewhere / stages,
        )
        for name, count, token_bytes in (
            (f"all-to-all tokens ({mesh.all_to_all})", 4 + again, shape.d_model * step.width),
            ("all-to-all weights and counts", 3 + 2 * again, 2 * shape.moe.top_k * 4),
        )
    ]


def memory_of(shape: ModelShape, mesh: MeshPlan, step: Step) -> dict[str, float]:
    """Bytes on one GPU at the worst moment of a step, by what they are for.

    Within 4% of runs of three models on one to four H200s (benchmarks/RESULTS.md).
    """
    tokens, width = step.tokens, step.width
    held, trained = held_parameters(shape, mesh), trained_parameters(shape, mesh)
    adapters = shape.moe_layers * shape.adapters_per_layer / (mesh.shard * mesh.expert)  # fp32
    trained_adapters = min(adapters, shape.moe_layers * shape.trained_experts_per_layer / (mesh.shard * mesh.expert))
    trained_bytes = step.stored * trained + (4 - step.stored) * trained_adapters
    layer = _saved_by_moe_block(shape, mesh, step)
    if step.checkpointed:
        saved = shape.layers * tokens * shape.d_model * width + layer
    else:
        dense = _attention_numbers(shape) + 2 * shape.d_model + 2 * (shape.ffn_matrices - 1) * shape.ffn_hidden
        saved = shape.moe_layers * layer + (shape.layers - shape.moe_layers) * tokens * width * dense
    # Two moments compete: the loss, with all activations; and the end of the backward pass, with all gradients and one
    # layer's activations. Gradients of earlier microbatches are held at both.
    if shape.fused_loss:
        # logits of some tokens (4 times the hidden states' bytes, as models/loss_head.py has it), the hidden states'
        # gradient, and the head's gradient in fp32 and as it is returned
        hidden, head = tokens * shape.d_model, shape.vocab_size * shape.d_model
        logits = width * (4 + 1) * hidden + (4 + width) * head
    else:
        logits = tokens * shape.vocab_size * (width + 4 + 4 + width)
    # FSDP2 keeps gradients that it has not reduced in fp32
    added = trained_bytes if step.resharded or mesh.world_size == 1 else 4 * sum(_gradients(shape, mesh))
    at_loss = saved + logits + (added if step.microbatches > 1 else 0.0)
    around = shape.around_ffn + shape.beside_experts
    unit = shape.experts_per_layer / mesh.expert + around
    trained_unit = shape.trained_experts_per_layer / mesh.expert + around * shape.trained_share
    if mesh.world_size == 1:  # autocast's copies of weights are freed layer by layer in the backward pass
        gathered: float = width * shape.num_params if step.stored == 4 else 0.0
        at_end = trained_bytes + layer + width * (unit + trained_unit) - gathered
    else:
        gathered = width * shape.outside_blocks
        # a unit and the next one gathered, and the gradients of one, as computed and in fp32 for the reduction
        gradients = (width + 4) * trained_unit
        at_end = trained_bytes + layer + 2 * width * unit + gradients
        if not step.resharded:  # all blocks stay gathered until their last backward pass, few until the batch's end
            whole = width * (shape.dense + shape.moe_layers * shape.experts_per_layer / mesh.expert)
            at_loss, at_end = max(at_loss, at_loss - logits + gradients), at_end - whole + gathered
            gathered = whole
    return {
        "weights": step.stored * held + (4 - step.stored) * adapters,
        "optimizer": step.state_bytes / 4 * trained_bytes - step.stored * sum(_orthogonalised(shape, mesh, step)),
        "gathered weights": gathered,
        "activations and logits" if at_loss > at_end else "gradients and a layer": max(at_loss, at_end),
        "CUDA and NCCL": CONTEXT_BYTES,
    }


def _attention_numbers(shape: ModelShape) -> float:
    """For each token: input, norm, queries, keys and values before and after positions, and the output."""
    return 2 * shape.d_model + 2 * shape.query_width + 4 * shape.key_width


def _saved_by_moe_block(shape: ModelShape, mesh: MeshPlan, step: Step) -> float:
    """Bytes that the backward pass of a block with experts needs."""
    d, k, width = shape.d_model, shape.moe.top_k, step.width
    f = max(shape.expert_widths)  # block-sparse: of different widths, all rows have room for the widest
    hidden = shape.expert_matrices - 1
    # rows for each token: one copy, however many of its experts are there
    received = ranks_per_token(shape.moe.num_experts, k, mesh.expert) if mesh.expert > 1 else 0.0
    if shape.adapter and shape.moe.memory == "recompute":
        rows = k * 2 * d
    elif shape.adapter or shape.moe.backend in ("grouped", "reference"):
        rows = k * (2 * d + 2 * hidden * f)  # rows in and out, and each step of the activation
    else:
        rows = 0 if shape.moe.memory == "recompute" else k * hidden * f  # block-sparse: pre-activations alone
    numbers = _attention_numbers(shape) + 2 * d + received * d + rows + 2 * hidden * shape.moe.shared_expert_hidden_size
    gate = 4 * d + 4 * 3 * shape.moe.num_experts  # fp32 copy of the input; logits, probabilities, sorted probabilities
    return step.tokens * (width * numbers + gate)


def message_s(message: Message, constants: Constants) -> float:
    """Seconds of all messages of this kind in a step, alone on the links."""
    links = {REDUCE: constants.reduce_scatter, TOKENS: constants.all_to_all}
    link = links.get(message.kind, constants.all_gather)
    within = between = 0.0
    if not (message.network_bytes and message.nodes == message.ranks):  # else all ranks are on different nodes
        within = link.seconds(message.count * message.bytes, message.count)
    if message.network_bytes:
        hops = 1 if message.kind == TOKENS else message.nodes - 1  # a ring visits one node after the other
        between = constants.network.seconds(message.count * message.network_bytes, message.count * hops)
    return max(within, between)


def step_time(
    shape: ModelShape, mesh: MeshPlan, step: Step, messages: tuple[Message, ...], constants: Constants
) -> dict[str, float]:
    """Seconds of one step on one GPU by what they are spent on; their sum is the step.

    products          FLOPs over the rate of matrix products of that width
    experts           the same from routing to combine, and the bytes of the weights
    attention         6 S D FLOPs per token and layer over the rate of attention
    norms and others  bytes of the operations between the products, over the memory's bandwidth
    optimizer         bytes of AdamW and of clipping; FLOPs of Muon
    FSDP's copies     bytes of casts, gathered weights and gradients
    all-to-all        of tokens; exposed, because experts start after it
    other messages    the first and the last gather and reduction, the excess of the others over the arithmetic of
                      their pass, and the slowdown of arithmetic beside messages
    """
    parts = _work(shape, mesh, step, constants)
    waits = shape.moe_layers * step.microbatches * (1 + step.checkpointed) if mesh.expert > 1 else 0
    tokens_s = sum(message_s(m, constants) for m in messages if m.kind == TOKENS)
    all_to_all = tokens_s + waits * LAUNCHES_WAITED * constants.launch_s
    exposed = _exposed_s(step, messages, sum(parts.values()) + all_to_all, constants)
    once = trained_parameters(shape, mesh) * (CLIP_BYTES + STEP_BYTES + step.state_bytes)
    dense, experts = _orthogonalised(shape, mesh, step)
    rows, columns = sorted((shape.d_model, shape.expert_hidden))
    # five iterations of three products: R R C, R R R and R R C
    products = 30 * shape.d_model * dense / rate_at(constants.dense_flops_per_s, shape.d_model)
    products += 5 * (4 * rows + 2 * rows**2 / columns) * experts / rate_at(constants.dense_flops_per_s, rows)
    parts |= {
        "optimizer": once / constants.memory_bytes_per_s + products,
        "all-to-all": all_to_all,
        "other messages": exposed,
    }
    launches = shape.layers * step.microbatches * LAUNCHES * (1 + FORWARD if step.checkpointed else 1)
    parts["waiting for the host"] = max(launches * constants.launch_s - sum(parts.values()), 0.0)
    return {name: seconds for name, seconds in parts.items() if seconds > 0}


def _work(shape: ModelShape, mesh: MeshPlan, step: Step, constants: Constants) -> dict[str, float]:
    """Seconds of all microbatches, forward and backward."""
    t, m = step.tokens, step.microbatches
    again = 1 + FORWARD if step.checkpointed else 1.0
    slower = step.width / 2  # fp32 products use tf32
    memory = constants.memory_bytes_per_s
    head = shape.vocab_size * shape.d_model
    inside = shape.dense - shape.looked_up - head
    # two products backward for a trained matrix, one for a frozen one
    products = (
        (4 + 2 * shape.trained_share)
        * t
        * (inside * again + head)
        * slower
        / rate_at(constants.dense_flops_per_s, shape.d_model)
    )
    experts = 0.0
    if shape.moe_layers:
        rows = t * shape.moe.top_k * (1 + UNEVEN * (1 - 1 / mesh.expert))
        work = 4 * shape.expert + 6 * shape.adapter if shape.adapter else 6 * shape.expert
        arithmetic = rows * work * again * slower / rate_at(constants.expert_flops_per_s, shape.expert_hidden)
        # weights are read forward and backward, and the gradient of trained ones is written
        weights = ((1 if shape.adapter else 3) + again) * step.width * shape.experts_per_layer / mesh.expert / memory
        # the transition between two roofs is smooth: 0.92 ms for roofs of 0.77 and 0.51 (RESULTS)
        experts = shape.moe_layers * math.hypot(arithmetic, weights) * (1.2 if shape.moe.memory == "recompute" else 1.0)
    attention = 6 * shape.sequence * shape.query_width * t * shape.layers * again / constants.attention_flops_per_s
    residual = (2 * shape.d_model + shape.query_width + shape.key_width) * t * shape.layers * step.width
    between = PASSES * residual * again + LOGIT_BYTES * t * shape.vocab_size
    return {
        "products": m * products,
        "experts": m * experts,
        "attention": m * attention * slower,
        "norms and others": m * between / memory,
        "FSDP's copies": _copied_bytes(shape, mesh, step) / memory,
    }


def _copied_bytes(shape: ModelShape, mesh: MeshPlan, step: Step) -> float:
    held, trained = held_parameters(shape, mesh), trained_parameters(shape, mesh)
    cast = held if step.stored == 4 else trained
    if mesh.world_size == 1:  # autocast casts weights, and their gradients back
        casts = step.microbatches * CAST_BYTES * (cast + trained) if step.width == 2 else 0.0
        return casts + (step.microbatches - 1) * ADDED_BYTES * trained
    whole = shape.dense + shape.moe_layers * (shape.experts_per_layer + shape.adapters_per_layer) / mesh.expert
    gathered = step.gathers * (CAST_BYTES * cast + COPY_BYTES * whole)
    return gathered + sum(
        weights * _gradient_bytes(step, ranks, mesh.replicate)
        for weights, ranks in zip(_gradients(shape, mesh), (mesh.dense_shard, mesh.shard), strict=True)
    )


def _gradient_bytes(step: Step, ranks: int, replicate: int) -> float:
    """Of one weight's gradient, beside the messages of its reduction over a shard group of `ranks`, and replicas."""
    later = step.microbatches - 1
    if later and (not step.resharded or ranks == 1):
        # added as they come; their sum is laid out and reduced, if other ranks have the weight
        laid_out = REDUCED_BYTES * (1 + 1 / ranks) if ranks * replicate > 1 else 0.0
        return GRADIENT_BYTES + later * ADDED_BF16_BYTES + laid_out
    return step.microbatches * (GRADIENT_BYTES + REDUCED_BYTES / ranks) + later * ADDED_BYTES / ranks


def _exposed_s(step: Step, messages: tuple[Message, ...], busy_s: float, constants: Constants) -> float:
    """Seconds that gathers and reductions add to a step whose arithmetic takes `busy_s`."""
    forward = step.microbatches if step.resharded else 1  # forward passes that gather
    seconds = {GATHER: 0.0, REDUCE: 0.0, ALL_REDUCE: 0.0}
    exposed = 0.0
    for message in messages:
        if message.kind in seconds:
            took = message_s(message, constants)
            seconds[message.kind] += took
            # the first gather of each of these passes, and the last reduction of the step
            exposed += took / message.count * (forward if message.kind == GATHER else 1)
    forward_s = busy_s * (1 / 4 if step.checkpointed else FORWARD)
    gathered_s = seconds[GATHER] * forward / step.gathers
    for work_s, sent_s in (
        (forward_s * forward / step.microbatches, gathered_s),
        (
            (busy_s - forward_s) * step.reductions / step.microbatches,
            seconds[GATHER] - gathered_s + seconds[REDUCE] + seconds[ALL_REDUCE],
        ),
    ):
        exposed += max(sent_s - work_s, 0.0) + constants.contention * min(sent_s, work_s)
    return exposed
