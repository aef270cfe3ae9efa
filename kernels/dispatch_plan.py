"""Plans which ranks tokens are sent to: each rank of a token once, rows ordered by rank, then by token; no sort.

Two launches. The first counts rows, so that ranks exchange counts meanwhile; the second assigns rows and packs combine
weights and expert numbers. Counts are integer sums, so atomics are deterministic.

Shapes: T tokens, K choices, P ranks, C = min(P, K) ranks a token goes to at most, N blocks of tokens, S rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from foundry_moe_kernels.launch import cdiv, launch, next_power_of_2
from torch import Tensor

BLOCK = 64
_BLOCKS_AT_ONCE = 256  # that a program adds up
# A round (see `mesh.buffer`) may have any number of tokens and begin at any token: no round compiles a new kernel.
_of_any_tokens = triton.jit(
    do_not_specialize=["tokens", "blocks"], do_not_specialize_on_alignment=["experts_ptr", "weights_ptr"]
)


@_of_any_tokens
def _count_kernel(
    experts_ptr, counts_ptr, totals_ptr, tokens, blocks, local_experts, ranks, nodes, per_node,
    K: tl.constexpr, KP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    t = block * BLOCK + tl.arange(0, BLOCK)
    k = tl.arange(0, KP)
    real = (t < tokens)[:, None] & (k < K)[None, :]
    expert = tl.load(experts_ptr + t[:, None].to(tl.int64) * K + k[None, :], mask=real, other=-1).to(tl.int32)
    rank = tl.where(expert >= 0, expert // local_experts, -1)
    for p in range(ranks):
        hits = (rank == p).to(tl.int32)
        rows = tl.sum(tl.max(hits, axis=1), axis=0)
        slot = (p % per_node) * nodes + p // per_node
        tl.store(counts_ptr + slot * blocks + block, rows)
        total = totals_ptr + slot * 2
        tl.atomic_add(total, rows.to(tl.int64))
        tl.atomic_add(total + 1, tl.sum(tl.sum(hits, axis=1), axis=0).to(tl.int64))


@_of_any_tokens
def _row_kernel(
    experts_ptr, weights_ptr, counts_ptr, totals_ptr, room_ptr, row_ptr, packed_ptr,
    tokens, blocks, local_experts, ranks, nodes, per_node,
    K: tl.constexpr, KP: tl.constexpr, C: tl.constexpr, BY_RANK: tl.constexpr, BLOCK: tl.constexpr,
    SLOTS: tl.constexpr, STEP: tl.constexpr, LIMITED: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    t = block * BLOCK + tl.arange(0, BLOCK)
    k = tl.arange(0, KP)
    real = (t < tokens)[:, None] & (k < K)[None, :]
    choice = t[:, None].to(tl.int64) * K + k[None, :]
    expert = tl.load(experts_ptr + choice, mask=real, other=-1).to(tl.int32)
    weight = tl.load(weights_ptr + choice, mask=real, other=0.0)
    rank = tl.where(expert >= 0, expert // local_experts, -1)
    s = tl.arange(0, SLOTS)
    room = tl.load(room_ptr + s * 2, mask=s < ranks, other=0).to(tl.int32)
    row_TK = tl.full((BLOCK, KP), -1, tl.int32)
    for p in range(ranks):
        slot = (p % per_node) * nodes + p // per_node
        hits = rank == p
        if LIMITED:
            total, most = totals_ptr + slot * 2, room_ptr + slot * 2
            hits &= (tl.load(total) <= tl.load(most)) & (tl.load(total + 1) <= tl.load(most + 1))
        present = tl.max(hits.to(tl.int32), axis=1)
        first = tl.sum(tl.where(s < slot, room, 0), axis=0)
        for n0 in range(0, block, STEP):
            n = n0 + tl.arange(0, STEP)
            first += tl.sum(tl.load(counts_ptr + slot * blocks + n, mask=n < block, other=0), axis=0)
        row = tl.where(present > 0, first + tl.cumsum(present, axis=0) - present, -1)
        if BY_RANK:
            tl.store(row_ptr + t.to(tl.int64) * C + p, row, mask=t < tokens)
        else:
            first_hit = hits & (tl.cumsum(hits.to(tl.int32), axis=1) == 1)
            row_TK = tl.where(first_hit, row[:, None], row_TK)
        packed = packed_ptr + row[:, None].to(tl.int64) * (2 * K) + k[None, :]
        travels = real & (present > 0)[:, None]
        tl.store(packed, weight, mask=travels)
        local = tl.where(hits, expert - p * local_experts, -1)
        tl.store(packed + K, local.to(packed_ptr.dtype.element_ty), mask=travels)
    if not BY_RANK:
        tl.store(row_ptr + choice, row_TK, mask=real)


def count_rows(experts_TK: Tensor, local_experts: int, ranks: int, nodes: int = 1) -> tuple[Tensor, Tensor]:
    """Counts the rows for each rank.

    Args:
        experts_TK: contiguous integers; -1 = not a choice. Rank e // local_experts has expert e.
        nodes: rows lie by slot: by a rank's index on its node, then by the node.

    Returns:
        counts_P2: int64; by slot, rows for that rank and choices among them.
        counts_PN: rows of each block of tokens, for `assign_rows`.
    """
    tokens, choices = experts_TK.shape
    blocks = cdiv(tokens, BLOCK)
    counts_P2 = torch.zeros(ranks, 2, dtype=torch.int64, device=experts_TK.device)
    counts_PN = torch.empty(ranks, blocks, dtype=torch.int32, device=experts_TK.device)
    if tokens:
        launch(
            _count_kernel, (blocks,),
            experts_TK, counts_PN, counts_P2, tokens, blocks, local_experts, ranks, nodes, ranks // nodes,
            K=choices, KP=next_power_of_2(choices), BLOCK=BLOCK,
        )  # fmt: skip
    return counts_P2, counts_PN


def assign_rows(
    experts_TK: Tensor,
    weights_TK: Tensor,
    local_experts: int,
    counts_P2: Tensor,
    counts_PN: Tensor,
    nodes: int = 1,
    room: tuple[Tensor, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """The row of each token for each of its ranks, and the packed rows that are sent beside tokens.

    Args:
        weights_TK: contiguous.
        counts_P2, counts_PN: of `count_rows` with the same arguments.
        room: room_P2, int64 by slot: rows and choices that each rank has room for; and S, the sum of these rows. A
            rank's rows begin behind the room of the ranks before it, and a rank with more than its room gets none.
            None = as many as there are.

    Returns:
        row_TC: int32, -1 = none. By rank where P <= K, else at the first of the token's choices with that rank.
        packed: [T * C, 2 * K] in `weights_TK`'s dtype: a token's weights, and its experts' local numbers on
            that rank, -1 for experts of other ranks. Rows past the last one in use are undefined. With `room`: [S,
            2 * K], -1 in rows that are not in use.
    """
    tokens, choices = experts_TK.shape
    ranks, blocks = counts_PN.shape
    most = min(ranks, choices)
    row_TC = torch.empty(tokens, most, dtype=torch.int32, device=experts_TK.device)
    if room is None:
        room_P2, packed = counts_P2, weights_TK.new_empty(tokens * most, 2 * choices)
    else:
        room_P2, packed = room[0], weights_TK.new_full((room[1], 2 * choices), -1)
    if tokens:
        launch(
            _row_kernel, (blocks,),
            experts_TK, weights_TK, counts_PN, counts_P2, room_P2, row_TC, packed,
            tokens, blocks, local_experts, ranks, nodes, ranks // nodes,
            K=choices, KP=next_power_of_2(choices), C=most, BY_RANK=ranks <= choices, BLOCK=BLOCK,
            SLOTS=next_power_of_2(ranks), STEP=_BLOCKS_AT_ONCE, LIMITED=room is not None,
        )  # fmt: skip
    return row_TC, packed
