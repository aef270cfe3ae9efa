"""Softmax, choice of the k best, combine weights and the balance and z-losses' statistics in one pass over logits.

One more pass computes all of their gradients. No atomics: statistics are summed over programs in a second small
launch, which also computes the balance loss of these tokens if it is a single program.

Shapes: T tokens, E experts (1024 at most), K choices.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from foundry_moe_kernels.launch import cdiv, compile_first, launch, next_power_of_2
from foundry_moe_kernels.noise import column_hash, row_hash, uniform_from
from foundry_moe_kernels.select_topk import ranks
from torch import Tensor

_ELEMENTS, _TOKENS = 4096, 64  # logits and tokens that a program holds at most: many, so that few sums are left to add
_BACKWARD_ELEMENTS, _BACKWARD_TOKENS = 2048, 32
_EXTRA = 4  # numbers of a program's sums beside two for each expert: two, and two that keep rows aligned
_SUMMED_AT_ONCE = 65536  # sums, up to which one program adds them all up


class Rule(NamedTuple):
    """The number of a token's choices, the form of their weights, and the statistics to compute.

    normalize: divide by their sum over a token's choices; then times `scale`.
    stream: None, or: keep a token's second choice with probability 2 * its weight (GShard), drawn with this stream.
    counted: choices of a token, the first ones, that count in the loads.
    with_balance: needs `statistics`.
    """

    k: int
    normalize: bool = False
    scale: float = 1.0
    stream: int | None = None
    counted: int = 1
    statistics: bool = True
    with_balance: bool = False


class Chosen(NamedTuple):
    """Results of `softmax_topk` that its backward pass reads."""

    experts_TK: Tensor
    wanted_TK: Tensor
    counts_E: Tensor
    number: Tensor


class Gradients(NamedTuple):
    """Gradients of the weights, the mean softmax, the z-loss and the balance loss; None where there is none."""

    weights_TK: Tensor
    mean_E: Tensor | None
    z: Tensor | None
    balance: Tensor | None


@triton.jit
def _softmax(logits_ptr, t, e, tokens, num_experts):
    """Logits, their softmax and its logarithm's denominator; finite for tokens past the end."""
    keep = (t < tokens)[:, None] & (e < num_experts)[None, :]
    raw = tl.load(logits_ptr + t.to(tl.int64)[:, None] * num_experts + e[None, :], mask=keep, other=0.0)
    raw = tl.where((e < num_experts)[None, :], raw, float("-inf"))
    peak = tl.max(raw, axis=1)
    exps = tl.exp(raw - peak[:, None])
    total = tl.sum(exps, axis=1)
    return raw, exps / total[:, None], peak + tl.log(total)


@triton.jit
def _real(mask_ptr, t, tokens, MASKED: tl.constexpr):
    """1 for tokens that take part in losses."""
    real = (t < tokens).to(tl.float32)
    if MASKED:
        real = tl.where(tl.load(mask_ptr + t, mask=t < tokens, other=0) != 0, real, 0.0)
    return real


