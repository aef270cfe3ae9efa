"""How far a tensor is from what is expected, in two ways."""

from __future__ import annotations

import torch
from torch import Tensor


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


def _relative(off: float, scale: float) -> float:
    relative = off / scale if scale else off
    return relative if relative == relative else float("inf")
