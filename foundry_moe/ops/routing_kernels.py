"""The ragged permutation on Triton kernels, as custom operators with gradients: what `routes` uses on CUDA.

Shapes: T tokens, K choices, R rows, E experts, D model width.
"""

from __future__ import annotations

from typing import Any

import torch
from foundry_moe_kernels import permutation, routing
from foundry_moe_kernels import topk as topk_kernel
from torch import Tensor

_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def is_available(tensor: Tensor) -> bool:
    """Whether the kernels take this tensor: integers or floats on CUDA."""
    return tensor.is_cuda and (tensor.dtype in _FLOATS or not tensor.is_floating_point())


@torch.library.custom_op("foundry_moe::plan", mutates_args=())
def plan_operator(experts_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """experts_TK, tokens_per_expert_E, offsets_E, source_R, row_TK: see `foundry_moe_kernels.routing.plan`."""
    return routing.plan(experts_TK.contiguous(), num_experts)


@plan_operator.register_fake
def _(experts_TK, num_experts):  # type: ignore[no-untyped-def]
    def new(*shape):  # type: ignore[no-untyped-def]
        return experts_TK.new_empty(shape, dtype=torch.int32)

    return (
        new(*experts_TK.shape),
        new(num_experts),
        new(num_experts),
        new(experts_TK.numel()),
        new(*experts_TK.shape),
    )


def plan(experts_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The operator where `torch.compile` traces, otherwise the kernels at once, which is less work for the host."""
    if torch.compiler.is_compiling():
        return plan_operator(experts_TK, num_experts)
    return routing.plan(experts_TK.contiguous(), num_experts)


@torch.library.custom_op("foundry_moe::permute", mutates_args=())
def permute(x_TD: Tensor, row_TK: Tensor, offsets_E: Tensor, rows: int) -> Tensor:
    """x_RD, zeros past the end."""
    return permutation.permute(x_TD.contiguous(), row_TK.contiguous(), offsets_E, rows)


@permute.register_fake
def _(x_TD, row_TK, offsets_E, rows):  # type: ignore[no-untyped-def]
    return x_TD.new_empty(rows, x_TD.shape[1])


@torch.library.custom_op("foundry_moe::combine", mutates_args=())
def combine(y_RD: Tensor, weights_TK: Tensor | None, row_TK: Tensor, offsets_E: Tensor) -> Tensor:
    """y_TD, summed in fp32."""
    return permutation.combine(y_RD.contiguous(), weights_TK, row_TK.contiguous())


@combine.register_fake
def _(y_RD, weights_TK, row_TK, offsets_E):  # type: ignore[no-untyped-def]
    return y_RD.new_empty(row_TK.shape[0], y_RD.shape[1])


@torch.library.custom_op("foundry_moe::combine_backward", mutates_args=())
def combine_backward(
    dy_TD: Tensor, y_RD: Tensor, weights_TK: Tensor, row_TK: Tensor, offsets_E: Tensor
) -> tuple[Tensor, Tensor]:
    """dy_RD, dweights_TK."""
    return permutation.combine_backward(dy_TD, y_RD, weights_TK, row_TK.contiguous(), offsets_E)


@combine_backward.register_fake
def _(dy_TD, y_RD, weights_TK, row_TK, offsets_E):  # type: ignore[no-untyped-def]
    return y_RD.new_empty(y_RD.shape), weights_TK.new_empty(weights_TK.shape)


def _save_permute(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, row_TK, offsets_E, _ = inputs
    ctx.save_for_backward(row_TK, offsets_E)


def _permute_backward(ctx: Any, dx_RD: Tensor) -> tuple[Tensor | None, ...]:
    row_TK, offsets_E = ctx.saved_tensors
    return combine(dx_RD, None, row_TK, offsets_E), None, None, None


permute.register_autograd(_permute_backward, setup_context=_save_permute)


def _save_combine(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    y_RD, weights_TK, row_TK, offsets_E = inputs
    ctx.rows = y_RD.shape[0]
    ctx.save_for_backward(y_RD if weights_TK is not None else None, weights_TK, row_TK, offsets_E)


def _combine_backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor | None, ...]:
    y_RD, weights_TK, row_TK, offsets_E = ctx.saved_tensors
    if weights_TK is None:
        return permute(dy_TD, row_TK, offsets_E, ctx.rows), None, None, None
    return (*combine_backward(dy_TD, y_RD, weights_TK, row_TK, offsets_E), None, None)


combine.register_autograd(_combine_backward, setup_context=_save_combine)


@torch.library.custom_op("foundry_moe::topk_softmax", mutates_args=())
def topk_operator(logits_TE: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """(weights_TK fp32, experts_TK int64): the k largest logits of each token and the softmax over those k."""
    return topk_kernel.topk(logits_TE.contiguous(), k, softmax="chosen")


@topk_operator.register_fake
def _(logits_TE, k):  # type: ignore[no-untyped-def]
    shape = (logits_TE.shape[0], k)
    return logits_TE.new_empty(shape, dtype=torch.float32), logits_TE.new_empty(shape, dtype=torch.int64)


def _save_topk(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    logits_TE, _ = inputs
    weights_TK, experts_TK = output
    ctx.like = (logits_TE.shape, logits_TE.dtype)
    ctx.mark_non_differentiable(experts_TK)
    ctx.save_for_backward(weights_TK, experts_TK)


def _topk_backward(ctx: Any, dweights_TK: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    weights_TK, experts_TK = ctx.saved_tensors
    shape, dtype = ctx.like
    weighted_TK = weights_TK * dweights_TK
    chosen_TK = weighted_TK - weights_TK * weighted_TK.sum(-1, keepdim=True)
    return dweights_TK.new_zeros(shape, dtype=dtype).scatter(1, experts_TK, chosen_TK.to(dtype)), None


topk_operator.register_autograd(_topk_backward, setup_context=_save_topk)


class _TopK(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TE: Tensor, k: int) -> tuple[Tensor, Tensor]:
        output = topk_kernel.topk(logits_TE.contiguous(), k, softmax="chosen")
        _save_topk(ctx, (logits_TE, k), output)
        return output

    backward = staticmethod(_topk_backward)


def topk_softmax(logits_TE: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """(weights_TK fp32, experts_TK int64): the k largest logits of each token and the softmax over those k."""
    if torch.compiler.is_compiling():
        return topk_operator(logits_TE, k)
    return _TopK.apply(logits_TE, k)
