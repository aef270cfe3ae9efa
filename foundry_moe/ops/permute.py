"""Permute and unpermute: tokens to rows sorted by expert, and back.

Every shape is known on the host, so planning needs no synchronisation with the device.

Shapes: T tokens, K choices per token at most, A = T * K assignments, R = A rows at most, E experts, D model width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from foundry_moe_kernels import permute as kernels
from foundry_moe_kernels import permute_plan as plan_kernels
from torch import Tensor

from foundry_moe.ops.operators import is_traced, on_gpu, refuse_second_derivatives, twins

_on_kernels = on_gpu(torch.float32, torch.float16, torch.bfloat16, torch.float64)


@dataclass(frozen=True, kw_only=True)
class PermutePlan:
    """Rows sorted by expert, then by assignment (token-major). Rows past `offsets_E[-1]` are unused.

    experts_TK: int32, the expert of each choice; -1 where a token has no such choice.
    tokens_per_expert_E: int32.
    offsets_E: int32, the row after the last one of each expert (inclusive cumulative sum).
    source_R: int32, the assignment t * K + k of each row; -1 past the end.
    row_TK: int32, the row of each assignment; -1 where there is none.
    """

    experts_TK: Tensor
    tokens_per_expert_E: Tensor
    offsets_E: Tensor
    source_R: Tensor
    row_TK: Tensor

    @property
    def num_experts(self) -> int:
        return self.tokens_per_expert_E.shape[0]

    @property
    def num_rows(self) -> int:
        """R: rows allocated, used or not."""
        return self.source_R.shape[0]


def plan_permute(experts_TK: Tensor, num_experts: int, rows: int | None = None) -> PermutePlan:
    """Sorts assignments by expert, stably.

    Args:
        experts_TK: integers in [-1, num_experts); -1 = not a choice. A 1-D tensor is taken as K = 1.
        num_experts: E.
        rows: choices in all, or more, if known on the host; None = T * K.

    Raises:
        ValueError: `experts_TK` is not an integer tensor of one or two dimensions, or on a CPU has an index too high.
    """
    if experts_TK.dim() == 1:
        experts_TK = experts_TK[:, None]
    if experts_TK.dim() != 2 or experts_TK.is_floating_point():
        raise ValueError(
            f"experts_TK must be integers of shape [tokens, choices], not {experts_TK.dtype} {tuple(experts_TK.shape)}"
        )
    experts_TK, loads_E, offsets_E, source_R, row_TK = _plan(experts_TK, num_experts)
    return PermutePlan(
        experts_TK=experts_TK,
        tokens_per_expert_E=loads_E,
        offsets_E=offsets_E,
        source_R=source_R[:rows],
        row_TK=row_TK,
    )


def permute(x_TD: Tensor, plan: PermutePlan) -> Tensor:
    """Copies each token to the rows of its choices: x_RD [R, D], zeros past the end.

    Differentiable in `x_TD`, on a GPU once. Raises ValueError if the plan is for another number of tokens.
    """
    check_planned("x_TD", x_TD, plan.row_TK.shape[0], None, plan)
    return _Permute.apply(x_TD, plan.source_R, plan.row_TK, plan.offsets_E)


def unpermute(y_RD: Tensor, weights_TK: Tensor | None, plan: PermutePlan) -> Tensor:
    """Sums each token's rows, weighted: y_TD [T, D] in `y_RD`'s dtype, accumulated in fp32 or better.

    A token without choices gets zeros. None weighs all rows by one. Differentiable in `y_RD` and `weights_TK`, on a GPU
    once.

    Raises:
        ValueError: the plan is for another number of rows, or of choices.
    """
    check_planned("y_RD", y_RD, plan.num_rows, weights_TK, plan)
    return _Unpermute.apply(y_RD, weights_TK, plan.source_R, plan.row_TK, plan.offsets_E)


def check_planned(name: str, x_ND: Tensor, number: int, weights_TK: Tensor | None, plan: PermutePlan) -> None:
    """Raises ValueError unless `x_ND` has `number` rows, and each choice of the plan a weight."""
    planned = tuple(plan.row_TK.shape)
    if x_ND.dim() != 2 or x_ND.shape[0] != number:
        raise ValueError(
            f"{name} {tuple(x_ND.shape)} must be [{number}, D]: the plan is for {planned[0]} tokens and "
            f"{plan.num_rows} rows"
        )
    if weights_TK is not None and weights_TK.shape != planned:
        raise ValueError(f"weights_TK {tuple(weights_TK.shape)} must be {planned}, as the plan's choices are")


def _plan_plain(experts_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """experts_TK, tokens_per_expert_E, offsets_E, source_R, row_TK, all int32."""
    expert_A = experts_TK.reshape(-1).int()
    if expert_A.is_cpu and not is_traced(expert_A) and (expert_A >= num_experts).any():
        raise ValueError(f"experts_TK has expert {int(expert_A.max())}, and num_experts is {num_experts}")
    present_A = expert_A >= 0
    key_A = torch.where(present_A, expert_A, num_experts)
    sorted_A, source_A = torch.sort(key_A, stable=True)
    bounds_E1 = torch.searchsorted(
        sorted_A, torch.arange(num_experts + 1, device=key_A.device, dtype=key_A.dtype), out_int32=True
    )
    row_of_A = torch.empty_like(source_A, dtype=torch.int32)
    row_of_A[source_A] = torch.arange(source_A.shape[0], device=key_A.device, dtype=torch.int32)
    return (
        experts_TK.int(),
        bounds_E1.diff(),
        bounds_E1[1:].contiguous(),
        torch.where(sorted_A < num_experts, source_A, -1).int(),
        torch.where(present_A, row_of_A, -1).view_as(experts_TK),
    )


_plan = twins("plan_permute", triton=plan_kernels.plan_permute, plain=_plan_plain, fake=plan_kernels.new_results)


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """`Tensor.to` that gives the tensor itself where there is nothing to do, without a node of its own.

    torch.compile (2.11) gives a wrong gradient to an autograd function that returns an alias of what it computed: the
    result of a `to` that does nothing, or of an in-place operation.
    """
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def gather_tokens(x_TD: Tensor, source_R: Tensor, choices: int) -> Tensor:
    """x_RD: the token of each row; zeros where `source_R` is -1. In plain torch, without gradient."""
    if x_TD.shape[0] == 0:
        return x_TD.new_zeros(source_R.shape[0], x_TD.shape[1])
    token_R = torch.div(source_R.clamp(min=0), choices, rounding_mode="floor")
    return x_TD.index_select(0, token_R).masked_fill((source_R < 0)[:, None], 0)


def sum_choices(y_RD: Tensor, weights_TK: Tensor | None, row_TK: Tensor) -> Tensor:
    """y_TD: the weighted sum of each token's rows, -1 = none. In plain torch, without gradient."""
    tokens, choices = row_TK.shape
    y_TD = y_RD.new_zeros(tokens, y_RD.shape[1], dtype=_accumulator(y_RD.dtype))
    if y_RD.shape[0] == 0:
        return cast(y_TD, y_RD.dtype)
    for k in range(choices):
        row_T = row_TK[:, k]
        y_k_TD = y_RD.index_select(0, row_T.clamp(min=0)).to(y_TD.dtype)
        if weights_TK is not None:
            y_k_TD = y_k_TD * weights_TK[:, k, None].to(y_TD.dtype)
        y_TD = y_TD + y_k_TD.masked_fill((row_T < 0)[:, None], 0)
    return cast(y_TD, y_RD.dtype)


