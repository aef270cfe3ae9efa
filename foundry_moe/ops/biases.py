"""Biases of experts, around products that know of none: whatever computes x W^T computes x W^T + b.

The tokens get a column of ones, and each matrix its bias as the column that meets it; zeros fill up to rows of 16
bytes, which the kernels want. What an expert adds after its last product depends on a token's choices alone.
Copying the matrices costs their size once a forward pass and once a backward pass: biases are for models that have
them, not for speed.

Shapes: T tokens, K choices, E experts, D model width, F expert width, P columns more.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from foundry_moe.ops.permute import PermutePlan

_COLUMNS = 8  # 16 bytes of a 16-bit type


class Biases(NamedTuple):
    """Of w1, of v1 (None for an MLP) and of w2."""

    w1_EF: Tensor
    v1_EF: Tensor | None
    w2_ED: Tensor


def with_ones(x_TD: Tensor) -> Tensor:
    """[T, D + P]: a one, then zeros."""
    columns = x_TD.new_zeros(x_TD.shape[0], _COLUMNS)
    columns[:, 0] = 1
    return torch.cat([x_TD, columns], dim=1)


def with_bias(weight_EFD: Tensor, bias_EF: Tensor) -> Tensor:
    """[E, F, D + P]: the bias meets the one of `with_ones`."""
    return torch.cat([weight_EFD, F.pad(bias_EF[..., None].to(weight_EFD.dtype), (0, _COLUMNS - 1))], dim=2)


def with_rows(w2_EDF: Tensor) -> Tensor:
    """[E, D + P, F]: rows of zeros, so that outputs are as wide as inputs."""
    return F.pad(w2_EDF, (0, 0, 0, _COLUMNS))


def of_choices(w2_ED: Tensor, weights_TK: Tensor | None, plan: PermutePlan) -> Tensor:
    """[T, D]: for each token the weighted sum of its experts' last biases."""
    chosen_TK = (plan.row_TK >= 0) & (plan.experts_TK >= 0)
    weights_TK = torch.ones_like(chosen_TK, dtype=w2_ED.dtype) if weights_TK is None else weights_TK
    weights_TK = weights_TK.masked_fill(~chosen_TK, 0)
    index_TK = plan.experts_TK.long().clamp(min=0)
    shares_TE = weights_TK.new_zeros(index_TK.shape[0], w2_ED.shape[0]).scatter_add(1, index_TK, weights_TK)
    return shares_TE.to(w2_ED.dtype) @ w2_ED