@triton.jit(do_not_specialize=["stream"])
def _softmax_topk_kernel(
    logits_ptr, mask_ptr, key_ptr, weights_ptr, experts_ptr, wanted_ptr, sums_ptr, stream, tokens, num_experts, scale,
    K: tl.constexpr, COUNTED: tl.constexpr, NORMALIZE: tl.constexpr, RANDOM: tl.constexpr,
    MASKED: tl.constexpr, STATISTICS: tl.constexpr, EXTRA: tl.constexpr, TOKENS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    e = tl.arange(0, EXPERTS)
    raw, probs, lse = _softmax(logits_ptr, t, e, tokens, num_experts)
    rank = ranks(raw, e, num_experts, K, TOKENS, EXPERTS)
    weights = tl.where(rank < K, probs, 0.0)
    if NORMALIZE:
        weights = weights / tl.sum(weights, axis=1)[:, None]
    weights = weights * scale
    experts = tl.zeros_like(rank) + e[None, :]
    at = t.to(tl.int64)[:, None] * K + rank
    write = (t < tokens)[:, None] & (rank < K)
    if RANDOM:
        key = tl.load(key_ptr + t, mask=t < tokens, other=0)
        drawn = uniform_from(row_hash(key, stream) ^ column_hash(tl.zeros_like(t), stream))
        tl.store(wanted_ptr + at, experts, mask=write)
        dropped = (rank == 1) & (2.0 * weights <= drawn[:, None])
        weights = tl.where(dropped, 0.0, weights)
        experts = tl.where(dropped, -1, experts)
    tl.store(weights_ptr + at, weights, mask=write)
    tl.store(experts_ptr + at, experts.to(tl.int64), mask=write)
    if STATISTICS:
        real = _real(mask_ptr, t, tokens, MASKED)
        counts = (rank < COUNTED).to(tl.float32)
        sums = sums_ptr + tl.program_id(0).to(tl.int64) * (2 * num_experts + EXTRA)
        tl.store(sums + e, tl.sum(probs * real[:, None], axis=0), mask=e < num_experts)
        tl.store(sums + num_experts + e, tl.sum(counts * real[:, None], axis=0), mask=e < num_experts)
        tl.store(sums + 2 * num_experts, tl.sum(lse * lse * real))
        tl.store(sums + 2 * num_experts + 1, tl.sum(real))


@triton.jit
def _sum_kernel(
    sums_ptr, mean_ptr, counts_ptr, z_ptr, number_ptr, programs, num_experts, EXTRA: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Column sums; those of probabilities and of the z-loss over the number of tokens."""
    c = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    width = 2 * num_experts + EXTRA
    last = 2 * num_experts + 1
    total = tl.zeros((COLUMNS,), tl.float32)
    number = tl.zeros((), tl.float32)
    for first in range(0, programs, ROWS):
        p = first + tl.arange(0, ROWS)
        at = sums_ptr + p.to(tl.int64)[:, None] * width
        total += tl.sum(
            tl.load(at + c[None, :], mask=(p < programs)[:, None] & (c <= last)[None, :], other=0.0), axis=0
        )
        number += tl.sum(tl.load(sums_ptr + p.to(tl.int64) * width + last, mask=p < programs, other=0.0))
    number = tl.maximum(number, 1.0)
    tl.store(mean_ptr + c, total / number, mask=c < num_experts)
    tl.store(counts_ptr + c - num_experts, total.to(tl.int64), mask=(c >= num_experts) & (c < 2 * num_experts))
    tl.store(z_ptr + c - 2 * num_experts, total / number, mask=c == 2 * num_experts)
    tl.store(number_ptr + c - last, tl.maximum(total, 1.0), mask=c == last)


@triton.jit
def _sum_at_once_kernel(
    sums_ptr, mean_ptr, counts_ptr, z_ptr, number_ptr, loss_ptr, programs, num_experts,
    BALANCE: tl.constexpr, EXTRA: tl.constexpr, ROWS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """The same and the balance loss, in one program."""
    e = tl.arange(0, EXPERTS)
    width = 2 * num_experts + EXTRA
    probs, counts = tl.zeros((EXPERTS,), tl.float32), tl.zeros((EXPERTS,), tl.float32)
    z, number = tl.zeros((), tl.float32), tl.zeros((), tl.float32)
    for first in range(0, programs, ROWS):
        p = first + tl.arange(0, ROWS)
        keep = (p < programs)[:, None] & (e < num_experts)[None, :]
        at = sums_ptr + p[:, None] * width + e[None, :]
        last = sums_ptr + p * width + 2 * num_experts
        probs += tl.sum(tl.load(at, mask=keep, other=0.0), axis=0)
        counts += tl.sum(tl.load(at + num_experts, mask=keep, other=0.0), axis=0)
        z += tl.sum(tl.load(last, mask=p < programs, other=0.0))
        number += tl.sum(tl.load(last + 1, mask=p < programs, other=0.0))
    number = tl.maximum(number, 1.0)
    tl.store(mean_ptr + e, probs / number, mask=e < num_experts)
    tl.store(counts_ptr + e, counts.to(tl.int64), mask=e < num_experts)
    tl.store(z_ptr, z / number)
    tl.store(number_ptr, number)
    if BALANCE:
        total = tl.maximum(tl.sum(counts), 1.0)
        tl.store(loss_ptr, tl.sum(counts / total * num_experts * (probs / number)))


@triton.jit
def _slope(counts_ptr, e, num_experts):
    """The slope of the balance loss in the mean probabilities."""
    counts = tl.load(counts_ptr + e, mask=e < num_experts, other=0)
    total = tl.maximum(tl.sum(counts), 1).to(tl.float32)
    return counts.to(tl.float32) / total * num_experts


@triton.jit
def _choice(
    experts_ptr, wanted_ptr, dweights_ptr, t, choice, tokens, scale, K: tl.constexpr, RANDOM: tl.constexpr
):  # fmt: skip
    """The expert of each token's choice of this number, and the gradient of its weight before `scale`."""
    at = t.to(tl.int64) * K + choice
    expert = tl.load(experts_ptr + at, mask=t < tokens, other=0).to(tl.int32)
    dweight = tl.load(dweights_ptr + at, mask=t < tokens, other=0.0).to(tl.float32) * scale
    if RANDOM:
        dweight = tl.where(expert < 0, 0.0, dweight)
        expert = tl.load(wanted_ptr + at, mask=t < tokens, other=0)
    return expert, dweight


@triton.jit
def _softmax_topk_backward_kernel(
    logits_ptr, mask_ptr, experts_ptr, wanted_ptr, counts_ptr, dweights_ptr, dmean_ptr, dz_ptr, dloss_ptr, number_ptr,
    out_ptr, tokens, num_experts, scale,
    K: tl.constexpr, NORMALIZE: tl.constexpr, RANDOM: tl.constexpr, MASKED: tl.constexpr,
    MEAN: tl.constexpr, Z: tl.constexpr, BALANCE: tl.constexpr, TOKENS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    e = tl.arange(0, EXPERTS)
    _, probs, lse = _softmax(logits_ptr, t, e, tokens, num_experts)
    total, product = tl.zeros((TOKENS,), tl.float32), tl.zeros((TOKENS,), tl.float32)
    if NORMALIZE:
        for choice in tl.static_range(K):
            expert, dweight = _choice(experts_ptr, wanted_ptr, dweights_ptr, t, choice, tokens, scale, K, RANDOM)
            logit = tl.load(logits_ptr + t.to(tl.int64) * num_experts + expert, mask=t < tokens, other=0.0)
            score = tl.exp(logit - lse)
            total += score
            product += dweight * score
        total = tl.maximum(total, 1e-30)
    dprobs = tl.zeros((TOKENS, EXPERTS), tl.float32)
    for choice in tl.static_range(K):
        expert, dweight = _choice(experts_ptr, wanted_ptr, dweights_ptr, t, choice, tokens, scale, K, RANDOM)
        if NORMALIZE:
            dweight = (dweight - product / total) / total
        dprobs += tl.where(expert[:, None] == e[None, :], dweight[:, None], 0.0)
    dlse = tl.zeros((TOKENS,), tl.float32)
    if MEAN or (Z or BALANCE):  # Triton 3.3 takes no chain
        share = _real(mask_ptr, t, tokens, MASKED) / tl.load(number_ptr)
    if MEAN:
        dmean = tl.load(dmean_ptr + e, mask=e < num_experts, other=0.0)
        dprobs += share[:, None] * dmean[None, :]
    if BALANCE:
        slope = _slope(counts_ptr, e, num_experts) * tl.load(dloss_ptr)
        dprobs += share[:, None] * slope[None, :]
    if Z:
        dlse = tl.load(dz_ptr) * 2.0 * lse * share
    dlogits = probs * (dprobs - tl.sum(probs * dprobs, axis=1)[:, None] + dlse[:, None])
    keep = (t < tokens)[:, None] & (e < num_experts)[None, :]
    tl.store(out_ptr + t.to(tl.int64)[:, None] * num_experts + e[None, :], dlogits, mask=keep)


def _blocks(experts: int, elements: int, tokens: int) -> tuple[int, int]:
    """Tokens of a program, and E as a power of two."""
    wide = next_power_of_2(experts)
    return max(1, min(elements // wide, tokens)), wide


def new_results(logits_TE: Tensor, rule: Rule, *_: Tensor | None) -> tuple[Tensor, ...]:
    """Memory for the results of `softmax_topk`, in its dtypes and shapes."""
    tokens, experts = logits_TE.shape
    size = experts if rule.statistics else 0
    return (
        logits_TE.new_empty(tokens, rule.k),
        logits_TE.new_empty(tokens, rule.k, dtype=torch.int64),
        logits_TE.new_empty(0 if rule.stream is None else tokens, rule.k, dtype=torch.int32),
        logits_TE.new_empty(size),
        logits_TE.new_empty(size, dtype=torch.int64),
        logits_TE.new_empty(() if rule.statistics else 0),
        logits_TE.new_empty(int(rule.statistics)),
        logits_TE.new_empty(() if rule.with_balance else 0),
    )


def softmax_topk(
    logits_TE: Tensor, rule: Rule, mask_T: Tensor | None, keys_T: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Weights of the k most probable experts, ties towards the lower expert, and sums over the real tokens.

    Args:
        logits_TE: fp32.
        mask_T: bool, True for real tokens; None = all.
        keys_T: int32 keys of the tokens, where `rule.stream` is given.

    Returns:
        weights_TK fp32; experts_TK int64, -1 where a choice was dropped; wanted_TK int32, the same without dropping
        (empty unless `rule.stream`); and, empty unless `rule.statistics`: mean_E, the mean softmax; counts_E int64; z,
        the mean of logsumexp squared; number, of real tokens, 1 at least; and `balance` of mean_E and counts_E, empty
        unless `rule.with_balance`. Counts and `number` are summed in fp32, which is exact while
        an expert has fewer than 2^24 choices, and there are fewer than 2^24 tokens.
    """
    logits_TE = logits_TE.contiguous()
    compile_first("softmax_topk", lambda: _forward_and_backward(logits_TE, rule, mask_T, keys_T))
    tokens, experts = logits_TE.shape
    k, statistics, with_balance = rule.k, rule.statistics, rule.with_balance
    block, wide = _blocks(experts, _ELEMENTS, _TOKENS)
    programs = cdiv(tokens, block)
    weights_TK, experts_TK, wanted_TK, mean_E, counts_E, z, number, loss = new_results(logits_TE, rule)
    if tokens == 0:
        nothing = mean_E.zero_(), counts_E.zero_(), z.zero_(), number.fill_(1), loss.zero_()
        return weights_TK, experts_TK, wanted_TK, *nothing
    sums = logits_TE.new_empty(programs, 2 * experts + _EXTRA) if statistics else weights_TK
    mask = None if mask_T is None else mask_T.contiguous().view(torch.uint8)
    launch(
        _softmax_topk_kernel, (programs,),
        logits_TE, mask, keys_T, weights_TK, experts_TK, wanted_TK, sums, rule.stream or 0, tokens, experts, rule.scale,
        K=k, COUNTED=min(rule.counted, k), NORMALIZE=rule.normalize, RANDOM=rule.stream is not None,
        MASKED=mask is not None, STATISTICS=statistics, EXTRA=_EXTRA, TOKENS=block, EXPERTS=wide, num_warps=8,
    )  # fmt: skip
    if statistics and programs * wide <= _SUMMED_AT_ONCE:
        launch(
            _sum_at_once_kernel, (1,),
            sums, mean_E, counts_E, z, number, loss, programs, experts,
            BALANCE=with_balance, EXTRA=_EXTRA, ROWS=min(16384 // wide, next_power_of_2(programs)), EXPERTS=wide,
            num_warps=16,
        )  # fmt: skip
    elif statistics:
        launch(
            _sum_kernel, (cdiv(2 * experts + 2, 8),),
            sums, mean_E, counts_E, z, number, programs, experts, EXTRA=_EXTRA, ROWS=128, COLUMNS=8,
        )  # fmt: skip
        if with_balance:
            loss = balance(mean_E, counts_E)[0]
    return weights_TK, experts_TK, wanted_TK, mean_E, counts_E, z, number, loss


def _forward_and_backward(logits_TE: Tensor, rule: Rule, mask_T: Tensor | None, keys_T: Tensor | None) -> None:
    """With gradients of the results that auxiliary losses use."""
    weights_TK, experts_TK, wanted_TK, _, counts_E, z, number, loss = softmax_topk(logits_TE, rule, mask_T, keys_T)
    grads = Gradients(weights_TK, None, z if rule.statistics else None, loss if rule.with_balance else None)
    softmax_topk_backward(logits_TE, rule, mask_T, Chosen(experts_TK, wanted_TK, counts_E, number), grads)


def softmax_topk_backward(
    logits_TE: Tensor, rule: Rule, mask_T: Tensor | None, chosen: Chosen, grads: Gradients
) -> Tensor:
    """dlogits_TE."""
    logits_TE = logits_TE.contiguous()
    tokens, experts = logits_TE.shape
    k = rule.k
    out_TE = torch.empty_like(logits_TE)
    if tokens:
        block, wide = _blocks(experts, _BACKWARD_ELEMENTS, _BACKWARD_TOKENS)
        mask = None if mask_T is None else mask_T.contiguous().view(torch.uint8)
        launch(
            _softmax_topk_backward_kernel, (cdiv(tokens, block),),
            logits_TE, mask, chosen.experts_TK, chosen.wanted_TK, chosen.counts_E, grads.weights_TK.contiguous(),
            grads.mean_E, grads.z, grads.balance, chosen.number, out_TE, tokens, experts, rule.scale,
            K=k, NORMALIZE=rule.normalize, RANDOM=rule.stream is not None, MASKED=mask is not None,
            MEAN=grads.mean_E is not None, Z=grads.z is not None, BALANCE=grads.balance is not None,
            TOKENS=block, EXPERTS=wide, num_warps=4,
        )  # fmt: skip
    return out_TE


@triton.jit
def _balance_kernel(mean_ptr, counts_ptr, loss_ptr, slope_ptr, num_experts, EXPERTS: tl.constexpr):
    e = tl.arange(0, EXPERTS)
    slope = _slope(counts_ptr, e, num_experts)
    mean = tl.load(mean_ptr + e, mask=e < num_experts, other=0.0)
    tl.store(slope_ptr + e, slope, mask=e < num_experts)
    tl.store(loss_ptr, tl.sum(slope * mean))


def balance(mean_E: Tensor, counts_E: Tensor) -> tuple[Tensor, Tensor]:
    """E * sum_e f_e P_e of mean probabilities and counts, and its slope in the former: a scalar and [E], fp32."""
    mean_E, counts_E = mean_E.contiguous(), counts_E.contiguous()
    loss, slope_E = mean_E.new_empty(()), torch.empty_like(mean_E)
    experts = mean_E.shape[0]
    launch(_balance_kernel, (1,), mean_E, counts_E, loss, slope_E, experts, EXPERTS=next_power_of_2(experts))
    return loss, slope_E
