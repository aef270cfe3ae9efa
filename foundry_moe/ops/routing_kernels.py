"""The ragged permutation on Triton kernels, as custom operators with gradients: what `routes` uses on CUDA.

Shapes: T tokens, K choices, R rows, E experts, D model width.
"""

from __future__ import annotations

from typing import Any

import torch
from foundry_moe_kernels import permutation, routing
from torch import Tensor

from foundry_moe.ops.operators import differentiable, operator

_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def is_available(tensor: Tensor) -> bool:
    """Whether the kernels take this tensor: integers or floats on CUDA."""
    return tensor.is_cuda and (tensor.dtype in _FLOATS or not tensor.is_floating_point())


def _fake_plan(experts_TK, num_experts):  # type: ignore[no-untyped-def]
    def new(*shape):  # type: ignore[no-untyped-def]
        return experts_TK.new_empty(shape, dtype=torch.int32)

    return (
        new(*experts_TK.shape),
        new(num_experts),
        new(num_experts),
        new(experts_TK.numel()),
        new(*experts_TK.shape),
    )


@operator("plan", _fake_plan)
def plan(experts_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """experts_TK, tokens_per_expert_E, offsets_E, source_R, row_TK: see `foundry_moe_kernels.routing.plan`."""
    return routing.plan(experts_TK.contiguous(), num_experts)


@operator("permute", lambda x_TD, row_TK, offsets_E, rows: x_TD.new_empty(rows, x_TD.shape[1]))
def _permute(x_TD: Tensor, row_TK: Tensor, offsets_E: Tensor, rows: int) -> Tensor:
    """x_RD, zeros past the end."""
    return permutation.permute(x_TD.contiguous(), row_TK.contiguous(), offsets_E, rows)


@operator("combine", lambda y_RD, weights_TK, row_TK, offsets_E: y_RD.new_empty(row_TK.shape[0], y_RD.shape[1]))
def _combine(y_RD: Tensor, weights_TK: Tensor | None, row_TK: Tensor, offsets_E: Tensor) -> Tensor:
    """y_TD, summed in fp32."""
    return permutation.combine(y_RD.contiguous(), weights_TK, row_TK.contiguous())


@operator(
    "combine_backward",
    lambda dy_TD, y_RD, weights_TK, *_: (y_RD.new_empty(y_RD.shape), weights_TK.new_empty(weights_TK.shape)),
)
def _combine_backward(
    dy_TD: Tensor, y_RD: Tensor, weights_TK: Tensor, row_TK: Tensor, offsets_E: Tensor
) -> tuple[Tensor, Tensor]:
    """dy_RD, dweights_TK."""
    return permutation.combine_backward(dy_TD, y_RD, weights_TK, row_TK.contiguous(), offsets_E)


def _save_permute(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[1:3])


def _permute_gradient(ctx: Any, dx_RD: Tensor) -> tuple[Tensor | None, ...]:
    row_TK, offsets_E = ctx.saved_tensors
    return combine(dx_RD, None, row_TK, offsets_E), None, None, None


def _save_combine(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    y_RD, weights_TK, row_TK, offsets_E = inputs
    ctx.rows = y_RD.shape[0]
    ctx.save_for_backward(y_RD if weights_TK is not None else None, weights_TK, row_TK, offsets_E)


def _combine_gradient(ctx: Any, dy_TD: Tensor) -> tuple[Tensor | None, ...]:
    y_RD, weights_TK, row_TK, offsets_E = ctx.saved_tensors
    if weights_TK is None:
        return permute(dy_TD, row_TK, offsets_E, ctx.rows), None, None, None
    return (*_combine_backward(dy_TD, y_RD, weights_TK, row_TK, offsets_E), None, None)


permute = differentiable(_permute, _save_permute, _permute_gradient)
combine = differentiable(_combine, _save_combine, _combine_gradient)
