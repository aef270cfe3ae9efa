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

from foundry_moe.ops.permute import PermutePlan, positions_in_expert


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
    # torch.compile cannot trace these kernels: they are not operators, since a dynamic capacity reads the host
    on_kernels = experts_TK.is_cuda and not torch.compiler.is_compiling()
    assign = plan_triton if on_kernels else plan_plain
    weight_A = None if weights_TK is None else weights_TK.detach().float().t().reshape(-1)
    return assign(experts_TK, num_experts, capacity, top_k, weight_A)


def _capacity(factor: float | Literal["dynamic"], loads_E: Tensor, tokens: int, top_k: int) -> int:
    if factor == "dynamic":
        return max(1, int(loads_E.max()))
    return capacity_of(factor, tokens, top_k, loads_E.shape[0])


def plan_triton(
    experts_TK: Tensor, num_experts: int, factor: float | Literal["dynamic"], top_k: int, weight_A: Tensor | None
) -> PermutePlan:
    order_A = None if weight_A is None else torch.argsort(weight_A, descending=True, stable=True)
    choices = kernels.Sorted(experts_TK, num_experts, order_A)
    capacity = _capacity(factor, choices.loads_E, experts_TK.shape[0], top_k)
    kept_TK, row_TK, source_R = choices.assign_slots(capacity)
    return _plan(kept_TK, row_TK, source_R, choices.loads_E, capacity)


def plan_plain(
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
