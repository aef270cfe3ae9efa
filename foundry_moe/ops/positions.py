"""The position of each choice among those of the same expert. Knows nothing of gates or of what it is for.

Shapes: A choices, E experts.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _ordered(values_A: Tensor) -> Tensor:
    """int64 in the order of fp32 values, below 2^31 in magnitude; -0 and 0 are one."""
    bits_A = (values_A + 0.0).contiguous().view(torch.int32)
    return torch.where(bits_A < 0, bits_A ^ 0x7FFFFFFF, bits_A).long()


def positions_in_expert(expert_A: Tensor, experts: int, priority_A: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Each choice's position, from 0, among those of its expert, and the loads.

    Args:
        expert_A: int64 in [0, E]; E is a bin of its own, for what is no choice.
        priority_A: fp32, highest first, equals in order; None = all in order.

    Returns:
        position_A: int64.
        load_E1: int64, choices of each expert and, last, of none.
    """
    if priority_A is None:
        order_A = torch.argsort(expert_A, stable=True)
    else:
        order_A = torch.argsort((expert_A << 32) - _ordered(priority_A), stable=True)
    load_E1 = torch.zeros(experts + 1, dtype=torch.int64, device=expert_A.device)
    load_E1 = load_E1.scatter_add(0, expert_A, torch.ones_like(expert_A))
    first_E1 = load_E1.cumsum(0) - load_E1
    position_A = torch.arange(expert_A.shape[0], device=expert_A.device) - first_E1[expert_A[order_A]]
    return torch.zeros_like(position_A).index_copy(0, order_A, position_A), load_E1
