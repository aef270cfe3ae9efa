"""The k largest of each token's scores in one pass.

Shapes: T tokens, E experts (1024 at most), K choices.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from foundry_moe_kernels.launch import cdiv, launch, next_power_of_2
from torch import Tensor

MAX_EXPERTS = 1024
_ELEMENTS = 4096  # scores a program holds
_SORTED = 16  # from this many choices on, a sort takes less time than one maximum per choice


@triton.jit
def _ordered(raw):
    """Integers in the order of the scores; -0 ties with 0."""
    bits = raw.to(tl.int32, bitcast=True)
    bits = tl.where(raw == 0.0, 0, bits)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def ranks(raw, e, num_experts, K: tl.constexpr, TOKENS: tl.constexpr, EXPERTS: tl.constexpr):
    """int32 [TOKENS, EXPERTS]: 0 for the largest score of a token to K - 1, ties towards the lower expert; others K.

    Where a warp has a whole row, each maximum and minimum of integers is one instruction (`redux.sync`).
    """
    LEAST: tl.constexpr = -0x80000000
    ordered = tl.where(e[None, :] < num_experts, tl.maximum(_ordered(raw), LEAST + 1), LEAST)
    rank = tl.full((TOKENS, EXPERTS), K, tl.int32)
    for choice in tl.static_range(K):
        best = tl.max(ordered, axis=1)
        expert = tl.min(tl.where(ordered == best[:, None], e[None, :], EXPERTS), axis=1)
        here = e[None, :] == expert[:, None]
        rank = tl.where(here, choice, rank)
        ordered = tl.where(here, LEAST, ordered)
    return rank


@triton.jit
def _keys(raw, e, num_experts, EXPERTS: tl.constexpr):
    """One int64 orders by score, then towards the lower expert: no two keys of a token are equal."""
    key = (_ordered(raw).to(tl.int64) << 32) | (EXPERTS - 1 - e)[None, :].to(tl.int64)
    return tl.where(e[None, :] < num_experts, key, -0x7FFFFFFFFFFFFFFF)


@triton.jit
def _topk_kernel(
    scores_ptr, values_ptr, experts_ptr, tokens, num_experts, K: tl.constexpr, TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    e = tl.arange(0, EXPERTS)
    keep = (t < tokens)[:, None] & (e < num_experts)[None, :]
    raw = tl.load(scores_ptr + t.to(tl.int64)[:, None] * num_experts + e[None, :], mask=keep, other=0.0)
    raw = raw.to(tl.float32)
    rank = ranks(raw, e, num_experts, K, TOKENS, EXPERTS)
    at = t.to(tl.int64)[:, None] * K + rank
    tl.store(values_ptr + at, raw, mask=keep & (rank < K))
    tl.store(experts_ptr + at, tl.zeros_like(at) + e[None, :], mask=keep & (rank < K))


@triton.jit
def _sort_kernel(
    scores_ptr, values_ptr, experts_ptr, tokens, num_experts, columns, token_stride, expert_stride,
    ABSENT: tl.constexpr, TOKENS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    e = tl.arange(0, EXPERTS)
    keep = (t < tokens)[:, None] & (e < num_experts)[None, :]
    at = t.to(tl.int64)[:, None] * token_stride + e.to(tl.int64)[None, :] * expert_stride
    raw = tl.load(scores_ptr + at, mask=keep, other=0.0).to(tl.float32)
    key = tl.sort(_keys(raw, e, num_experts, EXPERTS), descending=True)
    high = (key >> 32).to(tl.int32)
    values = tl.where(high < 0, high ^ 0x7FFFFFFF, high).to(tl.float32, bitcast=True)
    experts = EXPERTS - 1 - (key & 0xFFFFFFFF)
    if ABSENT:
        experts = tl.where(values < 0, -1, experts)
        values = tl.where(values < 0, 0.0, values)
    out = t.to(tl.int64)[:, None] * columns + e[None, :]
    write = (t < tokens)[:, None] & (e < columns)[None, :]
    tl.store(values_ptr + out, values, mask=write)
    tl.store(experts_ptr + out, experts, mask=write)


def _results(scores_TE: Tensor, k: int) -> tuple[Tensor, Tensor]:
    assert 1 <= k <= scores_TE.shape[1] <= MAX_EXPERTS
    shape, device = (scores_TE.shape[0], k), scores_TE.device
    return torch.empty(shape, dtype=torch.float32, device=device), torch.empty(shape, dtype=torch.int64, device=device)


def topk(scores_TE: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest scores of each token, largest first, ties towards the lower expert: fp32 [T, K] and int64 [T, K].

    Args:
        scores_TE: fp32, bf16 or fp16.
        k: 1 to E.
    """
    scores_TE = scores_TE.contiguous()
    if k >= _SORTED:
        return ranked(scores_TE, k, absent_below_zero=False)
    tokens, experts = scores_TE.shape
    values_TK, experts_TK = _results(scores_TE, k)
    if tokens:
        wide = next_power_of_2(experts)
        block = max(1, min(_ELEMENTS // wide, 16))
        launch(
            _topk_kernel, (cdiv(tokens, block),),
            scores_TE, values_TK, experts_TK, tokens, experts, K=k, TOKENS=block, EXPERTS=wide,
            num_warps=4,
        )  # fmt: skip
    return values_TK, experts_TK


def ranked(scores_TE: Tensor, k: int, *, absent_below_zero: bool) -> tuple[Tensor, Tensor]:
    """The k largest by sorting, for many choices; `scores_TE` may have any strides.

    Args:
        absent_below_zero: a score below zero is not a choice: expert -1, value 0.

    Returns:
        fp32 [T, K] and int64 [T, K], as `topk`.
    """
    tokens, experts = scores_TE.shape
    values_TK, experts_TK = _results(scores_TE, k)
    if tokens:
        wide = max(next_power_of_2(experts), 2)
        block = max(1, min(_ELEMENTS // wide, 32))
        launch(
            _sort_kernel, (cdiv(tokens, block),),
            scores_TE, values_TK, experts_TK, tokens, experts, k, *scores_TE.stride(),
            ABSENT=absent_below_zero, TOKENS=block, EXPERTS=wide, num_warps=4,
        )  # fmt: skip
    return values_TK, experts_TK


@triton.jit
def _spread_kernel(
    values_ptr, experts_ptr, out_ptr, tokens, num_experts, columns, TOKENS: tl.constexpr, EXPERTS: tl.constexpr
):  # fmt: skip
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    e = tl.arange(0, EXPERTS)
    total = tl.zeros((TOKENS, EXPERTS), tl.float32)
    for k in range(columns):
        at = t.to(tl.int64) * columns + k
        expert = tl.load(experts_ptr + at, mask=t < tokens, other=-1).to(tl.int32)
        value = tl.load(values_ptr + at, mask=t < tokens, other=0.0)
        total += tl.where(expert[:, None] == e[None, :], value[:, None], 0.0)
    keep = (t < tokens)[:, None] & (e < num_experts)[None, :]
    tl.store(out_ptr + t.to(tl.int64)[:, None] * num_experts + e[None, :], total, mask=keep)


def spread(values_TK: Tensor, experts_TK: Tensor, num_experts: int) -> Tensor:
    """fp32 [T, E]: each value at its expert, zeros elsewhere; -1 = no expert. The gradient of `topk` and `ranked`."""
    tokens, columns = experts_TK.shape
    out_TE = torch.empty(tokens, num_experts, dtype=torch.float32, device=values_TK.device)
    if out_TE.numel():
        wide = next_power_of_2(num_experts)
        block = max(1, min(_ELEMENTS // wide, 16))
        launch(
            _spread_kernel, (cdiv(tokens, block),),
            values_TK.contiguous(), experts_TK.contiguous(), out_TE, tokens, num_experts, columns,
            TOKENS=block, EXPERTS=wide, num_warps=4,
        )  # fmt: skip
    return out_TE


@triton.jit
def _bits_of(score):
    """Non-negative floats are ordered as their bits are, and NaN of either sign is above them; -1 = never kept."""
    return tl.where(score < 0, -1, score.to(tl.int32, bitcast=True) & 0x7FFFFFFF)


@triton.jit
def _keep_kernel(
    scores_ptr, out_ptr, number_ptr, number, columns, COUNTED: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    base = tl.program_id(0).to(tl.int64) * columns
    c = tl.arange(0, BLOCK)
    need = number
    if COUNTED:
        need = tl.load(number_ptr).to(tl.int32)
    held = tl.load(scores_ptr + base + c, mask=c < columns, other=-1.0)
    # the number-th largest is found bit by bit from the top
    least = tl.zeros((), tl.int32)
    for step in range(31):
        candidate = least | (1 << (30 - step))
        if WHOLE:
            count = tl.sum((_bits_of(held) >= candidate).to(tl.int32))
        else:
            count = tl.zeros((), tl.int32)
            for first in range(0, columns, BLOCK):
                score = tl.load(scores_ptr + base + first + c, mask=first + c < columns, other=-1.0)
                count += tl.sum((_bits_of(score) >= candidate).to(tl.int32))
        least = tl.where(count >= need, candidate, least)
    above = tl.zeros((), tl.int32)
    for first in range(0, columns, BLOCK):
        score = tl.load(scores_ptr + base + first + c, mask=first + c < columns, other=-1.0)
        above += tl.sum((_bits_of(score) > least).to(tl.int32))
    room = need - above  # for those equal to the least one, the first of them
    for first in range(0, columns, BLOCK):
        score = tl.load(scores_ptr + base + first + c, mask=first + c < columns, other=-1.0)
        bits = _bits_of(score)
        equal = (bits == least).to(tl.int32)
        kept = (bits > least) | ((equal > 0) & (tl.cumsum(equal, axis=0) <= room))
        room -= tl.sum(equal)
        tl.store(out_ptr + base + first + c, tl.where(kept, score, -1.0), mask=first + c < columns)


def keep_largest(scores_NC: Tensor, number: int | Tensor) -> Tensor:
    """The same scores with -1 for all but the `number` largest of each row; equals: the first columns stay.

    Args:
        scores_NC: fp32, contiguous; scores below zero are never kept, and NaN is above all others.
        number: one for all rows, perhaps as a tensor of one integer on the device.
    """
    assert scores_NC.dtype is torch.float32 and scores_NC.is_contiguous()
    rows, columns = scores_NC.shape
    out_NC = torch.empty_like(scores_NC)
    if out_NC.numel():
        counted = isinstance(number, Tensor)
        block = min(next_power_of_2(columns), 16384)
        launch(
            _keep_kernel, (rows,),
            scores_NC, out_NC, number if counted else None, 0 if counted else number, columns,
            COUNTED=counted, WHOLE=block >= columns, BLOCK=block, num_warps=max(1, min(16, block // 256)),
        )  # fmt: skip
    return out_NC
