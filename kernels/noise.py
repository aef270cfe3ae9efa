"""Uniform numbers hashed from a token's key, a column and a stream, in one pass; and a tensor multiplied by them.

The twin is `foundry_moe.ops.noise`: the same finaliser of MurmurHash3 on the same keys gives the same numbers.

Shapes: T tokens, N numbers a token, D model width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from foundry_moe_kernels.sizes import cdiv
from torch import Tensor

_COLUMNS = 1024


@triton.jit
def mix(x):
    """The finaliser on uint32."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def row_hash(key, stream):
    """Of int32 keys of tokens; a number is `uniform_from(row_hash ^ column_hash)`."""
    return mix(key.to(tl.uint32, bitcast=True) + stream.to(tl.uint32, bitcast=True))


@triton.jit
def column_hash(column, stream):
    return mix((column.to(tl.uint32) * 0x9E3779B9) ^ stream.to(tl.uint32, bitcast=True))


@triton.jit
def uniform_from(both):
    """fp32 in (0, 1): (m + 1/2) / 2^23."""
    return ((mix(both) >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07


@triton.jit
def jittered(x, row, column, low, span):
    """x, fp32, times U[low, low + span) from the hashes of its row and column: one multiplication an element.

    Hashing both once more, as `uniform_from` does, took as long as the router's product that the jitter is part of.
    """
    number = row * (column | 1) + column
    one_to_two = ((number >> 9) | 0x3F800000).to(tl.float32, bitcast=True)
    return x * (one_to_two * span + (low - span))


@triton.jit(do_not_specialize=["stream"])
def _uniform_kernel(key_ptr, out_ptr, stream, numbers, columns, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    keep = i < numbers
    row = row_hash(tl.load(key_ptr + i // columns, mask=keep, other=0), stream)
    tl.store(out_ptr + i, uniform_from(row ^ column_hash((i % columns).to(tl.int32), stream)), mask=keep)


@triton.jit(do_not_specialize=["stream"])
def _jitter_kernel(x_ptr, key_ptr, out_ptr, stream, width, low, span, COLUMNS: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    keep = d < width
    row = row_hash(tl.load(key_ptr + t), stream)
    x = tl.load(x_ptr + t * width + d, mask=keep, other=0.0).to(tl.float32)
    tl.store(out_ptr + t * width + d, jittered(x, row, column_hash(d, stream), low, span), mask=keep)


def uniform(keys_T: Tensor, columns: int, stream: int) -> Tensor:
    """fp32 [T, N] in the open interval (0, 1).

    Args:
        keys_T: int32, contiguous.
        stream: an int32 as a Python number.
    """
    out_TN = torch.empty(keys_T.shape[0], columns, dtype=torch.float32, device=keys_T.device)
    if out_TN.numel():
        grid = (cdiv(out_TN.numel(), _COLUMNS),)
        _uniform_kernel[grid](keys_T, out_TN, stream, out_TN.numel(), columns, BLOCK=_COLUMNS)
    return out_TN


def jitter(x_TD: Tensor, keys_T: Tensor, amount: float, stream: int) -> Tensor:
    """`x_TD` times factors from U[1 - amount, 1 + amount), in `x_TD`'s dtype.

    Args:
        x_TD: fp32, fp16 or bf16.
    """
    tokens, width = x_TD.shape
    x_TD = x_TD.contiguous()
    out_TD = torch.empty_like(x_TD)
    if x_TD.numel():
        grid = (tokens, cdiv(width, _COLUMNS))
        _jitter_kernel[grid](x_TD, keys_T, out_TD, stream, width, 1.0 - amount, 2.0 * amount, COLUMNS=_COLUMNS)
    return out_TD
