"""From a softmax gate's logits to choices, combine weights, and the sums of the balance and z losses.

One kernel forward and one backward for fp32 logits on CUDA, a chain of torch operations elsewhere.

Shapes: T tokens, E experts, K choices.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from foundry_moe_kernels import softmax_topk as kernels
from foundry_moe_kernels.softmax_topk import Chosen, Gradients, Rule
from torch import Tensor

from foundry_moe.ops import noise
from foundry_moe.ops.operators import on_gpu, operator, twins
from foundry_moe.ops.select_topk import MAX_CHOICES, MAX_EXPERTS, count_choices, take_chosen, topk

_TINY = 1e-20  # the least divisor of weights: a token may have no replayed expert


class Selection(NamedTuple):
    """The results of `softmax_topk`.

    experts_TK: int64, -1 where a choice was dropped.
    weights_TK: combine weights.
    mean_E: mean softmax over the real tokens.
    counts_E: int64, without gradient: counted choices of the real tokens.
    z: mean of logsumexp squared over the real tokens.
    balance: `balance` of mean_E and counts_E, if requested.
    """

    experts_TK: Tensor
    weights_TK: Tensor
    mean_E: Tensor
    counts_E: Tensor
    z: Tensor
    balance: Tensor | None = None


def softmax_topk(
    logits_TE: Tensor,
    k: int,
    *,
    normalize: bool = False,
    scale: float = 1.0,
    second_by_chance: tuple[Tensor, int] | None = None,
    counted: int | None = None,
    mask_T: Tensor | None = None,
    statistics: bool = True,
    with_balance: bool = False,
    replayed_TK: Tensor | None = None,
) -> Selection:
    """The k most probable experts of each token, largest first, ties towards the lower expert.

    Differentiable in the logits, through weights, `mean_E`, `z` and `balance`.

    Args:
        normalize: divide the weights by their sum over a token's choices; then times `scale`.
        second_by_chance: keep a second choice only with probability 2 * its weight (GShard); the first choice keeps
            its weight. Keys of the tokens and a stream, as `foundry_moe.ops.noise` has them.
        counted: choices of a token, the first ones, that count in the loads; None = all.
        mask_T: True for real tokens.
        statistics: whether `mean_E`, `counts_E` and `z` are computed; otherwise they may be empty.
        with_balance: whether `balance` is, over these tokens' own choices; needs `statistics`.
        replayed_TK: int64, experts to weigh in place of the most probable ones; -1 = none, which has no weight. With
            `counted`, a second choice of -1 was dropped by chance: the first choice's weight is still divided by the
            sum with the best of the others.
    """
    keys_T, stream = second_by_chance or (None, None)
    rule = Rule(k, normalize, scale, stream, counted or k, statistics, with_balance)
    if replayed_TK is None:
        weights_TK, experts_TK, _, mean_E, counts_E, z, _, loss = _softmax_topk(logits_TE, rule, mask_T, keys_T)
    else:
        weights_TK, experts_TK, _, mean_E, counts_E, z, _, loss = _plain(logits_TE, rule, mask_T, keys_T, replayed_TK)
    return Selection(experts_TK, weights_TK, mean_E, counts_E, z, loss if with_balance else None)


def masked_sum(values_T: Tensor, mask_T: Tensor | None) -> Tensor:
    """The sum over real tokens along the first dimension; `mask_T` is True for these, None = all are real."""
    if mask_T is None:
        return values_T.sum(0)
    mask = mask_T.reshape(-1, *[1] * (values_T.dim() - 1))
    return values_T.masked_fill(~mask, 0).sum(0)


def masked_mean(values_T: Tensor, mask_T: Tensor | None) -> Tensor:
    """The mean over real tokens along the first dimension; zero where there is none."""
    total = masked_sum(values_T, mask_T)
    if mask_T is None:
        return total / max(values_T.shape[0], 1)
    return total / mask_T.sum().clamp(min=1)


def z_loss(logits_TE: Tensor, mask_T: Tensor | None = None) -> Tensor:
    """The mean of logsumexp(logits)^2 (Zoph et al. 2022, ST-MoE, equation 5)."""
    return masked_mean(torch.logsumexp(logits_TE, dim=-1).square(), mask_T)


def balance(mean_E: Tensor, counts_E: Tensor) -> Tensor:
    """E * sum_e f_e P_e: 1 when even (Fedus et al. 2021, equations 4 to 6, over all choices as in GShard's top-2).

    Args:
        mean_E: mean gate probabilities; carries the gradient.
        counts_E: int64, choices per expert, of this process or of many.
    """
    return _balance(mean_E, counts_E)[0]


def _plain(
    logits_TE: Tensor, rule: Rule, mask_T: Tensor | None, keys_T: Tensor | None, replayed_TK: Tensor | None = None
) -> tuple[Tensor, Tensor, None, Tensor, Tensor, Tensor, None, Tensor | None]:
    """The plain twin of the kernel, without the results that its gradient needs."""
    probs_TE = logits_TE.softmax(-1)
    if replayed_TK is None:
        weights_TK, experts_TK = topk(probs_TE, rule.k)
    else:
        experts_TK = replayed_TK
        if rule.counted < rule.k:
            others_TE = probs_TE.detach().scatter(1, experts_TK[:, :1].clamp(min=0), -1)
            experts_TK = torch.where(experts_TK < 0, topk(others_TE, 1)[1], experts_TK)
        weights_TK = take_chosen(probs_TE, experts_TK)
    if rule.normalize:
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True).clamp(min=_TINY)
    weights_TK = weights_TK * rule.scale
    counted_TK = experts_TK if replayed_TK is None else replayed_TK
    counts_E = count_choices(counted_TK[:, : rule.counted], logits_TE.shape[1], mask_T)
    if replayed_TK is not None:
        experts_TK, weights_TK = replayed_TK, weights_TK.masked_fill(replayed_TK < 0, 0)
    elif rule.stream is not None and keys_T is not None:
        drawn_T1 = noise.uniform(keys_T, 1, rule.stream)
        dropped_TK = torch.zeros_like(experts_TK, dtype=torch.bool)
        dropped_TK[:, 1:] = 2 * weights_TK[:, 1:].detach() <= drawn_T1
        experts_TK = experts_TK.masked_fill(dropped_TK, -1)
        weights_TK = weights_TK.masked_fill(dropped_TK, 0)
    mean_E = masked_mean(probs_TE, mask_T)
    z = z_loss(logits_TE, mask_T)
    loss = balance(mean_E, counts_E) if rule.with_balance else None
    return weights_TK, experts_TK, None, mean_E, counts_E, z, None, loss


def _balance_plain(mean_E: Tensor, counts_E: Tensor) -> tuple[Tensor, None]:
    share_E = counts_E.to(mean_E.dtype) / counts_E.sum().clamp(min=1)
    return mean_E.shape[0] * (share_E * mean_E).sum(), None


_triton_backward = operator(
    "softmax_topk_backward",
    lambda logits_TE, *_: torch.empty_like(logits_TE, memory_format=torch.contiguous_format),
)(kernels.softmax_topk_backward)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits_TE, ctx.rule, mask_T, _ = inputs
    _, experts_TK, wanted_TK, _, counts_E, _, number, _ = output
    ctx.set_materialize_grads(False)  # zeros for each unused output would be a launch each
    ctx.mark_non_differentiable(experts_TK, wanted_TK, counts_E, number)
    ctx.save_for_backward(logits_TE, mask_T, experts_TK, wanted_TK, counts_E, number)


def _gradient(ctx: Any, dweights_TK: Tensor | None, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    logits_TE, mask_T, *saved = ctx.saved_tensors
    chosen = Chosen(*saved)
    if dweights_TK is None:
        dweights_TK = torch.zeros_like(chosen.experts_TK, dtype=logits_TE.dtype)
    _, _, dmean_E, _, dz, _, dloss = grads
    dlogits_TE = _triton_backward(logits_TE, ctx.rule, mask_T, chosen, Gradients(dweights_TK, dmean_E, dz, dloss))
    return dlogits_TE, None, None, None


def _takes(logits_TE: Tensor, rule: Rule, *_: Any) -> bool:
    return on_gpu(torch.float32)(logits_TE) and rule.k <= MAX_CHOICES and logits_TE.shape[1] <= MAX_EXPERTS


_softmax_topk = twins(
    "softmax_topk",
    triton=kernels.softmax_topk,
    plain=_plain,
    fake=kernels.new_results,
    takes=_takes,
    save=_save,
    backward=_gradient,
)


def _save_balance(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(output[1])


_balance = twins(
    "balance",
    triton=kernels.balance,
    plain=_balance_plain,
    fake=lambda mean_E, counts_E: (mean_E.new_empty(()), torch.empty_like(mean_E)),
    takes=lambda mean_E, counts_E: on_gpu(torch.float32)(mean_E) and counts_E.dtype is torch.int64,
    save=_save_balance,
    backward=lambda ctx, dloss, _: (None if dloss is None else dloss * ctx.saved_tensors[0], None),
)
