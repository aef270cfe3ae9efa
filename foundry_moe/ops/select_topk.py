"""The k largest scores of each token, ties towards the lower expert on every device, and choices per expert.

Nothing here reads the device.

Shapes: T tokens, E experts, K choices, N rows of C columns.
"""

from __future__ import annotations

from typing import Any

import torch
from foundry_moe_kernels import permute_plan
from foundry_moe_kernels import select_topk as kernels
from torch import Tensor

from foundry_moe.ops.operators import on_gpu, operator, twins

MAX_EXPERTS = kernels.MAX_EXPERTS
MAX_CHOICES = 32  # the choosing kernels take one maximum per choice: beyond, sorting all scores is the faster way


def topk(scores_TE: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest scores, largest first, and their experts (int64): two tensors [..., K].

    `torch.topk` leaves the order of ties open; a stable sort, or the kernel, does not. Differentiable in the scores.

    Args:
        scores_TE: [..., E].
    """
    shape = scores_TE.shape[:-1]
    values_TK, experts_TK = _topk(scores_TE.reshape(-1, scores_TE.shape[-1]), k)
    return values_TK.view(*shape, k), experts_TK.view(*shape, k)


def take_chosen(scores_TE: Tensor, experts_TK: Tensor) -> Tensor:
    """The scores of given experts [T, K]; 0 for -1. Differentiable in the scores."""
    return scores_TE.gather(1, experts_TK.clamp(min=0)).masked_fill(experts_TK < 0, 0)


def keep_largest(scores_NC: Tensor, number: int | Tensor) -> Tensor:
    """The same scores with -1 for all but the `number` largest of each row; among equals the first columns stay.

    Args:
        scores_NC: without gradient; below zero = never kept. NaN is above all others, so that it is not hidden.
        number: for all rows; a tensor where the host does not know it.
    """
    return _keep_largest(scores_NC, *(None, number) if isinstance(number, int) else (number, 0))


def count_choices(experts_TK: Tensor, num_experts: int, mask_T: Tensor | None = None) -> Tensor:
    """Choices per expert, int64 [E]: those of -1, and of tokens that `mask_T` (True = real) leaves out, not counted."""
    return _count_choices(experts_TK, num_experts, mask_T)


def _takes(scores_TE: Tensor, *_: Any) -> bool:
    return on_gpu(torch.float32)(scores_TE) and scores_TE.shape[-1] <= MAX_EXPERTS


def _fake(scores_TE: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    shape = (scores_TE.shape[0], columns)
    return scores_TE.new_empty(shape), scores_TE.new_empty(shape, dtype=torch.int64)


def _topk_plain(scores_TE: Tensor, k: int) -> tuple[Tensor, Tensor]:
    sorted_TE, experts_TE = torch.sort(scores_TE, dim=-1, descending=True, stable=True)
    return sorted_TE[:, :k], experts_TE[:, :k]


def _pack_triton(probs_TE: Tensor, ranked_TE: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Each token's choices by falling weight: weights [T, K], zero where a token has fewer, and experts, -1 there.

    Differentiable in `probs_TE`.

    Args:
        probs_TE: weights of all experts.
        ranked_TE: the same without gradient, below zero where an expert is not chosen.
        columns: K, no less than the choices of any token.
    """
    return kernels.ranked(ranked_TE, columns, absent_below_zero=True)


def _pack_plain(probs_TE: Tensor, ranked_TE: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    values_TK, experts_TK = _topk_plain(ranked_TE, columns)
    absent_TK = values_TK < 0
    weights_TK = probs_TE.gather(1, experts_TK).masked_fill(absent_TK, 0)
    return weights_TK, experts_TK.masked_fill(absent_TK, -1)


_spread = operator("spread", lambda values_TK, experts_TK, experts: values_TK.new_empty(values_TK.shape[0], experts))(
    kernels.spread
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.num_experts, ctx.extra = inputs[0].shape[1], len(inputs) - 1
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(output[1])


def _backward(ctx: Any, dvalues_TK: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if dvalues_TK is None:
        return (None,) * (1 + ctx.extra)
    (experts_TK,) = ctx.saved_tensors
    return _spread(dvalues_TK, experts_TK, ctx.num_experts), *[None] * ctx.extra


_topk = twins("topk", triton=kernels.topk, plain=_topk_plain, fake=_fake, takes=_takes, save=_save, backward=_backward)
pack = twins(
    "pack",
    triton=_pack_triton,
    plain=_pack_plain,
    fake=lambda probs_TE, ranked_TE, columns: _fake(probs_TE, columns),
    takes=_takes,
    save=_save,
    backward=_backward,
)


def _keep_triton(scores_NC: Tensor, number_1: Tensor | None, number: int) -> Tensor:
    return kernels.keep_largest(scores_NC.contiguous(), number if number_1 is None else number_1)


def _keep_plain(scores_NC: Tensor, number_1: Tensor | None, number: int) -> Tensor:
    order_NC = torch.sort(scores_NC, dim=-1, descending=True, stable=True)[1]
    position_C = torch.arange(scores_NC.shape[1], device=scores_NC.device)
    kept_NC = torch.zeros_like(scores_NC, dtype=torch.bool)
    kept_NC.scatter_(1, order_NC, (position_C < (number if number_1 is None else number_1)).expand_as(order_NC))
    return torch.where(kept_NC & ~(scores_NC < 0), scores_NC, -1)


_keep_largest = twins(
    "keep_largest",
    triton=_keep_triton,
    plain=_keep_plain,
    fake=lambda scores_NC, number_1, number: scores_NC.new_empty(scores_NC.shape),
    takes=on_gpu(torch.float32),
)


def _count_plain(experts_TK: Tensor, num_experts: int, mask_T: Tensor | None) -> Tensor:
    counted_TK = experts_TK >= 0
    if mask_T is not None:
        counted_TK = counted_TK & mask_T[:, None]
    bins_A = torch.where(counted_TK, experts_TK, num_experts).reshape(-1).long()
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=experts_TK.device)
    return counts.scatter_add(0, bins_A, torch.ones_like(bins_A))[:num_experts]


_count_choices = twins(
    "count_choices",
    triton=permute_plan.count_choices,
    plain=_count_plain,
    fake=lambda experts_TK, num_experts, mask_T: experts_TK.new_empty(num_experts, dtype=torch.int64),
)
