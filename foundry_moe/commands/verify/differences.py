"""How far a tensor is from what is expected: by its largest element, by its norm, and beside another distance."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# bf16 moves some tokens to other experts, which is no small difference; so there the figure is a ratio: how far a mesh
# in bf16 is from one process in fp32, over how far one process in bf16 is.
RATIO_TOLERANCE = 3.0
LEAST_BF16 = 2.0**-9  # a distance below bf16's own rounding counts as that


def difference(measured: Tensor | None, expected: Tensor | None) -> float:
    """The largest difference over the largest element expected; `inf` where one is missing, misshapen or no number."""
    if measured is None or expected is None or measured.shape != expected.shape:
        return float("inf")
    if not expected.numel():
        return 0.0
    off = (measured.double() - expected.double()).abs().max().item()
    return _relative(off, expected.double().abs().max().item())


def distance(measured: Tensor | None, expected: Tensor | None) -> float:
    """The norm of the difference over that of what is expected; `inf` as for `difference`.

    For bf16: tokens that rounding moves to another expert change few elements by much.
    """
    if measured is None or expected is None or measured.shape != expected.shape:
        return float("inf")
    off = torch.linalg.vector_norm(measured.double() - expected.double()).item()
    return _relative(off, torch.linalg.vector_norm(expected.double()).item())


def ratio(found: float, own: float) -> float:
    """A distance in bf16 over one process's own; where that one has no number to compare, nothing passes."""
    return found / max(own if math.isfinite(own) else 0.0, LEAST_BF16)


def _relative(off: float, scale: float) -> float:
    relative = off / scale if scale else off
    return relative if relative == relative else float("inf")
