"""From a softmax router's logits to choices, combine weights and what the balance and z-losses need.

One kernel forward and one backward for fp32 logits on CUDA, a chain of torch operations elsewhere.

Shapes: T tokens, E experts, K choices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from foundry_moe_kernels import gating
from torch import Tensor

from foundry_moe.ops import noise
from foundry_moe.ops.masked import masked_mean
from foundry_moe.ops.operators import differentiable, operator
from foundry_moe.ops.topk import MAX_CHOICES, MAX_EXPERTS, count_choices, topk


@dataclass(frozen=True, kw_only=True)
class Draw:
    """Random numbers of `foundry_moe.ops.noise`: int32 keys of the tokens, and a stream."""

    keys_T: Tensor
    stream: int


@dataclass(frozen=True, kw_only=True)
class Selection:
    """What `select` gives.

    experts_TK: int64, -1 where a choice was dropped.
    weights_TK: combine weights.
    mean_E: mean softmax over the real tokens.
    counts_E: int64, without gradient: counted choices of the real tokens.
    z: mean of logsumexp squared over the real tokens.
    balance: `balance` of mean_E and counts_E, where it was asked for.
    """

    experts_TK: Tensor
    weights_TK: Tensor
    mean_E: Tensor
    counts_E: Tensor
    z: Tensor
    balance: Tensor | None = None


def select(
    logits_TE: Tensor,
    k: int,
    *,
    normalize: bool = False,
    scale: float = 1.0,
    second_by_chance: Draw | None = None,
    counted: int | None = None,
    mask_T: Tensor | None = None,
    statistics: bool = True,
    with_balance: bool = False,
) -> Selection:
    """The k most probable experts of each token, largest first, ties towards the lower expert.

    Differentiable in the logits, through weights, `mean_E`, `z` and `balance`.

    Args:
        normalize: divide the weights by their sum over a token's choices; then times `scale`.
        second_by_chance: keep a second choice with probability 2 * its weight alone (GShard), drawn with this; the
            first keeps its weight.
        counted: choices of a token, the first ones, that count in the loads; None = all.
        mask_T: True for real tokens.
        statistics: whether `mean_E`, `counts_E` and `z` are wanted; otherwise they may hold nothing.
        with_balance: whether `balance` is, over these tokens' own choices; needs `statistics`.
    """
    experts = logits_TE.shape[1]
    if logits_TE.is_cuda and logits_TE.dtype is torch.float32 and k <= MAX_CHOICES and experts <= MAX_EXPERTS:
        keys_T, stream = (second_by_chance.keys_T, second_by_chance.stream) if second_by_chance else (None, None)
        chosen = _choose(
            logits_TE.contiguous(), k, normalize, scale, stream, counted or k, mask_T, keys_T, statistics, with_balance
        )  # fmt: skip
        weights_TK, experts_TK, _, mean_E, counts_E, z, _, loss = chosen
        return Selection(
            experts_TK=experts_TK,
            weights_TK=weights_TK,
            mean_E=mean_E,
            counts_E=counts_E,
            z=z,
            balance=loss if with_balance else None,
        )
    probs_TE = logits_TE.softmax(-1)
    weights_TK, experts_TK = topk(probs_TE, k)
    if normalize:
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
    weights_TK = weights_TK * scale
    counts_E = count_choices(experts_TK[:, :counted], experts, mask_T)
    if second_by_chance is not None:
        drawn_T1 = noise.uniform(second_by_chance.keys_T, 1, second_by_chance.stream)
        dropped_TK = torch.zeros_like(experts_TK, dtype=torch.bool)
        dropped_TK[:, 1:] = 2 * weights_TK[:, 1:].detach() <= drawn_T1
        experts_TK = experts_TK.masked_fill(dropped_TK, -1)
        weights_TK = weights_TK.masked_fill(dropped_TK, 0)
    mean_E = masked_mean(probs_TE, mask_T)
    return Selection(
        experts_TK=experts_TK,
        weights_TK=weights_TK,
        mean_E=mean_E,
        counts_E=counts_E,
        z=masked_mean(torch.logsumexp(logits_TE, dim=-1).square(), mask_T),
        balance=balance(mean_E, counts_E) if with_balance else None,
    )


def balance(mean_E: Tensor, counts_E: Tensor) -> Tensor:
    """E * sum_e f_e P_e: 1 when even (Fedus et al. 2021, equations 4 to 6, over all choices as in GShard's top-2).

    Args:
        mean_E: mean router probabilities; carries the gradient.
        counts_E: int64, choices per expert, of this process or of many.
    """
    if mean_E.is_cuda and mean_E.dtype is torch.float32 and counts_E.dtype is torch.int64:
        return _balance(mean_E.contiguous(), counts_E.contiguous())[0]
    share_E = counts_E.to(mean_E.dtype) / counts_E.sum().clamp(min=1)
    return mean_E.shape[0] * (share_E * mean_E).sum()


def _fake_choose(  # type: ignore[no-untyped-def]
    logits_TE, k, normalize, scale, stream, counted, mask_T, keys_T, statistics, with_balance
):
    tokens, experts = logits_TE.shape
    size = experts if statistics else 0
    return (
        logits_TE.new_empty(tokens, k),
        logits_TE.new_empty(tokens, k, dtype=torch.int64),
        logits_TE.new_empty(0 if stream is None else tokens, k, dtype=torch.int32),
        logits_TE.new_empty(size),
        logits_TE.new_empty(size, dtype=torch.int64),
        logits_TE.new_empty(() if statistics else 0),
        logits_TE.new_empty(int(statistics)),
        logits_TE.new_empty(() if with_balance else 0),
    )


@operator("choose", _fake_choose)
def _choose_operator(
    logits_TE: Tensor,
    k: int,
    normalize: bool,
    scale: float,
    stream: int | None,
    counted: int,
    mask_T: Tensor | None,
    keys_T: Tensor | None,
    statistics: bool,
    with_balance: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See `foundry_moe_kernels.gating.choose`."""
    rule = gating.Rule(normalize=normalize, scale=scale, stream=stream, counted=counted)
    return gating.choose(logits_TE, k, rule, mask_T, keys_T, statistics, with_balance)


@operator("choose_backward", lambda logits_TE, *_: torch.empty_like(logits_TE))
def _choose_backward(
    logits_TE: Tensor,
    normalize: bool,
    scale: float,
    random: bool,
    mask_T: Tensor | None,
    experts_TK: Tensor,
    wanted_TK: Tensor,
    counts_E: Tensor,
    number: Tensor,
    dweights_TK: Tensor,
    dmean_E: Tensor | None,
    dz: Tensor | None,
    dloss: Tensor | None,
) -> Tensor:
    rule = gating.Rule(normalize=normalize, scale=scale, stream=0 if random else None)
    return gating.choose_backward(
        logits_TE, rule, mask_T, experts_TK, wanted_TK, counts_E, number, dweights_TK, dmean_E, dz, dloss
    )  # fmt: skip


def _save_choose(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits_TE, _, normalize, scale, stream, _, mask_T, *_ = inputs
    _, experts_TK, wanted_TK, _, counts_E, _, number, _ = output
    ctx.rule = (normalize, scale, stream is not None)
    ctx.set_materialize_grads(False)  # zeros for each unused output would be a launch each
    ctx.mark_non_differentiable(experts_TK, wanted_TK, counts_E, number)
    ctx.save_for_backward(logits_TE, mask_T, experts_TK, wanted_TK, counts_E, number)


def _choose_gradient(ctx: Any, dweights_TK: Tensor | None, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    logits_TE, mask_T, *chosen = ctx.saved_tensors
    if dweights_TK is None:
        dweights_TK = torch.zeros_like(chosen[0], dtype=logits_TE.dtype)
    _, _, dmean_E, _, dz, _, dloss = grads
    dlogits_TE = _choose_backward(logits_TE, *ctx.rule, mask_T, *chosen, dweights_TK, dmean_E, dz, dloss)
    return dlogits_TE, *[None] * 9


_choose = differentiable(_choose_operator, _save_choose, _choose_gradient)


@operator("balance", lambda mean_E, counts_E: (mean_E.new_empty(()), torch.empty_like(mean_E)))
def _balance_operator(mean_E: Tensor, counts_E: Tensor) -> tuple[Tensor, Tensor]:
    """See `foundry_moe_kernels.gating.balance`."""
    return gating.balance(mean_E, counts_E)


def _save_balance(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(output[1])


_balance = differentiable(
    _balance_operator,
    _save_balance,
    lambda ctx, dloss, _: (None if dloss is None else dloss * ctx.saved_tensors[0], None),
)  # fmt: skip
