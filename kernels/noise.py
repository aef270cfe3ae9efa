"""Multiplies a tensor by uniform factors drawn per element from hashed keys, in one pass.

The twin is `foundry_moe.ops.noise`: the same finaliser of MurmurHash3 on the same keys gives the same factors.

Shapes: T tokens, D model width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_COLUMNS = 1024


@triton.jit
def _mix(x):
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def _jitter_kernel(x_ptr, row_ptr, column_ptr, out_ptr, width, low, span, COLUMNS: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    keep = d < width
    row = tl.load(row_ptr + t).to(tl.uint32, bitcast=True)
    column = tl.load(column_ptr + d, mask=keep, other=0).to(tl.uint32, bitcast=True)
    drawn = _mix(row ^ column) >> 9
    uniform = (drawn.to(tl.float32) + 0.5) * 1.1920928955078125e-07  # 2^-23
    x = tl.load(x_ptr + t * width + d, mask=keep, other=0.0).to(tl.float32)
    tl.store(out_ptr + t * width + d, x * (uniform * span + low), mask=keep)


def jitter(x_TD: Tensor, row_T: Tensor, column_D: Tensor, amount: float) -> Tensor:
    """`x_TD` times 1 - amount + 2 * amount * u, u uniform in (0, 1) from the hash of row and column; in `x_TD`'s dtype.

    Args:
        x_TD: fp32, fp16 or bf16.
        row_T, column_D: int32 keys.
    """
    tokens, width = x_TD.shape
    x_TD = x_TD.contiguous()
    out_TD = torch.empty_like(x_TD)
    if x_TD.numel():
        grid = (tokens, triton.cdiv(width, _COLUMNS))
        _jitter_kernel[grid](x_TD, row_T, column_D, out_TD, width, 1.0 - amount, 2.0 * amount, COLUMNS=_COLUMNS)
    return out_TD
