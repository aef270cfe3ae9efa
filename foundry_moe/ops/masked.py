"""Sums and means over real tokens; padding takes part in nothing.

Shapes: T tokens. `mask_T` is True for real tokens; None = all are real.
"""

from __future__ import annotations

from torch import Tensor


def masked_sum(values_T: Tensor, mask_T: Tensor | None) -> Tensor:
    """The sum over real tokens along the first dimension."""
    if mask_T is None:
        return values_T.sum(0)
    mask = mask_T.reshape(-1, *[1] * (values_T.dim() - 1))
    return values_T.masked_fill(~mask, 0).sum(0)


def masked_mean(values_T: Tensor, mask_T: Tensor | None) -> Tensor:
    """The mean over real tokens along the first dimension; zero where there is none."""
    total = masked_sum(values_T, mask_T)
    if mask_T is None:
        return total / max(values_T.shape[0], 1)
    return total / mask_T.sum().clamp(min=1)
