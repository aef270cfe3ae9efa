"""Plans permute on the device: a stable counting sort of choices by expert, without atomics.

Three launches: counts of each block of choices, their running sums (for few choices part of the next), and each
choice's row. Sizes that follow the load are not specialised on: another load compiles nothing.

Shapes: T tokens, K choices, A = T * K assignments, E experts, N blocks of assignments.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from foundry_moe_kernels.launch import cdiv, compile_first, launch, next_power_of_2
from torch import Tensor

BLOCK = 128
_EXPERTS_AT_ONCE = 32
_SUMMED_FROM = 16384  # counts, below which each program sums for itself: one launch less
MAX_EXPERTS = 4096


@triton.jit(do_not_specialize=["assignments", "blocks"])
def _count_kernel(
    experts_ptr, mask_ptr, counts_ptr, assignments, num_experts, blocks, choices,
    MASKED: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    i = block * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(experts_ptr + i, mask=i < assignments, other=-1).to(tl.int32)
    if MASKED:
        real = tl.load(mask_ptr + i // choices, mask=i < assignments, other=0) != 0
        expert = tl.where(real, expert, -1)
    for first in range(0, num_experts, CHUNK):
        e = first + tl.arange(0, CHUNK)
        counts = tl.sum((expert[:, None] == e[None, :]).to(tl.int32), axis=0)
        tl.store(counts_ptr + e * blocks + block, counts, mask=e < num_experts)


@triton.jit(do_not_specialize=["blocks"])
def _sum_kernel(counts_ptr, totals_ptr, blocks, CHUNK: tl.constexpr):
    """Running sums over blocks, in place, exclusive; the total of each expert."""
    row = counts_ptr + tl.program_id(0) * blocks
    total = tl.zeros((), tl.int32)
    for first in range(0, blocks, CHUNK):
        n = first + tl.arange(0, CHUNK)
        counts = tl.load(row + n, mask=n < blocks, other=0)
        tl.store(row + n, total + tl.cumsum(counts, axis=0) - counts, mask=n < blocks)
        total += tl.sum(counts)
    tl.store(totals_ptr + tl.program_id(0), total.to(totals_ptr.dtype.element_ty))


@triton.jit(do_not_specialize=["assignments", "blocks"])
def _row_kernel(
    experts_ptr, counts_ptr, totals_ptr, experts_out, offsets_ptr, source_ptr, row_ptr,
    assignments, num_experts, blocks, SUMMED: tl.constexpr, BLOCK: tl.constexpr, EXPERTS: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    e = tl.arange(0, EXPERTS)
    if SUMMED:
        totals = tl.load(totals_ptr + e, mask=e < num_experts, other=0)
    else:
        totals = tl.zeros((EXPERTS,), tl.int32)
        before_E = tl.zeros((EXPERTS,), tl.int32)
        for begin in range(0, blocks, CHUNK):
            n = begin + tl.arange(0, CHUNK)
            keep = (e < num_experts)[:, None] & (n < blocks)[None, :]
            counts = tl.load(counts_ptr + e[:, None] * blocks + n[None, :], mask=keep, other=0)
            totals += tl.sum(counts, axis=1)
            before_E += tl.sum(tl.where((n < block)[None, :], counts, 0), axis=1)
        if block == 0:
            tl.store(totals_ptr + e, totals, mask=e < num_experts)
    ends = tl.cumsum(totals, axis=0)
    starts = ends - totals
    if block == 0:
        tl.store(offsets_ptr + e, ends, mask=e < num_experts)
    used = tl.sum(totals)
    i = block * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(experts_ptr + i, mask=i < assignments, other=-1).to(tl.int32)
    tl.store(experts_out + i, expert, mask=i < assignments)
    present = expert >= 0
    j = tl.arange(0, BLOCK)
    other = tl.load(experts_ptr + block * BLOCK + j, mask=block * BLOCK + j < assignments, other=-1).to(tl.int32)
    earlier = (expert[:, None] == other[None, :]) & (j[:, None] > j[None, :])
    rank = tl.sum(earlier.to(tl.int32), axis=1)
    first = tl.gather(starts, tl.maximum(expert, 0), axis=0)
    if SUMMED:
        before = tl.load(counts_ptr + expert * blocks + block, mask=present, other=0)
    else:
        before = tl.gather(before_E, tl.maximum(expert, 0), axis=0)
    row = first + before + rank
    tl.store(row_ptr + i, tl.where(present, row, -1), mask=i < assignments)
    tl.store(source_ptr + row, i, mask=present)
    tl.store(source_ptr + i, tl.full((BLOCK,), -1, tl.int32), mask=(i >= used) & (i < assignments))


def _count(experts_TK: Tensor, mask_T: Tensor | None, counts_EN: Tensor, totals_E: Tensor | None) -> None:
    """Choices of each expert in the blocks before each block, and in all; without `totals_E`, in each block."""
    experts, blocks = counts_EN.shape
    launch(
        _count_kernel, (blocks,),
        experts_TK, mask_T, counts_EN, experts_TK.numel(), experts, blocks, experts_TK.shape[-1],
        MASKED=mask_T is not None, BLOCK=BLOCK, CHUNK=_EXPERTS_AT_ONCE,
    )  # fmt: skip
    if totals_E is not None:
        launch(_sum_kernel, (experts,), counts_EN, totals_E, blocks, CHUNK=1024)


def count_choices(experts_TK: Tensor, num_experts: int, mask_T: Tensor | None = None) -> Tensor:
    """Choices per expert, int64 [E]: -1, and tokens that `mask_T` (bool, True = real) leaves out, not counted."""
    totals_E = torch.empty(num_experts, dtype=torch.int64, device=experts_TK.device)
    blocks = cdiv(experts_TK.numel(), BLOCK)
    if blocks == 0:
        return totals_E.zero_()
    counts_EN = torch.empty(num_experts, blocks, dtype=torch.int32, device=experts_TK.device)
    mask = None if mask_T is None else mask_T.contiguous().view(torch.uint8)
    _count(experts_TK.contiguous(), mask, counts_EN, totals_E)
    return totals_E


def new_results(experts_TK: Tensor, num_experts: int) -> tuple[Tensor, ...]:
    """Memory for the results of `plan_permute`."""
    choices = experts_TK.shape
    shapes = choices, (num_experts,), (num_experts,), (experts_TK.numel(),), choices
    return tuple([experts_TK.new_empty(shape, dtype=torch.int32) for shape in shapes])


def plan_permute(experts_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Rows of every choice, sorted by expert, then by assignment t * K + k.

    Args:
        experts_TK: integers in [-1, E); -1 = not a choice.

    Returns:
        int32: experts_TK, tokens_per_expert_E, offsets_E (row ends), source_R (assignment of each row, -1 past the
        end), row_TK (-1 without choice).
    """
    experts_TK = experts_TK.contiguous()
    if not 1 <= num_experts <= MAX_EXPERTS:
        raise ValueError(f"num_experts ({num_experts}) must be 1 to {MAX_EXPERTS}")
    compile_first("plan_permute", lambda: plan_permute(experts_TK, num_experts))
    assignments = experts_TK.numel()
    blocks = cdiv(assignments, BLOCK)
    experts_out, totals_E, offsets_E, source_R, row_TK = new_results(experts_TK, num_experts)
    if assignments == 0:
        return experts_out, totals_E.zero_(), offsets_E.zero_(), source_R, row_TK
    counts_EN = experts_TK.new_empty(num_experts, blocks, dtype=torch.int32)
    summed = counts_EN.numel() > _SUMMED_FROM
    _count(experts_TK, None, counts_EN, totals_E if summed else None)
    launch(
        _row_kernel, (blocks,),
        experts_TK, counts_EN, totals_E, experts_out, offsets_E, source_R, row_TK, assignments, num_experts, blocks,
        SUMMED=summed, BLOCK=BLOCK, EXPERTS=max(next_power_of_2(num_experts), BLOCK), CHUNK=32, num_warps=4,
    )  # fmt: skip
    return experts_out, totals_E, offsets_E, source_R, row_TK
