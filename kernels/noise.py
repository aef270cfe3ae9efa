"""Uniform numbers hashed from a token's key, a column and a stream, in one pass; and a tensor multiplied by them.

The twin is `foundry_moe.ops.noise`: the same finaliser of MurmurHash3 on the same keys gives the same numbers.

Shapes: T tokens, N numbers per token, D model width.
"""

from __future__ import annotations

import struct

import torch
import triton
import triton.language as tl
from foundry_moe_kernels.launch import cdiv
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
    """The hash of int32 keys of tokens; a number is `uniform_from(row_hash ^ column_hash)`."""
    return mix(key.to(tl.uint32, bitcast=True) + stream.to(tl.uint32, bitcast=True))


@triton.jit
def column_hash(column, stream):
    return mix((column.to(tl.uint32) * 0x9E3779B9) ^ stream.to(tl.uint32, bitcast=True))


@triton.jit
def uniform_from(both):
    """fp32 in (0, 1): (m + 1/2) / 2^23."""
    return ((mix(both) >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07


@triton.jit
def jitter_row(key, stream):
    """The number of int32 keys of tokens, which are mixed already."""
    s = stream.to(tl.uint32, bitcast=True)
    return key.to(tl.uint32, bitcast=True) * (s | 1) + s


@triton.jit
def jitter_column(column):
    """One odd number for columns 2j and 2j + 1, the same in every stream."""
    x = ((column >> 1).to(tl.uint32) + 1) * 0x9E3779B9
    x = (x ^ (x >> 15)) * 0x85EBCA6B
    return (x ^ (x >> 13)) | 1


@triton.jit
def _change(row, column, d, step):
    """The factors less one, fp32: see `jittered`."""
    byte = ((row * column) >> tl.where(d % 2 == 0, 16, 24)) & 0xFF
    top = (step << 16).to(tl.float32, bitcast=True)
    below = ((step - 1) << 16).to(tl.float32, bitcast=True)
    size = ((byte & 0x7F).to(tl.float32) * 0.0078125 + 1.0) * top - below
    bits = size.to(tl.uint32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000  # to the nearest bf16, ties to even
    size = bits.to(tl.float32, bitcast=True)
    return tl.where(byte < 128, size, -size)


_PAIR = tl.constexpr("""{
    .reg .b32 h, v, w;
    mul.lo.u32 h, $2, $4;
    prmt.b32 h, h, 0, 0xB3A2;
    lop3.b32 v, h, 0x807F807F, 0x3F803F80, 0xEA;
    lop3.b32 w, h, 0x80008000, $8, 0x6A;
    fma.rn.bf16x2 v, v, $6, w;
    fma.rn.bf16x2 $0, $1, v, $1;
}""")
_PAIR_FP32 = tl.constexpr("""{
    .reg .b32 h, v, w;
    .reg .f32 a, b;
    mul.lo.u32 h, $3, $5;
    prmt.b32 h, h, 0, 0xB3A2;
    lop3.b32 v, h, 0x807F807F, 0x3F803F80, 0xEA;
    lop3.b32 w, h, 0x80008000, $9, 0x6A;
    fma.rn.bf16x2 v, v, $7, w;
    shl.b32 h, v, 16;
    and.b32 w, v, 0xFFFF0000;
    mov.b32 a, h;
    mov.b32 b, w;
    fma.rn.f32 a, $1, a, $1;
    fma.rn.f32 b, $2, b, $2;
    cvt.rn.bf16x2.f32 $0, b, a;
}""")


@triton.jit
def jittered(x, row, column, d, step, DTYPE: tl.constexpr, PACKED: tl.constexpr):
    """x, fp32 or of DTYPE, times 1 + a change, in DTYPE, rounded once.

    The product of a row's and a column pair's number has a byte for each of the two columns: a sign and 7 bits m, for
    a change of +-(m + c) / 128 of the amount in bf16, c between 1/2 and 1. PACKED does two columns at once in
    bf16, 6 instructions in all: it needs neighbouring columns of a row in neighbouring registers, as loads and
    products have them. The multiplication and fp32 arithmetic for each element cost twice that.

    Args:
        row, column: from `jitter_row` and `jitter_column`, broadcast to x's rows and columns.
        d: columns.
        step: the amount, see `step_of`.
    """
    if PACKED:
        both = step.to(tl.uint32) * 0x00010001
        below = (both - 0x00010001) | 0x80008000
        if x.dtype == tl.float32:
            y = tl.inline_asm_elementwise(
                _PAIR_FP32, "=r,f,f,r,r,r,r,r,r,r,r", [x, row, column, both, below], tl.bfloat16, is_pure=True, pack=2
            )
        else:
            y = tl.inline_asm_elementwise(
                _PAIR, "=r,r,r,r,r,r,r,r,r,r", [x, row, column, both, below], tl.bfloat16, is_pure=True, pack=2
            )
    else:
        x = x.to(tl.float32)
        y = (x + x * _change(row, column, d, step)).to(DTYPE)
    return y


@triton.jit(do_not_specialize=["stream"])
def _uniform_kernel(key_ptr, out_ptr, stream, numbers, columns, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    keep = i < numbers
    row = row_hash(tl.load(key_ptr + i // columns, mask=keep, other=0), stream)
    tl.store(out_ptr + i, uniform_from(row ^ column_hash((i % columns).to(tl.int32), stream)), mask=keep)


@triton.jit(do_not_specialize=["stream", "step"])
def _jitter_kernel(x_ptr, key_ptr, out_ptr, stream, width, step, COLUMNS: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    keep = d < width
    row = jitter_row(tl.load(key_ptr + t), stream)
    x = tl.load(x_ptr + t * width + d, mask=keep, other=0.0).to(tl.float32)
    x = jittered(x, row, jitter_column(d), d, step, out_ptr.dtype.element_ty, False)
    tl.store(out_ptr + t * width + d, x, mask=keep)


def step_of(amount: float) -> int:
    """The bits of the largest bf16 number up to `amount` (below 1); for 0, those of the smallest one above 0."""
    return max(struct.unpack("<I", struct.pack("<f", amount))[0] >> 16, 1)


def uniform(keys_T: Tensor, columns: int, stream: int) -> Tensor:
    """fp32 [T, N], uniform in the open interval (0, 1): (m + 1/2) / 2^23 for whole m, all exact in fp32.

    Args:
        keys_T: int32.
        stream: an int32 as a Python number.
    """
    keys_T = keys_T.contiguous()
    out_TN = torch.empty(keys_T.shape[0], columns, dtype=torch.float32, device=keys_T.device)
    if out_TN.numel():
        grid = (cdiv(out_TN.numel(), _COLUMNS),)
        _uniform_kernel[grid](keys_T, out_TN, stream, out_TN.numel(), columns, BLOCK=_COLUMNS)
    return out_TN


def jitter(x_TD: Tensor, keys_T: Tensor, amount: float, stream: int) -> Tensor:
    """`x_TD` times factors from 1 - amount to 1 + amount, drawn for each element, in `x_TD`'s dtype.

    A factor is one of 256, evenly spaced and as many above one as below; `amount` is rounded down to bf16.

    Args:
        x_TD: fp32, fp16 or bf16.
    """
    tokens, width = x_TD.shape
    x_TD, keys_T = x_TD.contiguous(), keys_T.contiguous()
    out_TD = torch.empty_like(x_TD)
    if x_TD.numel():
        grid = (tokens, cdiv(width, _COLUMNS))
        _jitter_kernel[grid](x_TD, keys_T, out_TD, stream, width, step_of(amount), COLUMNS=_COLUMNS)
    return out_TD