class _Permute(torch.autograd.Function):
    """Gather whose backward gathers too: no atomics, the same bits on every run."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, *plan: Tensor) -> Tensor:
        ctx.save_for_backward(*plan)
        return _gather(x_TD, *plan)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if _on_kernels(grads[0]):
            refuse_second_derivatives(grads[0])
        return _sum(grads[0], None, *ctx.saved_tensors), None, None, None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_RD: Tensor, weights_TK: Tensor | None, *plan: Tensor) -> Tensor:
        # without weights the backward pass needs no outputs
        ctx.save_for_backward(y_RD if weights_TK is not None else None, weights_TK, *plan)
        return _sum(y_RD, weights_TK, *plan)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if _on_kernels(grads[0]):
            refuse_second_derivatives(grads[0])
        y_RD, weights_TK, *plan = ctx.saved_tensors
        if weights_TK is None:
            return _gather(grads[0], *plan), None, None, None, None
        return *_gradients(grads[0], y_RD, weights_TK, *plan), None, None, None


def _gather_triton(x_TD: Tensor, source_R: Tensor, row_TK: Tensor, offsets_E: Tensor) -> Tensor:
    """x_RD, zeros past the end."""
    return kernels.permute(x_TD.contiguous(), row_TK.contiguous(), offsets_E, source_R.shape[0])


def _sum_triton(y_RD: Tensor, weights_TK: Tensor | None, source_R: Tensor, row_TK: Tensor, offsets_E: Tensor) -> Tensor:
    """y_TD, summed in fp32."""
    return kernels.unpermute(y_RD.contiguous(), weights_TK, row_TK.contiguous())


def _gradients_triton(
    dy_TD: Tensor, y_RD: Tensor, weights_TK: Tensor, source_R: Tensor, row_TK: Tensor, offsets_E: Tensor
) -> tuple[Tensor, Tensor]:
    """dy_RD, dweights_TK."""
    return kernels.unpermute_backward(dy_TD, y_RD, weights_TK, row_TK.contiguous(), offsets_E)


def _gradients_plain(
    dy_TD: Tensor, y_RD: Tensor, weights_TK: Tensor, source_R: Tensor, row_TK: Tensor, offsets_E: Tensor
) -> tuple[Tensor, Tensor]:
    dy_RD = gather_tokens(dy_TD, source_R, row_TK.shape[1])
    dot_R = (y_RD.to(_accumulator(y_RD.dtype)) * dy_RD).sum(-1)
    if dot_R.shape[0] == 0 or weights_TK.shape[0] == 0:
        return dy_RD.to(y_RD.dtype), torch.zeros_like(weights_TK)
    dweights_TK = dot_R[row_TK.clamp(min=0).long()].masked_fill(row_TK < 0, 0).to(weights_TK.dtype)
    weight_R = weights_TK.reshape(-1)[source_R.clamp(min=0).long()]
    return (dy_RD * weight_R[:, None]).to(y_RD.dtype), dweights_TK


_gather = twins(
    "permute",
    triton=_gather_triton,
    plain=lambda x_TD, source_R, row_TK, _: gather_tokens(x_TD, source_R, row_TK.shape[1]),
    fake=lambda x_TD, source_R, *_: x_TD.new_empty(source_R.shape[0], x_TD.shape[1]),
    takes=_on_kernels,
)
_sum = twins(
    "unpermute",
    triton=_sum_triton,
    plain=lambda y_RD, weights_TK, _, row_TK, __: sum_choices(y_RD, weights_TK, row_TK),
    fake=lambda y_RD, weights_TK, _, row_TK, __: y_RD.new_empty(row_TK.shape[0], y_RD.shape[1]),
    takes=_on_kernels,
)
_gradients = twins(
    "unpermute_backward",
    triton=_gradients_triton,
    plain=_gradients_plain,
    fake=lambda dy_TD, y_RD, weights_TK, *_: (y_RD.new_empty(y_RD.shape), weights_TK.new_empty(weights_TK.shape)),
    takes=_on_kernels,
)
