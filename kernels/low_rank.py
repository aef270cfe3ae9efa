"""Products of LoRA adapters with few columns: each reads its large operand once. No autograd.

Forward, x A; backward, what the gradients of both factors need. The products whose result is large are steps of the
experts' own products: see `expert_products.LowRank`.

Shapes: R rows sorted by expert, E experts, K columns of the large operand, F expert width, P planes (gate and up: 2,
else 1), L columns of a factor, a power of two from 16 up of which `rank` are not padding, M block rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from foundry_moe_kernels import expert_products
from foundry_moe_kernels.expert_products import RaggedRows, Tokens
from foundry_moe_kernels.launch import cdiv, launch, next_power_of_2
from foundry_moe_kernels.pointwise import activation_backward_
from torch import Tensor

LEAST_COLUMNS = 16  # of a factor, for tensor cores


class Sizes(NamedTuple):
    """Of a program: rows and columns at a time, parts that an expert's rows are divided into, warps and stages."""

    rows: int
    columns: int
    parts: int = 1
    warps: int = 4
    stages: int = 3


# H200: not tuned yet
PROJECT = Sizes(rows=64, columns=64, stages=4)
OUTER = Sizes(rows=64, columns=128)


def columns_of(rank: int) -> int:
    """L of adapters of this rank."""
    return max(LEAST_COLUMNS, next_power_of_2(rank))


