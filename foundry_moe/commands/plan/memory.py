"""Bytes on one GPU at the worst moment of a step, by what they are for.

Letters: D, F, E, K, V as in shape.py; T tokens of a GPU's microbatch.
"""

from __future__ import annotations

from foundry_moe.commands.plan.shape import ModelShape
from foundry_moe.commands.plan.step import Step, ranks_per_token
from foundry_moe.parallel.mesh import MeshPlan

GIB = 2**30
CONTEXT_BYTES = int(1.0 * GIB)  # an allowance for what CUDA and NCCL take beside the allocator


def memory_of(shape: ModelShape, mesh: MeshPlan, step: Step) -> dict[str, float]:
    """Bytes on one GPU at the worst moment of a step: what torch has allocated, and CUDA's and NCCL's own.

    Against runs of three models on one to four H200s: within 4% (benchmarks/RESULTS.md).
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
    gathered: float = width * (shape.total if mesh.world_size == 1 else shape.outside_blocks)
    if mesh.world_size == 1:  # autocast's copies of weights go layer by layer in the backward pass
        at_end = 4 * held + layer + (width + width) * unit - gathered  # of the last layer its gradients and copies
    else:
        # a unit and the next one gathered, and the gradients of one, as computed and in fp32 for the reduction
        at_end = 4 * held + layer + (2 * width + width + 4) * unit
    if step.in_later_rounds:  # each round's gradient of experts is added to that of the others
        at_end += width * shape.experts_a_layer / mesh.expert
    return {
        "weights": 4 * held,
        "optimizer": step.state * held,
        "gathered weights": gathered,
        "activations and logits" if at_loss > at_end else "gradients and a layer": max(at_loss, at_end),
        "CUDA and NCCL": CONTEXT_BYTES,
    }


def _rows_per_token(shape: ModelShape, mesh: MeshPlan, step: Step) -> float:
    """Rows that the fullest rank receives at once, over its tokens: a token comes once, whatever its experts there."""
    return min(min(step.skew, step.buffer) * ranks_per_token(shape.num_experts, shape.top_k, mesh.expert), mesh.expert)


def _saved_by_attention(shape: ModelShape, tokens: int, width: int) -> float:
    """Input, norm, queries, keys and values before and after positions, and the output."""
    return tokens * width * (2 * shape.d_model + 2 * shape.query_width + 4 * shape.key_width)


def _saved_by_dense(shape: ModelShape, tokens: int, width: int) -> float:
    ffn = 2 * shape.d_model + 2 * (shape.ffn_matrices - 1) * shape.ffn_hidden
    return _saved_by_attention(shape, tokens, width) + tokens * width * ffn


def _saved_by_layer(shape: ModelShape, mesh: MeshPlan, step: Step) -> float:
    """What the backward pass of a block with experts needs of T tokens."""
    tokens, width = step.tokens, step.width
    d, k = shape.d_model, shape.top_k
    f = shape.widest_expert  # block-sparse: of different widths, all rows have room for the widest
    received = _rows_per_token(shape, mesh, step) if mesh.expert > 1 else 0.0
    at_once = min(step.skew, step.buffer)  # of an even share; what is beyond it goes in rounds that keep nothing
    hidden = shape.expert_matrices - 1
    if step.backend in ("grouped", "reference"):
        rows = at_once * k * (2 * d + 2 * hidden * f)  # rows in and out, and each step of the activation
    else:
        rows = 0 if step.memory == "recompute" else at_once * k * hidden * f  # block-sparse: pre-activations alone
    numbers = 2 * d + received * d + rows + 2 * hidden * shape.shared_hidden
    router = 4 * d + 4 * 3 * shape.num_experts  # fp32 copy of the input; logits, probabilities, sorted ones
    slots = 0  # with copies of hot experts, kernels read a tensor of own experts and slots for copies
    if mesh.expert > 1 and step.hot_experts:
        slots = shape.num_experts // mesh.expert + step.hot_experts
    weights = width * slots * shape.experts_a_layer / shape.num_experts
    return weights + _saved_by_attention(shape, tokens, width) + tokens * (width * numbers + router)
