"""The k largest scores on a Triton kernel, as a custom operator with a gradient: what `topk` uses on CUDA.

Shapes: T tokens, E experts, K choices.
"""

from __future__ import annotations

from typing import Any

import torch
from foundry_moe_kernels import topk as kernel
from torch import Tensor

_MAX_CHOICES = 32  # the kernel takes one maximum a choice: beyond, sorting all scores is the faster way


def is_available(scores: Tensor, k: int) -> bool:
    """Whether the kernel takes these scores: fp32 on CUDA, and few choices."""
    return scores.is_cuda and scores.dtype is torch.float32 and k <= _MAX_CHOICES and scores.shape[-1] <= (
        kernel.MAX_EXPERTS
    )  # fmt: skip


@torch.library.custom_op("foundry_moe::topk_scores", mutates_args=())
def topk_scores(scores_TE: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Scores and experts (int64), largest first, ties towards the lower expert."""
    return kernel.topk(scores_TE.contiguous(), k)


@topk_scores.register_fake
def _(scores_TE, k):  # type: ignore[no-untyped-def]
    shape = (scores_TE.shape[0], k)
    return scores_TE.new_empty(shape), scores_TE.new_empty(shape, dtype=torch.int64)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.num_experts = inputs[0].shape[1]
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(output[1])


def _backward(ctx: Any, dscores_TK: Tensor, _: Tensor | None) -> tuple[Tensor, None]:
    (experts_TK,) = ctx.saved_tensors
    dscores_TE = dscores_TK.new_zeros(dscores_TK.shape[0], ctx.num_experts)
    return dscores_TE.scatter(1, experts_TK, dscores_TK), None


topk_scores.register_autograd(_backward, setup_context=_save)