@triton.jit
def _pack_kernel(
    factor_ptr, out_ptr, experts, width, rank, scale,
    PLANES: tl.constexpr, L: tl.constexpr, APART: tl.constexpr, TRANSPOSED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    expert, plane = tl.program_id(1).to(tl.int64), tl.program_id(2)
    k = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    keep = (k < width)[:, None]
    WIDE: tl.constexpr = PLANES * L
    c = tl.arange(0, WIDE) if APART else plane * L + tl.arange(0, L)
    l = c - plane * L
    inside = keep & ((l >= 0) & (l < rank))[None, :]
    row = ((plane * experts + expert) * width + k[:, None]) * rank
    value = tl.load(factor_ptr + row + l[None, :], mask=inside, other=0.0).to(tl.float32) * scale
    if APART:
        out = ((plane * experts + expert) * width + k[:, None]) * WIDE + c[None, :]
    elif TRANSPOSED:
        out = (expert * WIDE + c[None, :]) * width + k[:, None]
    else:
        out = (expert * width + k[:, None]) * WIDE + c[None, :]
    tl.store(out_ptr + out, value.to(out_ptr.dtype.element_ty), mask=keep)


def pack(
    factor_PEKr: Tensor, dtype: torch.dtype, *, scale: float = 1.0, apart: bool = False, transposed: bool = False
) -> Tensor:
    """Factors as products read them, times scale, with zeros in columns that are padding: [E, K, P * L].

    Args:
        apart: [P, E, K, P * L], each plane with zeros in the others' columns.
        transposed: [E, P * L, K].
    """
    factor_PEKr = factor_PEKr.contiguous()
    planes, experts, width, rank = factor_PEKr.shape
    wide = planes * columns_of(rank)
    shape = (
        (planes, experts, width, wide) if apart else (experts, wide, width) if transposed else (experts, width, wide)
    )
    out = torch.empty(shape, dtype=dtype, device=factor_PEKr.device)
    launch(
        _pack_kernel, (cdiv(width, 128), experts, planes),
        factor_PEKr, out, experts, width, rank, float(scale),
        PLANES=planes, L=columns_of(rank), APART=apart, TRANSPOSED=transposed, ROWS=128, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _row_pointers(a_ptr, source_ptr, r, inside, stride, CHOICES: tl.constexpr):
    """Of rows, or of the tokens of rows, if there are several choices a token (CHOICES above 0)."""
    at = r
    if CHOICES:
        at = tl.maximum(tl.load(source_ptr + r, mask=inside, other=0), 0) // CHOICES
    return a_ptr + at.to(tl.int64)[:, None] * stride


@triton.jit(do_not_specialize=["num_rows"])
def _project_kernel(
    a_ptr, source_ptr, factor_ptr, out_ptr, entries_ptr, count_ptr, num_rows, width, stride,
    CHOICES: tl.constexpr, L: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0) // (BLOCK // ROWS)
    if block >= tl.load(count_ptr):
        return
    entry = entries_ptr + block * 4
    expert = tl.load(entry).to(tl.int64)
    size = tl.load(entry + 2)
    row = tl.load(entry + 3) + tl.program_id(0) % (BLOCK // ROWS) * ROWS
    if row >= size:
        return
    i = row + tl.arange(0, ROWS)
    inside = i < size
    r = tl.load(entry + 1) + i
    a_row = _row_pointers(a_ptr, source_ptr, r, inside, stride, CHOICES)
    k = tl.arange(0, COLUMNS)
    l = tl.arange(0, L)
    factor = factor_ptr + expert * width * L + k[:, None] * L + l[None, :]
    acc = tl.zeros((ROWS, L), tl.float32)
    for first in range(0, width, COLUMNS):
        if EVEN:
            a = tl.load(a_row + (first + k)[None, :], mask=inside[:, None], other=0.0)
            b = tl.load(factor + first * L)
        else:
            keep = first + k < width
            a = tl.load(a_row + (first + k)[None, :], mask=inside[:, None] & keep[None, :], other=0.0)
            b = tl.load(factor + first * L, mask=keep[:, None], other=0.0)
        acc = tl.dot(a, b, acc)
    tl.store(out_ptr + r.to(tl.int64)[:, None] * L + l[None, :], acc.to(out_ptr.dtype.element_ty), mask=inside[:, None])


def project(a: Tensor | Tokens, factor_EKL: Tensor, rows: RaggedRows) -> Tensor:
    """[R, L]: each row, or its token, times its expert's factor; rows past the end are undefined.

    Args:
        a: [R, K].
        factor_EKL: in the dtype of a, zeros in columns that are padding.
    """
    matrix, source_R, choices = (a.x_TD, a.source_R, a.choices) if isinstance(a, Tokens) else (a, None, 0)
    _, width, columns = factor_EKL.shape
    out_RL = torch.empty(rows.num_rows, columns, dtype=matrix.dtype, device=matrix.device)
    if rows.num_rows:
        sizes = PROJECT
        block = expert_products.BLOCK
        height = min(sizes.rows, block)
        launch(
            _project_kernel, (rows.entries_M4.shape[0] * (block // height),),
            matrix, source_R, factor_EKL, out_RL, rows.entries_M4, rows.count, rows.num_rows, width, matrix.stride(0),
            CHOICES=choices, L=columns, BLOCK=block, ROWS=height, COLUMNS=sizes.columns,
            EVEN=width % sizes.columns == 0, num_warps=sizes.warps, num_stages=sizes.stages,
        )  # fmt: skip
    return out_RL


@triton.jit
def _span(offsets_ptr, expert, part, parts, ROWS: tl.constexpr):
    """The rows [first, last) of one part of an expert's."""
    start = tl.load(offsets_ptr + expert - 1, mask=expert > 0, other=0)
    end = tl.load(offsets_ptr + expert)
    height = tl.cdiv(tl.cdiv(end - start, ROWS), parts) * ROWS
    first = start + part * height
    return first, tl.minimum(first + height, end)


@triton.jit(do_not_specialize=["num_rows"])
def _outer_kernel(
    a_ptr, source_ptr, low_ptr, weights_ptr, factor_ptr, partial_ptr, out_ptr, offsets_ptr,
    num_rows, width, stride, low_stride, factor_stride, rank, plane_size, scale,
    CHOICES: tl.constexpr, PLANES: tl.constexpr, WEIGHTED: tl.constexpr, PROJECTED: tl.constexpr, L: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """low is [R, PLANES * L], and out [PLANES, parts, E, K, rank].

    PROJECTED: also partial[chunk of columns, R, L] = a factor, of those columns; there is one plane then.
    """
    expert = tl.program_id(1)
    first, last = _span(offsets_ptr, expert, tl.program_id(2), tl.num_programs(2), ROWS)
    k = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    keep = k < width
    l = tl.arange(0, L)
    wide = tl.arange(0, PLANES * L)
    acc = tl.zeros((COLUMNS, PLANES * L), tl.float32)
    if PROJECTED:
        factor = tl.load(
            factor_ptr + (expert.to(tl.int64) * width + k[:, None]) * factor_stride + l[None, :],
            mask=keep[:, None], other=0.0,
        )  # fmt: skip
    for begin in range(first, last, ROWS):
        r = begin + tl.arange(0, ROWS)
        inside = r < last
        a_row = _row_pointers(a_ptr, source_ptr, r, inside, stride, CHOICES)
        if EVEN:
            a = tl.load(a_row + k[None, :], mask=inside[:, None], other=0.0)
        else:
            a = tl.load(a_row + k[None, :], mask=inside[:, None] & keep[None, :], other=0.0)
        at = r.to(tl.int64)[:, None]
        low = tl.load(low_ptr + at * low_stride + wide[None, :], mask=inside[:, None], other=0.0)
        if WEIGHTED:
            weight = tl.load(weights_ptr + tl.load(source_ptr + r, mask=inside, other=0), mask=inside, other=0.0)
            low = (low.to(tl.float32) * weight.to(tl.float32)[:, None]).to(low.dtype)
        acc = tl.dot(tl.trans(a), low, acc)
        if PROJECTED:
            part = tl.dot(a, factor)
            out = partial_ptr + (tl.program_id(0).to(tl.int64) * num_rows + at) * L + l[None, :]
            tl.store(out, part.to(partial_ptr.dtype.element_ty), mask=inside[:, None])
    slot = (tl.program_id(2) * tl.num_programs(1) + expert).to(tl.int64)
    place = (wide // L).to(tl.int64) * plane_size + wide % L
    out = out_ptr + (slot * width + k[:, None]) * rank + place[None, :]
    tl.store(out, acc * scale, mask=keep[:, None] & (wide % L < rank)[None, :])


def outer(
    a: Tensor | Tokens,
    low: Tensor,
    rows: RaggedRows,
    rank: int,
    *,
    planes: int = 1,
    scale: float = 1.0,
    weights_TK: Tensor | None = None,
    source_R: Tensor | None = None,
    factor_EKL: Tensor | None = None,
    out: Tensor | None = None,
    projected: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Sums over each expert's rows of a_r low_r, fp32 [P, E, K, rank], and, given a factor, [R, L] = a factor.

    Args:
        a: [R, K].
        low: [R, P * L], columns of a tensor that may have more.
        weights_TK, source_R: multiply each row of low.
        factor_EKL: columns of a tensor that may have more.
        out, projected: for the results, which are made here without.
    """
    matrix, choices = (a.x_TD, a.choices) if isinstance(a, Tokens) else (a, 0)
    source_R = a.source_R if isinstance(a, Tokens) else source_R
    experts, width, columns = rows.offsets_E.shape[0], matrix.shape[1], low.shape[1] // planes
    sizes = OUTER
    chunks = cdiv(width, sizes.columns)
    if out is None or sizes.parts > 1:
        made = torch.empty(planes, sizes.parts, experts, width, rank, dtype=torch.float32, device=matrix.device)
    else:
        made = out.view(planes, 1, experts, width, rank)
    partial = None
    if factor_EKL is not None:
        partial = torch.empty(chunks, rows.num_rows, columns, dtype=matrix.dtype, device=matrix.device)
    launch(
        _outer_kernel, (chunks, experts, sizes.parts),
        matrix, source_R, low, weights_TK, factor_EKL, partial, made, rows.offsets_E,
        rows.num_rows, width, matrix.stride(0), low.stride(0),
        0 if factor_EKL is None else factor_EKL.stride(1), rank, made[0].numel(), float(scale),
        CHOICES=choices, PLANES=planes, WEIGHTED=weights_TK is not None, PROJECTED=partial is not None, L=columns,
        ROWS=sizes.rows, COLUMNS=sizes.columns, EVEN=width % sizes.columns == 0, num_warps=sizes.warps,
        num_stages=sizes.stages,
    )  # fmt: skip
    if partial is not None:
        projected = torch.sum(partial, 0) if projected is None else torch.sum(partial, 0, out=projected)
    if sizes.parts == 1:
        return made[:, 0], projected
    whole = made.sum(1)
    return whole if out is None else out.copy_(whole.view(out.shape)), projected


class Hidden(NamedTuple):
    """Results of `hidden_backward_`: fp32 gradients, db [P, E, F, rank] and da [E, F, rank]; v [R, P * L]; dots."""

    db: Tensor
    da: Tensor
    v_RL: Tensor
    dots: Tensor | None


def hidden_backward_(
    dh_RF: Tensor,
    z_PRF: Tensor,
    u_RL: Tensor,
    v_down_RL: Tensor,
    b_PEFL: Tensor,
    rows: RaggedRows,
    rank: int,
    *,
    scale: float,
    activation: str,
    weights_TK: Tensor | None,
    source_R: Tensor,
) -> Hidden:
    """Through the activation: z_PRF becomes its gradient dz. In the same pass over them the products of adapters.

    Args:
        dh_RF: gradient of each row's hidden units, not yet weighted.
        u_RL: x A of the up products, [R, P * L].
        v_down_RL: dy B of the down product, not weighted.
        b_PEFL: B of the up products as `LowRank` has them: [P, E, F, P * L], of plane p in columns p * L and on.

    Returns:
        db: of dz and u, times scale. da: of h, weighted, and v_down. v_RL: dz B. dots: fp32 [chunks, R], which add up
        to the gradient of each row's weight.
    """
    planes, num_rows, _ = z_PRF.shape
    columns = v_down_RL.shape[1]
    # In one kernel with these products, whose tiles change layout for each, the activation took as long as both do
    # apart: 0.93 ms, of which the pass over memory is 0.45 (H100, OLMoE's shape)
    dots = activation_backward_(dh_RF, z_PRF, rows.offsets_E, activation, weights_TK, source_R)
    db = torch.empty(planes, *b_PEFL.shape[1:3], rank, dtype=torch.float32, device=z_PRF.device)
    v_RL = torch.empty(num_rows, planes * columns, dtype=z_PRF.dtype, device=z_PRF.device)
    for plane, (z_RF, b_EFL) in enumerate(zip(z_PRF, b_PEFL, strict=True)):
        own = slice(plane * columns, (plane + 1) * columns)
        outer(
            z_RF,
            u_RL[:, own],
            rows,
            rank,
            scale=scale,
            factor_EKL=b_EFL[..., own],
            out=db[plane],
            projected=v_RL[:, own],
        )
    return Hidden(db, outer(dh_RF, v_down_RL, rows, rank)[0][0], v_RL, dots)
