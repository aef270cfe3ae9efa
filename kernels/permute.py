"""The ragged permutation: tokens to the rows of their choices, rows back to tokens, and their gradients.

Gathers and scatters alone, no atomics: every output element is written by one program, so the bits never change.

Shapes: T tokens, K choices, R rows, D model width, B rows of programs' blocks.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from foundry_moe_kernels.launch import cdiv, divisor, launch, multiple, next_power_of_2
from torch import Tensor

# From this many choices on, most are assumed absent (each token's last ones): programs stop at the last present one
_SPARSE = 17


@triton.jit
def _last_choice(row_ptr, t, tokens, K: tl.constexpr, KP: tl.constexpr):
    """One past the last choice that any of these tokens has."""
    k = tl.arange(0, KP)
    row = tl.load(row_ptr + t[:, None] * K + k[None, :], mask=(t < tokens)[:, None] & (k < K)[None, :], other=-1)
    return tl.max(tl.max(tl.where(row >= 0, k[None, :] + 1, 0), axis=1), axis=0)


@triton.jit(do_not_specialize=["tokens", "rows"])
def _permute_kernel(
    x_ptr, out_ptr, row_ptr, end_ptr, tokens, rows, width, x_stride, K: tl.constexpr, ZERO_TAIL: tl.constexpr,
    TOKENS: tl.constexpr, WIDTH: tl.constexpr, SPARSE: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    width, x_stride = multiple(width, ALIGN), multiple(x_stride, ALIGN)
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    d = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    keep = (t < tokens)[:, None] & (d < width)[None, :]
    x = tl.load(x_ptr + t.to(tl.int64)[:, None] * x_stride + d[None, :], mask=keep)
    if SPARSE:
        for k in range(_last_choice(row_ptr, t, tokens, K, SPARSE)):
            row = tl.load(row_ptr + t * K + k, mask=t < tokens, other=-1).to(tl.int64)
            tl.store(out_ptr + row[:, None] * width + d[None, :], x, mask=keep & (row >= 0)[:, None])
    else:
        for k in tl.static_range(K):
            row = tl.load(row_ptr + t * K + k, mask=t < tokens, other=-1).to(tl.int64)
            tl.store(out_ptr + row[:, None] * width + d[None, :], x, mask=keep & (row >= 0)[:, None])
    if ZERO_TAIL:
        end = tl.load(end_ptr)
        for k in range(K):
            assignment = t * K + k
            tail = out_ptr + assignment.to(tl.int64)[:, None] * width + d[None, :]
            tl.store(tail, tl.zeros_like(x), mask=keep & ((assignment >= end) & (assignment < rows))[:, None])


@triton.jit
def _weighted_row(
    y_ptr, row_ptr, weights_ptr, t, d, k, keep, tokens, width, K: tl.constexpr, WEIGHTED: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """The k-th choice's part of each token's sum."""
    assignment = t * K + k
    row = tl.load(row_ptr + assignment, mask=t < tokens, other=-1).to(tl.int64)
    y = tl.load(y_ptr + row[:, None] * width + d[None, :], mask=keep & (row >= 0)[:, None], other=0.0).to(ACC)
    if WEIGHTED:
        y = y * tl.load(weights_ptr + assignment, mask=t < tokens, other=0.0).to(ACC)[:, None]
    return y


@triton.jit(do_not_specialize=["tokens"])
def _unpermute_kernel(
    y_ptr, out_ptr, row_ptr, weights_ptr, tokens, width, K: tl.constexpr, WEIGHTED: tl.constexpr,
    TOKENS: tl.constexpr, WIDTH: tl.constexpr, ACC: tl.constexpr, SPARSE: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    width = multiple(width, ALIGN)
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    d = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    keep = (t < tokens)[:, None] & (d < width)[None, :]
    total = tl.zeros((TOKENS, WIDTH), ACC)
    if SPARSE:
        for k in range(_last_choice(row_ptr, t, tokens, K, SPARSE)):
            total += _weighted_row(y_ptr, row_ptr, weights_ptr, t, d, k, keep, tokens, width, K, WEIGHTED, ACC)
    else:
        for k in tl.static_range(K):
            total += _weighted_row(y_ptr, row_ptr, weights_ptr, t, d, k, keep, tokens, width, K, WEIGHTED, ACC)
    out = out_ptr + t.to(tl.int64)[:, None] * width + d[None, :]
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=keep)


@triton.jit(do_not_specialize=["tokens", "rows"])
def _unpermute_backward_kernel(
    dy_ptr, y_ptr, out_ptr, row_ptr, weights_ptr, dweights_ptr, end_ptr, tokens, rows, width, K: tl.constexpr,
    WIDTH: tl.constexpr, ACC: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    width = multiple(width, ALIGN)
    t = tl.program_id(0).to(tl.int64)
    end = tl.load(end_ptr)
    for k in range(K):
        assignment = t * K + k
        row = tl.load(row_ptr + assignment).to(tl.int64)
        weight = tl.load(weights_ptr + assignment).to(ACC)
        dot = tl.zeros((WIDTH,), ACC)
        for first in range(0, width, WIDTH):
            d = first + tl.arange(0, WIDTH)
            keep = d < width
            # spread over the columns: a scalar's comparison makes no mask in the interpreter of Triton 3.9
            chosen = keep & (tl.zeros((WIDTH,), tl.int64) + row >= 0)
            slot = tl.zeros((WIDTH,), tl.int64) + assignment
            dy = tl.load(dy_ptr + t * width + d, mask=keep, other=0.0).to(ACC)
            y = tl.load(y_ptr + row * width + d, mask=chosen, other=0.0).to(ACC)
            dot += dy * y
            tl.store(out_ptr + row * width + d, (dy * weight).to(out_ptr.dtype.element_ty), mask=chosen)
            tail = out_ptr + assignment * width + d
            tl.store(
                tail,
                tl.zeros((WIDTH,), out_ptr.dtype.element_ty),
                mask=keep & (slot >= end) & (slot < rows),
            )
        tl.store(dweights_ptr + assignment, tl.sum(dot).to(dweights_ptr.dtype.element_ty))


@triton.jit(do_not_specialize=["rows", "assignments"])
def _gather_dots_kernel(dots_ptr, row_ptr, out_ptr, tiles, rows, assignments, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(row_ptr + i, mask=i < assignments, other=-1).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.float32)
    for tile in range(tiles):
        total += tl.load(dots_ptr + tile * rows.to(tl.int64) + row, mask=row >= 0, other=0.0)
    tl.store(out_ptr + i, total.to(out_ptr.dtype.element_ty), mask=i < assignments)


@functools.cache
def _accumulator(dtype: torch.dtype) -> tl.dtype:
    return tl.float64 if dtype is torch.float64 else tl.float32


@functools.lru_cache(maxsize=256)
def _blocks(width: int, element_size: int) -> tuple[int, int, int]:
    """(tokens, columns, warps) of one program: 16 bytes per thread and load, four tokens in flight."""
    columns = min(next_power_of_2(width), 2048)
    warps = max(1, min(8, columns * element_size // (32 * 16)))
    return (4 if columns <= 1024 else 2), columns, warps


def _sparse(choices: int) -> int:
    """`choices` rounded up to a power of two if kernels treat them as mostly absent; otherwise 0."""
    return next_power_of_2(choices) if choices >= _SPARSE else 0


def permute(
    x_TD: Tensor, row_TK: Tensor, offsets_E: Tensor | None, rows: int | None = None, *, zeros: bool = False
) -> Tensor:
    """x_RD: each token copied to the rows of its choices. Reads every token once.

    Args:
        x_TD: its rows are contiguous.
        row_TK: the row of each choice, -1 for none; contiguous here and below.
        offsets_E: row ends of the experts; rows past the last one are zeros. None = unused rows are undefined.
        rows: R; None = T * K, which is the most with `offsets_E`.
        zeros: in all unused rows.
    """
    tokens, choices = row_TK.shape
    assert x_TD.shape[0] == tokens and row_TK.is_contiguous() and (x_TD.stride(1) == 1 or x_TD.shape[1] == 1)
    rows = tokens * choices if rows is None else rows
    width = x_TD.shape[1]
    out = x_TD.new_zeros(rows, width) if zeros else x_TD.new_empty(rows, width)
    if out.numel() == 0:
        return out
    block, columns, warps = _blocks(width, x_TD.element_size())
    launch(
        _permute_kernel, (cdiv(tokens, block), cdiv(width, columns)),
        x_TD, out, row_TK, None if offsets_E is None else offsets_E[-1:], tokens, rows, width, x_TD.stride(0),
        K=choices, ZERO_TAIL=offsets_E is not None, TOKENS=block, WIDTH=columns, SPARSE=_sparse(choices),
        ALIGN=divisor(width, x_TD.stride(0)), num_warps=warps,
    )  # fmt: skip
    return out


def unpermute(y_RD: Tensor, weights_TK: Tensor | None, row_TK: Tensor) -> Tensor:
    """y_TD: the weighted sum of each token's rows, accumulated in fp32 (fp64 for fp64). None weighs all by one."""
    tokens, choices = row_TK.shape
    width = y_RD.shape[1]
    assert row_TK.is_contiguous()
    out = torch.empty(tokens, width, dtype=y_RD.dtype, device=y_RD.device)
    if out.numel() == 0:
        return out
    block, columns, warps = _blocks(width, y_RD.element_size())
    launch(
        _unpermute_kernel, (cdiv(tokens, block), cdiv(width, columns)),
        y_RD.contiguous(), out, row_TK, None if weights_TK is None else weights_TK.contiguous(), tokens, width,
        K=choices, WEIGHTED=weights_TK is not None, TOKENS=block, WIDTH=columns, ACC=_accumulator(y_RD.dtype),
        SPARSE=_sparse(choices), ALIGN=divisor(width), num_warps=warps,
    )  # fmt: skip
    return out


