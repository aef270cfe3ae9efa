"""The planner's cost model: the time of a step on one GPU, from its arithmetic, bytes and messages.

    products         FLOPs over the rate of products of that width, and the weights' bytes, as two roofs
    experts          the same, routing to combine, times the skew
    attention        6 s d a token and layer over its rate
    norms and others bytes of the operations between the products, over the memory's bandwidth
    optimizer        bytes of AdamW and of clipping
    FSDP's copies    bytes that casts, gathers and gradients are copied through
    all-to-all       tokens: exposed, because experts start after it
    other messages   what of gathers and reductions is longer than the arithmetic of its pass, the first and the last
                     of them, and by how much those beside the arithmetic slow it down

The numbers below describe this code and not a machine. They were fitted once to nine steps of two models on one to
four H200s (benchmarks/RESULTS.md, "Planner"), and the machine's constants are `Constants`.
Letters: D, F, E, K, V as in shape.py; T tokens of a GPU's microbatch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from foundry_moe.commands.plan.constants import Constants
from foundry_moe.commands.plan.shape import ModelShape
from foundry_moe.commands.plan.step import ALL_REDUCE, COUNTS, GATHER, REDUCE, TOKENS, Message, Step
from foundry_moe.parallel.mesh import MeshPlan

# Times that the residual, queries and keys of a block are read or written between products, forward and backward.
PASSES = 78
LOGIT_BYTES = 30  # a logit, forward and backward: cast to fp32, log-softmax, loss, and their gradients
CLIP_BYTES, STEP_BYTES = 12, 20  # a parameter: norm and scaling of its gradient; AdamW's beside its state's 2 x 8 / 2
CAST_BYTES, COPY_BYTES = 6, 4  # fp32 part to bf16; a gathered parameter to where it is used
GRADIENT_BYTES, REDUCED_BYTES = 6, 8  # bf16 gradient to fp32, laid out by rank; the reduced part to its place
# Rows of the fullest rank over the mean, less 1, as many ranks divide the experts of a run that balances its loads: in
# the profile of (1, 1, 4) the all-to-all takes 84 ms, its bytes and launches 57, the rest waits for the fullest.
UNEVEN = 0.2
LAUNCHES = 260  # of the host, for a block's forward and backward pass
LAUNCHES_WAITED = 25  # of which the device waits for these after each wait of the host for counts
FORWARD = 1 / 3  # of a block's work; with activation checkpointing it is done twice


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """parts: seconds of a step by what they go to; they add up to `step_s`.

    network_s: messages between nodes, hidden or not. flops: of this GPU, as MFU counts them.
    host_s: the host's launches; a step is never shorter.
    """

    parts: dict[str, float]
    network_s: float
    host_s: float
    tokens: int
    flops: float

    @property
    def step_s(self) -> float:
        return sum(self.parts.values())

    @property
    def tokens_per_s(self) -> float:
        """Of one GPU."""
        return self.tokens / self.step_s


def _roofs(flops_s: float, bytes_s: float) -> float:
    """Two roofs of one operation: between them the time passes smoothly (0.92 ms of 0.77 and 0.51, RESULTS)."""
    return math.hypot(flops_s, bytes_s)


def message_s(message: Message, constants: Constants) -> float:
    """Of all messages of this kind in a step, beside nothing."""
    links = {GATHER: constants.all_gather, REDUCE: constants.reduce_scatter, TOKENS: constants.all_to_all}
    link = links.get(message.kind, constants.all_gather)
    within = 0.0 if message.alone else link.seconds(message.count * message.bytes, message.count)
    return max(within, network_s(message, constants))


def network_s(message: Message, constants: Constants) -> float:
    """The part between nodes of all messages of this kind in a step; 0 for those within one."""
    if not message.across:
        return 0.0
    hops = 1 if message.kind == TOKENS else message.nodes - 1  # a ring passes through all nodes one after the other
    return constants.network.seconds(message.count * message.network_bytes, message.count * hops)


def step_time(
    shape: ModelShape, mesh: MeshPlan, step: Step, messages: tuple[Message, ...], constants: Constants
) -> StepTime:
    """The time of one step."""
    work = _work(shape, mesh, step, constants)
    once = _optimizer(shape, mesh, step, constants)
    tokens = {m.name: message_s(m, constants) for m in messages if m.kind in (TOKENS, COUNTS)}
    waits = shape.moe_layers * step.microbatches * (1 + step.checkpointed) if mesh.expert > 1 else 0
    ways = 1 + step.in_later_rounds / 2  # later rounds go there and back once more, as forward
    all_to_all = sum(tokens.values()) * step.skew * ways + waits * LAUNCHES_WAITED * constants.launch_s
    busy = sum(work.values()) + all_to_all
    hidden = _others(shape, step, messages, busy, constants)
    parts = {**work, **once, "all-to-all": all_to_all, "other messages": hidden}
    host = shape.layers * step.microbatches * (LAUNCHES * (4 / 3 if step.checkpointed else 1)) * constants.launch_s
    device = sum(parts.values())
    if host > device:
        parts["waiting for the host"] = host - device
    all_tokens = step.tokens * step.microbatches
    return StepTime(
        parts={name: seconds for name, seconds in parts.items() if seconds > 0},
        network_s=sum(network_s(m, constants) for m in messages),
        host_s=host,
        tokens=all_tokens,
        flops=all_tokens * shape.flops_per_token,
    )


def _work(shape: ModelShape, mesh: MeshPlan, step: Step, constants: Constants) -> dict[str, float]:
    """Seconds of all microbatches, forward and backward."""
    t, m, width = step.tokens, step.microbatches, step.width
    again = 1 + FORWARD if step.checkpointed else 1.0
    memory = constants.memory_bytes_per_s
    slower = width / 2  # fp32 by way of tf32
    head = shape.vocab_size * shape.d_model
    inside = shape.dense - shape.looked_up - head
    products = 6 * t * (inside * again + head) * slower / constants.dense_rate(shape.d_model)
    experts = 0.0
    if shape.moe_layers:
        rows = t * shape.top_k * max(step.skew, 1 + UNEVEN * (1 - 1 / mesh.expert))
        f = shape.expert_hidden
        repeated = again + FORWARD * step.in_later_rounds
        arithmetic = 6 * rows * shape.expert * repeated * slower / constants.expert_rate(f)
        # read forward and backward, and the gradient written
        weights = (3 + again) * width * shape.experts_a_layer / mesh.expert / memory
        experts = shape.moe_layers * _roofs(arithmetic, weights) * (1.2 if step.memory == "recompute" else 1.0)
    attention = 6 * shape.sequence * shape.query_width * t * shape.layers * again / constants.attention_flops_per_s
    residual = (2 * shape.d_model + shape.query_width + shape.key_width) * t * shape.layers * width
    between = PASSES * residual * again + LOGIT_BYTES * t * shape.vocab_size
    return {
        "products": m * products,
        "experts": m * experts,
        "attention": m * attention * slower,
        "norms and others": m * between / memory,
        "FSDP's copies": _copies(shape, mesh, step) / memory,
    }


def _copies(shape: ModelShape, mesh: MeshPlan, step: Step) -> float:
    """Bytes of a step."""
    held = shape.dense / mesh.dense_shard + shape.experts / (mesh.shard * mesh.expert)
    if mesh.world_size == 1:  # autocast casts weights, and their gradients back
        return step.microbatches * 2 * CAST_BYTES * held if step.width == 2 else 0.0
    whole = shape.dense + shape.experts / mesh.expert
    gathers = step.microbatches * (2 if step.resharded else 1)
    gathered = gathers * (CAST_BYTES * held + COPY_BYTES * whole)
    return gathered + step.reductions * (GRADIENT_BYTES * whole + REDUCED_BYTES * held)


def _optimizer(shape: ModelShape, mesh: MeshPlan, step: Step, constants: Constants) -> dict[str, float]:
    held = shape.dense / mesh.dense_shard + shape.experts / (mesh.shard * mesh.expert)
    return {"optimizer": held * (CLIP_BYTES + STEP_BYTES + step.state) / constants.memory_bytes_per_s}


def _others(shape: ModelShape, step: Step, messages: tuple[Message, ...], busy_s: float, constants: Constants) -> float:
    """What gathers and reductions add to a step whose arithmetic takes `busy_s`."""
    seconds = {kind: 0.0 for kind in (GATHER, REDUCE, ALL_REDUCE)}
    edges = 0.0
    for message in messages:
        if message.kind not in seconds:
            continue
        took = message_s(message, constants)
        seconds[message.kind] += took
        # the first unit is waited for in every microbatch, and the last one reduced once
        edges += took / message.count * (1 if message.kind != GATHER else step.microbatches)
    gathers = 2 if step.resharded else 1
    forward = busy_s * (FORWARD if not step.checkpointed else 1 / 4)
    added = edges
    for work, sent in (
        (forward, seconds[GATHER] / gathers),
        (busy_s - forward, seconds[GATHER] * (1 - 1 / gathers) + seconds[REDUCE] + seconds[ALL_REDUCE]),
    ):
        added += max(sent - work, 0.0) + constants.contention * min(sent, work)
    return added
