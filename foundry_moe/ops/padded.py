"""The layout of token-dropping MoE: the same number of places for every expert, and batched products over it.

For comparison with the dropless layout, on the same terms: tokens are placed, copied, weighed and summed by kernels,
and activations are; only that rows stand in E blocks of C places instead of one ragged sequence, and the experts'
products are one batched product each.

Shapes: T tokens, K choices, A = T * K assignments, E experts, C places of an expert, R = E * C rows, D model width,
F expert width, P planes (gate, up).
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from foundry_moe_kernels import padded as kernels
from foundry_moe_kernels import permutation, pointwise
from torch import Tensor

from foundry_moe.ops.activations import POINTWISE
from foundry_moe.ops.places import places
from foundry_moe.ops.routes import Routes, combine, permute

_KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def places_of(factor: float, tokens: int, top_k: int, num_experts: int) -> int:
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
) -> Routes:
    """Gives each choice a place with its expert; choices beyond an expert's places are dropped.

    In order: all first choices go before all second ones, and earlier tokens before later ones (Lepikhin et al. 2020,
    algorithm 1). Given weights, each expert keeps the choices that weigh most, equals in that order. An expert's
    places are filled from 0 without gaps, whichever choices fill them.

    Args:
        experts_TK: -1 = no choice.
        top_k: choices a token in the formula of `places_of`.
        capacity: a factor, or `dynamic`: the smallest number of places that drops none (Hwang et al. 2023, Tutel);
            this reads the loads on the host.
        weights_TK: finite; None = drop by order.

    Returns:
        Routes with `places` = C; `row_TK` is -1 where a choice is dropped or was none.
    """
    plan = _plan_on_kernels if experts_TK.is_cuda and not torch.compiler.is_compiling() else _plan_in_torch
    weight_A = None if weights_TK is None else weights_TK.detach().float().t().reshape(-1)
    return plan(experts_TK, num_experts, capacity, top_k, weight_A)


def _room(capacity: float | Literal["dynamic"], loads_E: Tensor, tokens: int, top_k: int) -> int:
    if capacity == "dynamic":
        return max(1, int(loads_E.max()))
    return places_of(capacity, tokens, top_k, loads_E.shape[0])


def _plan_on_kernels(
    experts_TK: Tensor, num_experts: int, capacity: float | Literal["dynamic"], top_k: int, weight_A: Tensor | None
) -> Routes:
    order_A = None if weight_A is None else torch.argsort(weight_A, descending=True, stable=True)
    choices = kernels.Sorted(experts_TK, num_experts, order_A)
    room = _room(capacity, choices.loads_E, experts_TK.shape[0], top_k)
    kept_TK, row_TK, source_R = choices.place(room)
    return _routes(kept_TK, row_TK, source_R, choices.loads_E, room)


def _plan_in_torch(
    experts_TK: Tensor, num_experts: int, capacity: float | Literal["dynamic"], top_k: int, weight_A: Tensor | None
) -> Routes:
    tokens, choices = experts_TK.shape
    expert_A = experts_TK.t().reshape(-1).long()
    expert_A = torch.where(expert_A < 0, num_experts, expert_A)
    place_A, load_E1 = places(expert_A, num_experts, weight_A)
    room = _room(capacity, load_E1[:num_experts], tokens, top_k)
    kept_A = (expert_A < num_experts) & (place_A < room)
    row_KT = torch.where(kept_A, expert_A * room + place_A, -1).view(choices, tokens)
    row_TK = row_KT.t().contiguous().int()
    # one row more takes what is dropped
    source_R = torch.full((num_experts * room + 1,), -1, dtype=torch.int32, device=experts_TK.device)
    assignment_A = torch.arange(tokens * choices, dtype=torch.int32, device=experts_TK.device)
    target_A = torch.where(row_TK < 0, num_experts * room, row_TK).reshape(-1).long()
    source_R = source_R.scatter(0, target_A, assignment_A)[:-1]
    kept_TK = torch.where(row_TK < 0, -1, experts_TK).int()
    return _routes(kept_TK, row_TK, source_R, load_E1[:num_experts], room)


def _routes(kept_TK: Tensor, row_TK: Tensor, source_R: Tensor, loads_E: Tensor, room: int) -> Routes:
    kept_E = loads_E.clamp(max=room).int()
    return Routes(
        experts_TK=kept_TK,
        tokens_per_expert_E=kept_E,
        offsets_E=kept_E.cumsum(0, dtype=torch.int32),
        source_R=source_R,
        row_TK=row_TK,
        places=room,
    )


def routed_mlp(
    x_TD: Tensor,
    weights_TK: Tensor | None,
    routes: Routes,
    w1_EFD: Tensor,
    v1_EFD: Tensor | None,
    w2_EDF: Tensor,
    activation: str,
) -> Tensor:
    """y_TD: what `foundry_moe.ops.routed_mlp` says, for operands it has checked."""
    if x_TD.is_cuda and x_TD.dtype in _KERNEL_DTYPES and not torch.compiler.is_compiling():
        return _PaddedMlp.apply(x_TD, weights_TK, w1_EFD, v1_EFD, w2_EDF, routes.source_R, routes.row_TK, activation)
    y_RD = expert_mlp(permute(x_TD, routes), routes, w1_EFD, v1_EFD, w2_EDF, activation)
    return combine(y_RD, weights_TK, routes)


def expert_mlp(
    x_RD: Tensor, routes: Routes, w1_EFD: Tensor, v1_EFD: Tensor | None, w2_EDF: Tensor, activation: str
) -> Tensor:
    """y_RD [E * C, D] in torch's operations; empty places give zeros."""
    act = POINTWISE[activation]
    x_ECD = x_RD.view(routes.num_experts, -1, x_RD.shape[1])
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
        return permutation.combine(y_RD, weights_TK, row_TK)

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
            dx_TD = permutation.combine(dx_ECD.view(rows, width), None, row_TK)
            del dx_ECD
        x_ECD = kernels.gather(x_TD, source_R, choices).view(experts, -1, width)
        dw1_EFD = torch.bmm(dz_PECF[0].transpose(1, 2), x_ECD)
        dv1_EFD = None if v1_EFD is None else torch.bmm(dz_PECF[1].transpose(1, 2), x_ECD)
        dweights_TK = None
        if weights_TK is not None and dots is not None:
            dweights_TK = permutation.gather_dots(dots, row_TK, weights_TK.dtype)
        return dx_TD, dweights_TK, dw1_EFD, dv1_EFD, dw2_EDF, None, None, None
