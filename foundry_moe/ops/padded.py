"""The plan of token-dropping MoE: the same number of slots for every expert; choices beyond it are dropped.

Rows are E blocks of C slots instead of one ragged sequence, and each of the experts' products is one batched product.

Shapes: T tokens, K choices, A = T * K assignments, E experts, C slots of an expert (its capacity), R = E * C rows.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from foundry_moe_kernels import padded as kernels
from torch import Tensor
from torch.nn import functional as F

from foundry_moe.ops.permute import PermutePlan, plan_permute


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
    mask_T: Tensor | None = None,
) -> PermutePlan:
    """Gives each choice a slot of its expert; choices beyond an expert's capacity are dropped.

    In order: all first choices go before all second ones, and earlier tokens before later ones (Lepikhin et al. 2020,
    algorithm 1). Given weights, each expert keeps the choices that weigh most, equals in that order. An expert's
    slots are filled from 0 without gaps, whichever choices fill them.

    Args:
        experts_TK: -1 = no choice.
        top_k: choices per token in the formula of `capacity_of`.
        capacity: a factor, or `dynamic`: the smallest capacity that drops none (Hwang et al. 2023, Tutel);
            this reads the loads on the host.
        weights_TK: finite; None = drop by order.
        mask_T: True for real tokens: a factor is of their number. Slots are allocated for all T, which the host knows.

    Returns:
        A plan with `capacity` = C; `row_TK` is -1 where a choice is dropped or was none.
    """
    experts_A, order_A = experts_TK.t().reshape(-1), None
    if weights_TK is not None:
        order_A = weights_TK.detach().float().t().reshape(-1).argsort(descending=True, stable=True)
        experts_A = experts_A[order_A]
    by_expert = plan_permute(experts_A, num_experts)
    loads_E = by_expert.tokens_per_expert_E
    room: int | Tensor
    if capacity == "dynamic":
        room = slots = max(1, int(loads_E.max()))
    else:
        room = slots = capacity_of(capacity, experts_TK.shape[0], top_k, num_experts)
        if mask_T is not None:  # the same formula on the device
            real = mask_T.sum().double()
            room = (capacity * real * top_k / num_experts - 1e-9).ceil().clamp(1, slots).int()
    # torch.compile cannot trace this kernel: it is not an operator
    on_kernels = experts_TK.is_cuda and not torch.compiler.is_compiling()
    kept_TK, row_TK, source_R = (kernels.assign_slots if on_kernels else assign_plain)(
        by_expert.experts_TK, by_expert.row_TK, by_expert.offsets_E, order_A, experts_TK.shape, slots, room
    )
    kept_E = loads_E.clamp(max=room)  # type: ignore[call-overload]
    return PermutePlan(
        experts_TK=kept_TK,
        tokens_per_expert_E=kept_E,
        offsets_E=kept_E.cumsum(0, dtype=torch.int32),
        source_R=source_R,
        row_TK=row_TK,
        capacity=slots,
    )


def assign_plain(
    experts_A: Tensor,
    row_A: Tensor,
    offsets_E: Tensor,
    order_A: Tensor | None,
    shape: torch.Size,
    capacity: int,
    room: int | Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The plain twin of `kernels.assign_slots`."""
    tokens, choices = shape
    dropped = offsets_E.shape[0] * capacity  # one row more takes what is dropped
    experts_A = experts_A.flatten().long()
    slot_A = row_A.flatten() - F.pad(offsets_E, (1, 0))[experts_A.clamp(min=0)]
    kept_A = (experts_A >= 0) & (slot_A < room)
    target_A = torch.where(kept_A, experts_A * capacity + slot_A, dropped)
    by_choice_A = torch.arange(tokens * choices, device=experts_A.device) if order_A is None else order_A
    assignment_A = by_choice_A % tokens * choices + by_choice_A // tokens
    source_R = torch.full((dropped + 1,), -1, dtype=torch.int32, device=experts_A.device)
    source_R = source_R.scatter(0, target_A, assignment_A.int())[:-1]
    placed_2A = torch.stack([experts_A, target_A]).masked_fill(~kept_A, -1).int()
    kept_TK, row_TK = torch.empty_like(placed_2A).index_copy(1, assignment_A, placed_2A).view(2, *shape).unbind()
    return kept_TK, row_TK, source_R
