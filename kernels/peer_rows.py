"""Rows stored straight into the memory of other GPUs of the host, by their addresses, and the plan of where they go.

When a rank may read what was stored is the caller's affair. Few programs store, each many rows: between two H200s links
are full with 64, and with 32 nearly so.

Shapes: P ranks, H chunks, T tokens, K choices, C = min(P, K) ranks a token goes to at most, D width of rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from foundry_moe_kernels.launch import launch
from foundry_moe_kernels.sizes import next_power_of_2
from torch import Tensor

PROGRAMS = 64


@triton.jit
def _memory(pointers_ptr, rank, like):
    """The memory of each rank, as a pointer to `like`'s elements."""
    return tl.multiple_of(tl.load(pointers_ptr + rank).to(like.dtype), 16)


@triton.jit
def _store_counts_kernel(counts_ptr, pointers_ptr, me, size, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    counts = tl.load(counts_ptr + i, mask=i < size)
    place = _memory(pointers_ptr, tl.program_id(0), counts_ptr) + me * size
    tl.store(place + i, counts, mask=i < size)


@triton.jit
def _place_kernel(
    stored_ptr, counts_ptr, places_ptr, me, ranks, H: tl.constexpr, PP: tl.constexpr
):  # fmt: skip
    s = tl.arange(0, PP)[:, None]
    p = tl.arange(0, PP)[None, :]
    real = (s < ranks) & (p < ranks)
    sent_S = tl.zeros((PP,), tl.int64)
    received_P = tl.zeros((PP,), tl.int64)
    i = tl.arange(0, PP)
    for h in tl.static_range(H):
        at = ((s * ranks + p) * H + h) * 2
        rows_SP = tl.load(stored_ptr + at, mask=real, other=0)
        tl.store(counts_ptr + at, rows_SP, mask=real)
        tl.store(counts_ptr + at + 1, tl.load(stored_ptr + at + 1, mask=real, other=0), mask=real)
        within_source_SP = tl.cumsum(rows_SP, axis=1) - rows_SP
        within_target_SP = tl.cumsum(rows_SP, axis=0) - rows_SP
        begin_SP = sent_S[:, None] + within_source_SP
        target_SP = received_P[None, :] + within_target_SP
        out = places_ptr + h * 6 * ranks + i
        mine, keep = s == me, i < ranks
        tl.store(out, tl.sum(tl.where(mine, begin_SP, 0), axis=0).to(tl.int32), mask=keep)
        tl.store(out + ranks, tl.sum(tl.where(mine, rows_SP, 0), axis=0).to(tl.int32), mask=keep)
        tl.store(out + 2 * ranks, tl.sum(tl.where(mine, target_SP, 0), axis=0).to(tl.int32), mask=keep)
        here = p == me
        tl.store(out + 3 * ranks, tl.sum(tl.where(here, within_target_SP, 0), axis=1).to(tl.int32), mask=keep)
        tl.store(out + 4 * ranks, tl.sum(tl.where(here, rows_SP, 0), axis=1).to(tl.int32), mask=keep)
        tl.store(out + 5 * ranks, tl.sum(tl.where(here, begin_SP, 0), axis=1).to(tl.int32), mask=keep)
        sent_S += tl.sum(rows_SP, axis=1)
        received_P += tl.sum(rows_SP, axis=0)


@triton.jit(do_not_specialize=["first", "end", "limit"])
def _store_tokens_kernel(
    x_ptr, row_ptr, experts_ptr, places_ptr, pointers_ptr, first, end, limit, width, local_experts, ranks,
    C: tl.constexpr, BY_RANK: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(end - first, TOKENS)
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        t = (first + block * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
        for d0 in range(0, width, WIDTH):
            d = d0 + tl.arange(0, WIDTH)
            keep = (t < end)[:, None] & (d < width)[None, :]
            x = tl.load(x_ptr + t[:, None] * width + d[None, :], mask=keep)
            for c in tl.static_range(C):
                row = tl.load(row_ptr + t * C + c, mask=t < end, other=-1)
                if BY_RANK:
                    rank = tl.zeros_like(row) + c
                else:
                    expert = tl.load(experts_ptr + t * C + c, mask=row >= 0, other=0)
                    rank = (expert // local_experts).to(tl.int32)
                target = row + tl.load(places_ptr + 2 * ranks + rank) - tl.load(places_ptr + rank)
                place = _memory(pointers_ptr, rank, x_ptr) + target.to(tl.int64) * width
                sent = keep & ((row >= 0) & (target < limit))[:, None]
                tl.store(place[:, None] + d[None, :], x, mask=sent)


@triton.jit(do_not_specialize=["limit"])
def _store_blocks_kernel(
    rows_ptr, places_ptr, pointers_ptr, limit, width, me, ranks,
    PP: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    p = tl.arange(0, PP)
    most = tl.max(tl.load(places_ptr + ranks + p, mask=p < ranks, other=0))
    for work in range(tl.program_id(0), tl.cdiv(most, ROWS) * ranks, tl.num_programs(0)):
        rank = (me + 1 + work % ranks) % ranks  # all ranks at once, and each begins with the next one
        i = (work // ranks) * ROWS + tl.arange(0, ROWS)
        row = (tl.load(places_ptr + rank) + i).to(tl.int64)
        target = (tl.load(places_ptr + 2 * ranks + rank) + i).to(tl.int64)
        used = (i < tl.load(places_ptr + ranks + rank)) & (target < limit)
        place = _memory(pointers_ptr, rank, rows_ptr)
        for d0 in range(0, width, WIDTH):
            d = d0 + tl.arange(0, WIDTH)
            keep = used[:, None] & (d < width)[None, :]
            values = tl.load(rows_ptr + row[:, None] * width + d[None, :], mask=keep)
            tl.store(place + target[:, None] * width + d[None, :], values, mask=keep)


def _block(width: int, element_size: int) -> tuple[int, int, int]:
    """(rows, columns, warps) of a program's step: 128 bytes a thread."""
    columns = min(next_power_of_2(width), 4096 // element_size)
    warps = 8
    rows = max(warps * 32 * 128 // (columns * element_size), 1)
    return rows, columns, warps


def store_counts(counts_PH2: Tensor, pointers_P: Tensor, me: int) -> None:
    """Stores a rank's counts as row `me` into the memory of each rank.

    Args:
        counts_PH2: int64, of `dispatch_plan.count_rows`.
        pointers_P: int64, the addresses of the ranks' memory, multiples of 16.
    """
    launch(
        _store_counts_kernel, (len(pointers_P),),
        counts_PH2, pointers_P, me, counts_PH2.numel(), BLOCK=next_power_of_2(counts_PH2.numel()), num_warps=1,
    )  # fmt: skip


def plan_places(stored_PPH2: Tensor, me: int) -> tuple[Tensor, Tensor]:
    """Where rows of this rank go, and where those that it gets go back to; see `foundry_moe.ops.peer_rows`."""
    ranks, _, chunks, _ = stored_PPH2.shape
    counts_PPH2 = torch.empty_like(stored_PPH2)
    places_H23P = torch.empty(chunks, 2, 3, ranks, dtype=torch.int32, device=stored_PPH2.device)
    launch(
        _place_kernel, (1,),
        stored_PPH2, counts_PPH2, places_H23P, me, ranks, H=chunks, PP=next_power_of_2(ranks), num_warps=1,
    )  # fmt: skip
    return counts_PPH2, places_H23P


def store_tokens(
    x_TD: Tensor, row_TC: Tensor, experts_TK: Tensor, local_experts: int, places_3P: Tensor, pointers_P: Tensor,
    limit: int, tokens: range,
) -> None:  # fmt: skip
    """Stores each of some tokens to its row in the memory of each of its ranks.

    Args:
        row_TC, experts_TK: of `dispatch_plan.assign_rows`, contiguous.
        places_3P: where rows of this chunk go.
        limit: rows that the memory of a rank has; what would lie past it is not stored.
    """
    for tensor in (x_TD, row_TC, experts_TK):
        if not tensor.is_contiguous():
            raise ValueError(f"x_TD, row_TC and experts_TK must be contiguous, not {tensor.shape} {tensor.stride()}")
    ranks, columns = len(pointers_P), row_TC.shape[1]
    if not len(tokens):
        return
    block, width, warps = _block(x_TD.shape[1], x_TD.element_size())
    launch(
        _store_tokens_kernel, (PROGRAMS,),
        x_TD, row_TC, experts_TK, places_3P, pointers_P, tokens.start, tokens.stop, limit, x_TD.shape[1],
        local_experts, ranks, C=columns, BY_RANK=ranks <= experts_TK.shape[1], TOKENS=block, WIDTH=width,
        num_warps=warps,
    )  # fmt: skip


def store_blocks(rows_XD: Tensor, places_3P: Tensor, pointers_P: Tensor, limit: int, me: int) -> None:
    """Stores blocks of rows, one for each rank, into the ranks' memory. Arguments as in `store_tokens`."""
    if not rows_XD.is_contiguous():
        raise ValueError(f"rows_XD must be contiguous, not {rows_XD.shape} {rows_XD.stride()}")
    ranks = len(pointers_P)
    if not rows_XD.numel():
        return
    block, width, warps = _block(rows_XD.shape[1], rows_XD.element_size())
    launch(
        _store_blocks_kernel, (PROGRAMS,),
        rows_XD, places_3P, pointers_P, limit, rows_XD.shape[1], me, ranks,
        PP=next_power_of_2(ranks), ROWS=block, WIDTH=width, num_warps=warps,
    )  # fmt: skip
