"""The layout of token-dropping MoE: the same number of places for every expert, and batched products over it.

For comparison with the dropless layout: the same gather and weighted sum (in torch's operations: the kernels fill a
ragged end with zeros, not places in between), with rows in E blocks of C places instead of one ragged sequence, and
the experts' products as one batched product each.

Shapes: T tokens, K choices, E experts, C places of an expert, D model width, F expert width, R = E * C rows.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from foundry_moe.ops.activations import POINTWISE
from foundry_moe.ops.places import places
from foundry_moe.ops.routes import Routes


def places_of(factor: float, tokens: int, top_k: int, num_experts: int) -> int:
    """C = ceil(factor * T * k / E), 1 at least (Fedus et al. 2021, equation 3)."""
    # a factor such as 1.1 is not exact in binary: 1e-9 keeps ceil(1.1 * 100) at 110
    return max(1, math.ceil(factor * tokens * top_k / num_experts - 1e-9))


def plan_padded(experts_TK: Tensor, num_experts: int, *, top_k: int, capacity: float | Literal["dynamic"]) -> Routes:
    """Gives each choice a place with its expert; choices beyond an expert's places are dropped.

    All first choices go before all second ones, and earlier tokens before later ones (Lepikhin et al. 2020,
    algorithm 1); so an expert's places are filled from 0 without gaps, whichever choices fill them.

    Args:
        experts_TK: -1 = no choice.
        top_k: choices a token in the formula of `places_of`.
        capacity: a factor, or `dynamic`: the smallest number of places that drops none (Hwang et al. 2023, Tutel);
            this reads the loads on the host.

    Returns:
        Routes with `places` = C; `row_TK` is -1 where a choice is dropped or was none.
    """
    tokens, choices = experts_TK.shape
    expert_A = experts_TK.t().reshape(-1).long()
    expert_A = torch.where(expert_A < 0, num_experts, expert_A)
    place_A, load_E1 = places(expert_A, num_experts)
    if capacity == "dynamic":
        room = max(1, int(load_E1[:num_experts].max()))
    else:
        room = places_of(capacity, tokens, top_k, num_experts)
    kept_A = (expert_A < num_experts) & (place_A < room)
    row_KT = torch.where(kept_A, expert_A * room + place_A, -1).view(choices, tokens)
    row_TK = row_KT.t().contiguous().int()
    # one row more takes what is dropped
    source_R = torch.full((num_experts * room + 1,), -1, dtype=torch.int32, device=experts_TK.device)
    assignment_A = torch.arange(tokens * choices, dtype=torch.int32, device=experts_TK.device)
    target_A = torch.where(row_TK < 0, num_experts * room, row_TK).reshape(-1).long()
    source_R = source_R.scatter(0, target_A, assignment_A)[:-1]
    kept_E = load_E1[:num_experts].clamp(max=room).int()
    return Routes(
        experts_TK=torch.where(row_TK < 0, -1, experts_TK).int(),
        tokens_per_expert_E=kept_E,
        offsets_E=kept_E.cumsum(0, dtype=torch.int32),
        source_R=source_R,
        row_TK=row_TK,
        places=room,
    )


def expert_mlp(
    x_RD: Tensor, routes: Routes, w1_EFD: Tensor, v1_EFD: Tensor | None, w2_EDF: Tensor, activation: str
) -> Tensor:
    """y_RD [E * C, D]; empty places give zeros."""
    act = POINTWISE[activation]
    x_ECD = x_RD.view(routes.num_experts, -1, x_RD.shape[1])
    h_ECF = act(torch.bmm(x_ECD, w1_EFD.transpose(1, 2)))
    if v1_EFD is not None:
        h_ECF = h_ECF * torch.bmm(x_ECD, v1_EFD.transpose(1, 2))
    return torch.bmm(h_ECF, w2_EDF.transpose(1, 2)).view(x_RD.shape[0], -1)
