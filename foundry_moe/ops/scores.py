"""A router's scores x W^T in fp32, on tensor cores where the input is bf16.

A product of two bf16 numbers is exact in fp32, so a bf16 product with fp32 sums and fp32 output is the fp32 product. An
fp32 factor is split into bf16 parts of 8 bits each, side by side as more columns. At OLMoE's shape (16,384 tokens, 2048
wide, 64 experts) on an H200 casting and fp32 products were 0.49 of the gate's 0.61 ms.

Shapes: T tokens, D model width, E experts, P parts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def _has_fp32_output() -> bool:
    """Whether `torch.mm` can write fp32 from bf16 (torch 2.8 up)."""
    return any("dtype" in name for name in torch.ops.aten.mm.overloads())


_AVAILABLE = _has_fp32_output()


def _split(values: Tensor, parts: int) -> list[Tensor]:
    """bf16 tensors whose sum is `values` but for 2^(-8 * parts) of it."""
    split = []
    for _ in range(parts):
        split.append(values.bfloat16())
        values = values.float() - split[-1].float()
    return split


def _parts(weight_ED: Tensor) -> int:
    return 1 if weight_ED.dtype is torch.bfloat16 else 3


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_ED: Tensor) -> Tensor:
        ctx.save_for_backward(x_TD, weight_ED)
        experts, parts = weight_ED.shape[0], _parts(weight_ED)
        columns_PED = torch.cat(_split(weight_ED, parts))
        scores = torch.mm(x_TD, columns_PED.t(), out_dtype=torch.float32)
        return scores.view(-1, parts, experts).sum(1) if parts > 1 else scores

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x_TD, weight_ED = ctx.saved_tensors
        experts = weight_ED.shape[0]
        high_TE, low_TE, rest_TE = _split(grads[0], 3)
        by_part_PED = torch.mm(
            torch.cat([high_TE, low_TE, rest_TE], dim=1).t(), x_TD, out_dtype=torch.float32
        )  # fmt: skip
        dweight_ED = by_part_PED.view(3, experts, -1).sum(0).to(weight_ED.dtype)
        # rounded to bf16 in the end: 16 bits of each factor are enough
        first_ED, *second = _split(weight_ED, min(_parts(weight_ED), 2))
        left = [high_TE, low_TE, *[high_TE for _ in second]]
        dx_TD = torch.mm(torch.cat(left, dim=1), torch.cat([first_ED, first_ED, *second]))
        return dx_TD, dweight_ED


def router_scores(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    """[T, E] in fp32, or fp64 for fp64 inputs, under autocast too (Fedus et al. 2021, section 2.4)."""
    with torch.autocast(x_TD.device.type, enabled=False):
        if _AVAILABLE and x_TD.is_cuda and x_TD.dtype is torch.bfloat16 and weight_ED.dtype is not torch.float64:
            return _Scores.apply(x_TD, weight_ED)
        dtype = torch.promote_types(x_TD.dtype, torch.float32)
        return F.linear(x_TD.to(dtype), weight_ED.to(dtype))
