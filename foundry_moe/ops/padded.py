"""The layout of token-dropping MoE: the same number of slots for every expert, and batched products over it.

For comparison with the dropless layout, on the same terms: kernels assign slots, permute, unpermute and activate.
Only the rows differ, which stand in E blocks of C slots instead of one ragged sequence, and the experts' products,
which are one batched product each.

Shapes: T tokens, K choices, A = T * K assignments, E experts, C slots of an expert (its capacity), R = E * C rows,
D model width, F expert width, P planes (gate, up).
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from foundry_moe_kernels import padded as kernels
from foundry_moe_kernels import permute as permute_kernels
from foundry_moe_kernels import pointwise
from torch import Tensor

from foundry_moe.ops.activations import POINTWISE
from foundry_moe.ops.operators import on_gpu
from foundry_moe.ops.permute import PermutePlan, permute, unpermute
from foundry_moe.ops.positions import positions_in_expert

_KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _on_kernels(tensor: Tensor, *dtypes: torch.dtype) -> bool:
    """Whether kernels take this tensor. A graph has none of them: plans read the host, and backward is in place."""
    return on_gpu(*dtypes)(tensor) and not torch.compiler.is_compiling()


def capacity_of(factor: float, tokens: int, top_k: int, num_experts: int) -> int:
    """C = ceil(factor * T * k / E), 1 at least (Fedus et al. 2021, equation 3)."""
    # a factor such as 1.1 is not exact in binary: 1e-9 keeps ceil(1.1 * 100) at 110
    return max(1, math.ceil(factor * tokens * top_k / num_experts - 1e-9))


def plan_padded(
    experts_TK: Tensor,
    num_experts: int,
    *,
    top_k: int,
    capacity: float | Literal["dynamic"],
    weights_TK: Tensor | None = None,
) -> PermutePlan:
    """Gives each choice a slot of its expert; choices beyond an expert's capacity are dropped.

    In order: all first choices go before all second ones, and earlier tokens before later ones (Lepikhin et al. 2020,
    algorithm 1). Given weights, each expert keeps the choices that weigh most, equals in that order. An expert's
    slots are filled from 0 without gaps, whichever choices fill them.

    Args:
        experts_TK: -1 = no choice.
        top_k: choices a token in the formula of `capacity_of`.
        capacity: a factor, or `dynamic`: the smallest capacity that drops none (Hwang et al. 2023, Tutel);
            this reads the loads on the host.
        weights_TK: finite; None = drop by order.

    Returns:
        A plan with `capacity` = C; `row_TK` is -1 where a choice is dropped or was none.
    """
    assign = _plan_triton if _on_kernels(experts_TK) else _plan_plain
    weight_A = None if weights_TK is None else weights_TK.detach().float().t().reshape(-1)
    return assign(experts_TK, num_experts, capacity, top_k, weight_A)


def _capacity(factor: float | Literal["dynamic"], loads_E: Tensor, tokens: int, top_k: int) -> int:
    if factor == "dynamic":
        return max(1, int(loads_E.max()))
    return capacity_of(factor, tokens, top_k, loads_E.shape[0])


def _plan_triton(
    experts_TK: Tensor, num_experts: int, factor: float | Literal["dynamic"], top_k: int, weight_A: Tensor | None
) -> PermutePlan:
    order_A = None if weight_A is None else torch.argsort(weight_A, descending=True, stable=True)
    choices = kernels.Sorted(experts_TK, num_experts, order_A)
    capacity = _capacity(factor, choices.loads_E, experts_TK.shape[0], top_k)
    kept_TK, row_TK, source_R = choices.assign_slots(capacity)
    return _plan(kept_TK, row_TK, source_R, choices.loads_E, capacity)


def _plan_plain(
    experts_TK: Tensor, num_experts: int, factor: float | Literal["dynamic"], top_k: int, weight_A: Tensor | None
) -> PermutePlan:
    tokens, choices = experts_TK.shape
    expert_A = experts_TK.t().reshape(-1).long()
    expert_A = torch.where(expert_A < 0, num_experts, expert_A)
    position_A, load_E1 = positions_in_expert(expert_A, num_experts, weight_A)
    capacity = _capacity(factor, load_E1[:num_experts], tokens, top_k)
    kept_A = (expert_A < num_experts) & (position_A < capacity)
    row_KT = torch.where(kept_A, expert_A * capacity + position_A, -1).view(choices, tokens)
    row_TK = row_KT.t().contiguous().int()
    # one row more takes what is dropped
    source_R = torch.full((num_experts * capacity + 1,), -1, dtype=torch.int32, device=experts_TK.device)
    assignment_A = torch.arange(tokens * choices, dtype=torch.int32, device=experts_TK.device)
    target_A = torch.where(row_TK < 0, num_experts * capacity, row_TK).reshape(-1).long()
    source_R = source_R.scatter(0, target_A, assignment_A)[:-1]
    kept_TK = torch.where(row_TK < 0, -1, experts_TK).int()
    return _plan(kept_TK, row_TK, source_R, load_E1[:num_experts], capacity)


def _plan(kept_TK: Tensor, row_TK: Tensor, source_R: Tensor, loads_E: Tensor, capacity: int) -> PermutePlan:
    kept_E = loads_E.clamp(max=capacity).int()
    return PermutePlan(
        experts_TK=kept_TK,
        tokens_per_expert_E=kept_E,
        offsets_E=kept_E.cumsum(0, dtype=torch.int32),
        source_R=source_R,
        row_TK=row_TK,
        capacity=capacity,
    )


def padded_mlp(
    x_TD: Tensor,
    weights_TK: Tensor | None,
    plan: PermutePlan,
    w1_EFD: Tensor,
    v1_EFD: Tensor | None,
    w2_EDF: Tensor,
    activation: str,
) -> Tensor:
    """y_TD: what `foundry_moe.ops.expert_mlp` says, for operands it has checked."""
    if _on_kernels(x_TD, *_KERNEL_DTYPES):
        return _PaddedMlp.apply(x_TD, weights_TK, w1_EFD, v1_EFD, w2_EDF, plan.source_R, plan.row_TK, activation)
    y_RD = _batched_mlp(permute(x_TD, plan), plan, w1_EFD, v1_EFD, w2_EDF, activation)
    return unpermute(y_RD, weights_TK, plan)


def _batched_mlp(
    x_RD: Tensor, plan: PermutePlan, w1_EFD: Tensor, v1_EFD: Tensor | None, w2_EDF: Tensor, activation: str
) -> Tensor:
    """y_RD [E * C, D] in torch's operations; empty slots give zeros."""
    act = POINTWISE[activation]
    x_ECD = x_RD.view(plan.num_experts, -1, x_RD.shape[1])
    h_ECF = act(torch.bmm(x_ECD, w1_EFD.transpose(1, 2)))
    if v1_EFD is not None:
        h_ECF = h_ECF * torch.bmm(x_ECD, v1_EFD.transpose(1, 2))
    return torch.bmm(h_ECF, w2_EDF.transpose(1, 2)).view(x_RD.shape[0], -1)


