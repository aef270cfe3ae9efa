"""The k largest of each token's scores and their softmax in one pass over the scores, for small k.

Shapes: T tokens, E experts (1024 at most), K choices.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_EXPERTS = 1024
_ELEMENTS = 4096  # scores a program holds


@triton.jit
def _topk_kernel(
    scores_ptr, values_ptr, experts_ptr, tokens, num_experts, K: tl.constexpr, KP: tl.constexpr, SOFTMAX: tl.constexpr,
    TOKENS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    e = tl.arange(0, EXPERTS)
    k = tl.arange(0, KP)
    keep = (t < tokens)[:, None] & (e < num_experts)[None, :]
    raw = tl.load(scores_ptr + t.to(tl.int64)[:, None] * num_experts + e[None, :], mask=keep, other=float("-inf"))
    raw = raw.to(tl.float32)
    # One 64-bit key orders by score, then towards the lower expert: each choice is one maximum, no two keys are equal.
    bits = raw.to(tl.int32, bitcast=True)
    bits = tl.where(raw == 0.0, 0, bits)  # -0 ties with 0
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    key = (ordered.to(tl.int64) << 32) | (EXPERTS - 1 - e)[None, :].to(tl.int64)
    key = tl.where(e[None, :] < num_experts, key, -0x7FFFFFFFFFFFFFFF)
    chosen = tl.zeros((TOKENS, KP), tl.int64)
    best = tl.max(key, axis=1)
    top = best
    for choice in tl.static_range(K):
        chosen = tl.where(k[None, :] == choice, best[:, None], chosen)
        if choice + 1 < K:
            key = tl.where(key == best[:, None], -0x7FFFFFFFFFFFFFFF, key)
            best = tl.max(key, axis=1)
    high = (chosen >> 32).to(tl.int32)
    values = tl.where(high < 0, high ^ 0x7FFFFFFF, high).to(tl.float32, bitcast=True)
    experts = EXPERTS - 1 - (chosen & 0xFFFFFFFF)
    live = k[None, :] < K
    if SOFTMAX != "none":
        high_top = (top >> 32).to(tl.int32)
        peak = tl.where(high_top < 0, high_top ^ 0x7FFFFFFF, high_top).to(tl.float32, bitcast=True)
        exps = tl.where(live, tl.exp(values - peak[:, None]), 0.0)
        if SOFTMAX == "all":
            total = tl.sum(tl.exp(raw - peak[:, None]), axis=1)
        else:
            total = tl.sum(exps, axis=1)
        values = exps / total[:, None]
    at = t.to(tl.int64)[:, None] * K + k[None, :]
    write = (t < tokens)[:, None] & live
    tl.store(values_ptr + at, values, mask=write)
    tl.store(experts_ptr + at, experts, mask=write)


def topk(scores_TE: Tensor, k: int, *, softmax: str = "none") -> tuple[Tensor, Tensor]:
    """The k largest scores of each token, largest first, ties towards the lower expert.

    Args:
        scores_TE: fp32, bf16 or fp16, contiguous.
        k: 1 to E.
        softmax: none = the scores themselves; all = their softmax over all E; chosen = over the k chosen.

    Returns:
        fp32 [T, K] and int64 [T, K].

    Raises:
        ValueError: more than 1024 experts, k out of range, a layout or `softmax` that it does not know.
    """
    if scores_TE.dim() != 2 or not scores_TE.is_contiguous() or not scores_TE.is_floating_point():
        raise ValueError(f"scores_TE must be contiguous floats [T, E], not {scores_TE.dtype} {tuple(scores_TE.shape)}")
    tokens, experts = scores_TE.shape
    if not 1 <= k <= experts <= MAX_EXPERTS:
        raise ValueError(f"needs 1 <= k ({k}) <= experts ({experts}) <= {MAX_EXPERTS}")
    if softmax not in ("none", "all", "chosen"):
        raise ValueError(f"softmax ({softmax!r}) must be none, all or chosen")
    values_TK = torch.empty(tokens, k, dtype=torch.float32, device=scores_TE.device)
    experts_TK = torch.empty(tokens, k, dtype=torch.int64, device=scores_TE.device)
    if tokens:
        wide = triton.next_power_of_2(experts)
        block = max(1, min(_ELEMENTS // wide, 16))
        _topk_kernel[(triton.cdiv(tokens, block),)](
            scores_TE, values_TK, experts_TK, tokens, experts, K=k, KP=triton.next_power_of_2(k), SOFTMAX=softmax,
            TOKENS=block, EXPERTS=wide, num_warps=4,
        )  # fmt: skip
    return values_TK, experts_TK
