"""Products of LoRA adapters with few columns: each reads its large operand once. No autograd.

Forward, x A; backward, what the gradients of both factors need. The products whose result is large are steps of the
experts' own products: see `expert_products.LowRank`.

Shapes: R rows sorted by expert, E experts, K columns of the large operand, F expert width, P planes (gate and up: 2,
else 1), L columns of a factor, a power of two from 16 up of which `rank` are not padding, M block rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from foundry_moe_kernels import expert_products
from foundry_moe_kernels.activations import activate_with_grad
from foundry_moe_kernels.expert_products import RaggedRows, Tokens
from foundry_moe_kernels.launch import cdiv, launch, next_power_of_2
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
HIDDEN = Sizes(rows=16, columns=64, stages=1)


def columns_of(rank: int) -> int:
    """L of adapters of this rank."""
    return max(LEAST_COLUMNS, next_power_of_2(rank))


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
    num_rows, width, stride, low_stride, rank, plane_size, scale,
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
            factor_ptr + (expert.to(tl.int64) * width + k[:, None]) * L + l[None, :], mask=keep[:, None], other=0.0
        )
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
) -> tuple[Tensor, Tensor | None]:
    """Sums over each expert's rows of a_r low_r, fp32 [P, E, K, rank], and, given a factor, [R, L] = a factor.

    Args:
        a: [R, K].
        low: [R, P * L], columns of a tensor that may have more.
        weights_TK, source_R: multiply each row of low.
    """
    matrix, choices = (a.x_TD, a.choices) if isinstance(a, Tokens) else (a, 0)
    source_R = a.source_R if isinstance(a, Tokens) else source_R
    experts, width, columns = rows.offsets_E.shape[0], matrix.shape[1], low.shape[1] // planes
    sizes = OUTER
    chunks = cdiv(width, sizes.columns)
    out = torch.empty(planes, sizes.parts, experts, width, rank, dtype=torch.float32, device=matrix.device)
    partial = None
    if factor_EKL is not None:
        partial = torch.empty(chunks, rows.num_rows, columns, dtype=matrix.dtype, device=matrix.device)
    launch(
        _outer_kernel, (chunks, experts, sizes.parts),
        matrix, source_R, low, weights_TK, factor_EKL, partial, out, rows.offsets_E,
        rows.num_rows, width, matrix.stride(0), low.stride(0), rank, out[0].numel(), float(scale),
        CHOICES=choices, PLANES=planes, WEIGHTED=weights_TK is not None, PROJECTED=partial is not None, L=columns,
        ROWS=sizes.rows, COLUMNS=sizes.columns, EVEN=width % sizes.columns == 0, num_warps=sizes.warps,
        num_stages=sizes.stages,
    )  # fmt: skip
    return out.sum(1) if sizes.parts > 1 else out[:, 0], None if partial is None else partial.sum(0)


@triton.jit(do_not_specialize=["num_rows"])
def _hidden_kernel(
    dh_ptr, z_ptr, up_ptr, down_ptr, b_ptr, weights_ptr, source_ptr, dots_ptr, partial_ptr, db_ptr, da_ptr,
    offsets_ptr, num_rows, width, rank, factor_plane, scale,
    ACT: tl.constexpr, GLU: tl.constexpr, WEIGHTED: tl.constexpr, L: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(1)
    PLANES: tl.constexpr = 2 if GLU else 1
    first, last = _span(offsets_ptr, expert, tl.program_id(2), tl.num_programs(2), ROWS)
    f = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    keep = f < width
    l = tl.arange(0, L)
    b_at = b_ptr + (expert.to(tl.int64) * width + f[:, None]) * (PLANES * L) + l[None, :]
    b_gate = tl.load(b_at, mask=keep[:, None], other=0.0)
    db_gate = tl.zeros((COLUMNS, L), tl.float32)
    da = tl.zeros((COLUMNS, L), tl.float32)
    plane = num_rows.to(tl.int64) * width
    if GLU:
        b_up = tl.load(b_at + factor_plane + L, mask=keep[:, None], other=0.0)
        db_up = tl.zeros((COLUMNS, L), tl.float32)
    columns = tl.full((1, COLUMNS), True, tl.int1) if EVEN else keep[None, :]
    r = first + tl.arange(0, ROWS)
    at = r.to(tl.int64)[:, None] * width + f[None, :]
    mask = (r < last)[:, None] & columns
    next_dh = tl.load(dh_ptr + at, mask=mask, other=0.0)
    next_gate = tl.load(z_ptr + at, mask=mask, other=0.0)
    if GLU:
        next_up = tl.load(z_ptr + plane + at, mask=mask, other=0.0)
    for begin in range(first, last, ROWS):
        r = begin + tl.arange(0, ROWS)
        inside = r < last
        wide = r.to(tl.int64)[:, None]
        mask = inside[:, None] & columns
        at = wide * width + f[None, :]
        dh = next_dh.to(tl.float32)
        value, slope = activate_with_grad(next_gate.to(tl.float32), ACT)
        if GLU:
            up = next_up.to(tl.float32)
        # the next rows are under way while these are multiplied
        ahead = (r + ROWS < last)[:, None] & columns
        next_dh = tl.load(dh_ptr + at + ROWS * width, mask=ahead, other=0.0)
        next_gate = tl.load(z_ptr + at + ROWS * width, mask=ahead, other=0.0)
        if GLU:
            next_up = tl.load(z_ptr + plane + at + ROWS * width, mask=ahead, other=0.0)
        dtype = dh_ptr.dtype.element_ty
        weighted = dh
        if WEIGHTED:
            source = tl.load(source_ptr + r, mask=inside, other=0)
            weight = tl.load(weights_ptr + source, mask=inside, other=0.0).to(tl.float32)
            weighted = dh * weight[:, None]
        h = value
        dgate = weighted * slope
        low = up_ptr + wide * (PLANES * L) + l[None, :]
        out = partial_ptr + (tl.program_id(0).to(tl.int64) * num_rows + wide) * (PLANES * L) + l[None, :]
        if GLU:
            dup = (weighted * value).to(dtype)
            tl.store(z_ptr + plane + at, dup, mask=mask)
            h = value * up
            dgate = dgate * up
            db_up = tl.dot(tl.trans(dup), tl.load(low + L, mask=inside[:, None], other=0.0), db_up)
            tl.store(out + L, tl.dot(dup, b_up).to(dtype), mask=inside[:, None])
        dgate = dgate.to(dtype)
        tl.store(z_ptr + at, dgate, mask=mask)
        db_gate = tl.dot(tl.trans(dgate), tl.load(low, mask=inside[:, None], other=0.0), db_gate)
        tl.store(out, tl.dot(dgate, b_gate).to(dtype), mask=inside[:, None])
        h_weighted = h
        if WEIGHTED:
            dots = tl.sum(dh * h, axis=1)
            tl.store(dots_ptr + tl.program_id(0).to(tl.int64) * num_rows + r, dots, mask=inside)
            h_weighted = h * weight[:, None]
        low = tl.load(down_ptr + wide * L + l[None, :], mask=inside[:, None], other=0.0)
        da = tl.dot(tl.trans(h_weighted.to(dtype)), low, da)
    slot = (tl.program_id(2) * tl.num_programs(1) + expert).to(tl.int64)
    size = tl.num_programs(2).to(tl.int64) * tl.num_programs(1) * width * rank
    out = (slot * width + f[:, None]) * rank + l[None, :]
    mask = keep[:, None] & (l < rank)[None, :]
    tl.store(da_ptr + out, da, mask=mask)
    tl.store(db_ptr + out, db_gate * scale, mask=mask)
    if GLU:
        tl.store(db_ptr + size + out, db_up * scale, mask=mask)


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
    planes, num_rows, width = z_PRF.shape
    experts, columns = rows.offsets_E.shape[0], v_down_RL.shape[1]
    sizes = HIDDEN
    chunks = cdiv(width, sizes.columns)
    new: dict[str, Any] = {"device": z_PRF.device, "dtype": torch.float32}
    db = torch.empty(planes, sizes.parts, experts, width, rank, **new)
    da = torch.empty(sizes.parts, experts, width, rank, **new)
    partial = torch.empty(chunks, num_rows, planes * columns, dtype=z_PRF.dtype, device=z_PRF.device)
    dots = None if weights_TK is None else torch.empty(chunks, num_rows, **new)
    launch(
        _hidden_kernel, (chunks, experts, sizes.parts),
        dh_RF, z_PRF, u_RL, v_down_RL, b_PEFL, weights_TK, source_R, dots, partial, db, da, rows.offsets_E,
        num_rows, width, rank, b_PEFL[0].numel(), float(scale),
        ACT=activation, GLU=planes == 2, WEIGHTED=weights_TK is not None, L=columns, ROWS=sizes.rows,
        COLUMNS=sizes.columns, EVEN=width % sizes.columns == 0, num_warps=sizes.warps, num_stages=sizes.stages,
    )  # fmt: skip
    several = sizes.parts > 1
    return Hidden(db.sum(1) if several else db[:, 0], da.sum(0) if several else da[0], partial.sum(0), dots)