class _PaddedMlp(torch.autograd.Function):
    """The same steps as the dropless backend has (`ops/expert_steps.py`), and as little kept: x and z.

    The weights enter with the activation's backward, so that no product is computed for their gradient. z becomes its
    own gradient in place: a second backward through the same graph is refused by autograd's version check.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        weights_TK: Tensor | None,
        w1_EFD: Tensor,
        v1_EFD: Tensor | None,
        w2_EDF: Tensor,
        source_R: Tensor,
        row_TK: Tensor,
        activation: str,
    ) -> Tensor:
        experts, hidden, width = w1_EFD.shape
        rows, choices = source_R.shape[0], row_TK.shape[1]
        x_TD = x_TD.contiguous()
        x_ECD = kernels.gather(x_TD, source_R, choices).view(experts, -1, width)
        first = (w1_EFD,) if v1_EFD is None else (w1_EFD, v1_EFD)
        z_PRF = torch.empty(len(first), rows, hidden, dtype=x_TD.dtype, device=x_TD.device)
        for z_RF, weight in zip(z_PRF, first, strict=True):
            torch.bmm(x_ECD, weight.transpose(1, 2), out=z_RF.view(experts, -1, hidden))
        del x_ECD
        end_1 = torch.full((1,), rows, dtype=torch.int32, device=x_TD.device)
        h_ECF = pointwise.activate(z_PRF, end_1, activation).view(experts, -1, hidden)
        y_RD = torch.bmm(h_ECF, w2_EDF.transpose(1, 2)).view(rows, width)
        ctx.activation = activation
        ctx.save_for_backward(x_TD, weights_TK, w1_EFD, v1_EFD, w2_EDF, source_R, row_TK, end_1, z_PRF)
        return permute_kernels.unpermute(y_RD, weights_TK, row_TK)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, weights_TK, w1_EFD, v1_EFD, w2_EDF, source_R, row_TK, end_1, z_PRF = ctx.saved_tensors
        torch.autograd.graph.increment_version(z_PRF)
        experts, hidden, width = w1_EFD.shape
        rows, choices = source_R.shape[0], row_TK.shape[1]
        dy_ECD = kernels.gather(grads[0].contiguous(), source_R, choices).view(experts, -1, width)
        dh_ECF = torch.bmm(dy_ECD, w2_EDF)
        weights = None if weights_TK is None else weights_TK.contiguous()
        dots = pointwise.activation_backward_(
            dh_ECF.view(rows, hidden), z_PRF, end_1, ctx.activation, weights, source_R
        )  # fmt: skip
        dw2_EDF = torch.bmm(dy_ECD.transpose(1, 2), dh_ECF)  # dh is now the weighted h
        del dy_ECD, dh_ECF
        dz_PECF = z_PRF.view(-1, experts, rows // experts, hidden)
        dx_TD = None
        if ctx.needs_input_grad[0]:
            dx_ECD = torch.bmm(dz_PECF[0], w1_EFD)
            if v1_EFD is not None:
                dx_ECD.baddbmm_(dz_PECF[1], v1_EFD)
            dx_TD = permute_kernels.unpermute(dx_ECD.view(rows, width), None, row_TK)
            del dx_ECD
        x_ECD = kernels.gather(x_TD, source_R, choices).view(experts, -1, width)
        dw1_EFD = torch.bmm(dz_PECF[0].transpose(1, 2), x_ECD)
        dv1_EFD = None if v1_EFD is None else torch.bmm(dz_PECF[1].transpose(1, 2), x_ECD)
        dweights_TK = None
        if weights_TK is not None and dots is not None:
            dweights_TK = permute_kernels.gather_dots(dots, row_TK, weights_TK.dtype)
        return dx_TD, dweights_TK, dw1_EFD, dv1_EFD, dw2_EDF, None, None, None