def unpermute_backward(
    dy_TD: Tensor, y_RD: Tensor, weights_TK: Tensor, row_TK: Tensor, offsets_E: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of `unpermute`: dy_RD (zeros past the end) and dweights_TK (zeros without a choice)."""
    tokens, choices = row_TK.shape
    width = y_RD.shape[1]
    assert row_TK.is_contiguous()
    y_RD = y_RD.contiguous()
    out = torch.empty_like(y_RD)
    dweights = torch.empty(tokens, choices, dtype=weights_TK.dtype, device=weights_TK.device)
    if dweights.numel() == 0 or width == 0:
        return out, dweights.zero_()
    launch(
        _unpermute_backward_kernel, (tokens,),
        dy_TD.contiguous(), y_RD, out, row_TK, weights_TK.contiguous(), dweights, offsets_E[-1:],
        tokens, y_RD.shape[0], width,
        K=choices, WIDTH=min(next_power_of_2(width), 1024), ACC=_accumulator(y_RD.dtype), ALIGN=divisor(width),
        num_warps=4,
    )  # fmt: skip
    return out, dweights


def gather_dots(dots: Tensor, row_TK: Tensor, dtype: torch.dtype) -> Tensor:
    """[T, K]: the sum over tiles of `dots` [tiles, R] at each choice's row; zero without a choice."""
    out = torch.empty(row_TK.shape, dtype=dtype, device=dots.device)
    if out.numel():
        block = 256
        launch(
            _gather_dots_kernel, (cdiv(out.numel(), block),),
            dots, row_TK, out, dots.shape[0], dots.shape[1], out.numel(),
            BLOCK=block,
        )  # fmt: skip
    return out
