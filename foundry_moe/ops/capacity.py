"""Token dropping: which choices fit their expert's capacity.

Shapes: T tokens, K choices per token, A = T * K, E experts.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from foundry_moe.ops.permute import plan_permute


def capacity_of(factor: float, tokens: int, top_k: int, num_experts: int) -> int:
    """ceil(factor * T * k / E), 1 at least (Fedus et al. 2021, equation 3)."""
    # a factor such as 1.1 is not exact in binary: 1e-9 keeps ceil(1.1 * 100) at 110
    return max(1, math.ceil(factor * tokens * top_k / num_experts - 1e-9))


def drop_beyond_capacity(
    experts_TK: Tensor,
    num_experts: int,
    *,
    top_k: int,
    factor: float,
    weights_TK: Tensor | None = None,
    mask_T: Tensor | None = None,
) -> Tensor:
    """experts_TK, with -1 for each choice beyond its expert's capacity.

    In order: all first choices go before all second ones, and earlier tokens before later ones (Lepikhin et al. 2020,
    algorithm 1). Given weights, each expert keeps the choices that weigh most, equals in that order.

    Args:
        experts_TK: -1 = no choice.
        top_k: choices per token in the formula of `capacity_of`.
        factor: the capacity factor.
        weights_TK: finite; None = drop by order.
        mask_T: True for real tokens, of which the factor takes the number; None = all are real.
    """
    tokens, choices = experts_TK.shape
    experts_A, order_A = experts_TK.t().reshape(-1), None
    if weights_TK is not None:
        order_A = weights_TK.detach().float().t().reshape(-1).argsort(descending=True, stable=True)
        experts_A = experts_A[order_A]
    plan = plan_permute(experts_A, num_experts)
    first_E = plan.offsets_E - plan.tokens_per_expert_E
    place_A = plan.row_TK.flatten() - first_E[experts_A.long().clamp(min=0)]
    room: int | Tensor = capacity_of(factor, tokens, top_k, num_experts)
    if mask_T is not None:  # the same formula on the device
        room = (factor * mask_T.sum().double() * top_k / num_experts - 1e-9).ceil().clamp(min=1)
    dropped_A = place_A >= room
    if order_A is not None:
        dropped_A = torch.empty_like(dropped_A).index_copy(0, order_A, dropped_A)
    return experts_TK.masked_fill(dropped_A.view(choices, tokens).t(), -1)
