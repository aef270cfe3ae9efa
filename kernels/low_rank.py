"""Products of LoRA adapters with few columns: each reads its large operand once. No autograd.

Forward, x A; backward, what the gradients of both factors need. The products whose result is large are steps of the
experts' own products: see `expert_products.LowRank`.

Shapes: R rows sorted by expert, E experts, K columns of the large operand, F expert width, Y planes (gate and up: 2,
else 1), L columns of a factor, a power of two from 16 up of which `rank` are not padding, M block rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from foundry_moe_kernels import expert_products
from foundry_moe_kernels.activations import activate_with_grad, formula, glu_with_grad
from foundry_moe_kernels.expert_products import RaggedRows, Tokens
from foundry_moe_kernels.launch import cdiv, launch, next_power_of_2
from foundry_moe_kernels.sparse_kernels import load_within
from torch import Tensor

LEAST_COLUMNS = 16  # of a factor, for tensor cores


class ProgramSize(NamedTuple):
    """Of a program: rows and columns at a time, warps and stages."""

    rows: int
    columns: int
    warps: int = 4
    stages: int = 3


# H200: the fastest of 16 each for the shapes of OLMoE and Qwen3, within 2% of it for Mixtral's
PROJECT = ProgramSize(rows=128, columns=64)
OUTER = ProgramSize(rows=32, columns=128, stages=4)
OUTER_PROJECTED = ProgramSize(rows=64, columns=128)
PLANES_OUTER = ProgramSize(rows=64, columns=256)
HIDDEN = ProgramSize(rows=16, columns=128)
WIDE_HIDDEN = ProgramSize(rows=16, columns=128, warps=8)  # for experts of 1024 and wider


def columns_of(rank: int) -> int:
    """L of adapters of this rank."""
    return max(LEAST_COLUMNS, next_power_of_2(rank))


class Factors(NamedTuple):
    """A [E, K, rank] and B [E, N, rank] of w1, v1 and w2; None for a matrix without an adapter."""

    w1_a: Tensor | None
    w1_b: Tensor | None
    v1_a: Tensor | None
    v1_b: Tensor | None
    w2_a: Tensor | None
    w2_b: Tensor | None

    @property
    def rank(self) -> int:
        return next(factor.shape[2] for factor in self if factor is not None)


class Packed(NamedTuple):
    """Factors as products read them, with zeros in columns that are padding: A [E, Y * L, K]; B times the scale.

    up_b: [Y, E, F, Y * L], each plane with zeros in the others' columns.
    down_b: [1, E, D, L].
    """

    up_a: Tensor
    up_b: Tensor
    down_a: Tensor
    down_b: Tensor


@triton.jit
def _pack_a(factor_ptr, out_ptr, width, rank, PLANE: tl.constexpr, PLANES: tl.constexpr, L: tl.constexpr,
            ROWS: tl.constexpr):  # fmt: skip
    expert = tl.program_id(1).to(tl.int64)
    k = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    keep = (k < width)[:, None]
    l = tl.arange(0, L)
    value = tl.zeros((ROWS, L), tl.float32)
    if factor_ptr is not None:
        at = factor_ptr + (expert * width + k[:, None]) * rank + l[None, :]
        value = tl.load(at, mask=keep & (l < rank)[None, :], other=0.0).to(tl.float32)
    out = out_ptr + (expert * PLANES * L + PLANE * L + l[None, :]) * width + k[:, None]
    tl.store(out, value.to(out_ptr.dtype.element_ty), mask=keep)


@triton.jit
def _pack_b(factor_ptr, out_ptr, width, rank, scale, PLANE: tl.constexpr, PLANES: tl.constexpr, L: tl.constexpr,
            ROWS: tl.constexpr):  # fmt: skip
    expert = tl.program_id(1).to(tl.int64)
    k = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    keep = (k < width)[:, None]
    c = tl.arange(0, PLANES * L)
    l = c - PLANE * L
    value = tl.zeros((ROWS, PLANES * L), tl.float32)
    if factor_ptr is not None:
        at = factor_ptr + (expert * width + k[:, None]) * rank + l[None, :]
        value = tl.load(at, mask=keep & ((l >= 0) & (l < rank))[None, :], other=0.0).to(tl.float32) * scale
    row = (PLANE * tl.num_programs(1).to(tl.int64) + expert) * width + k[:, None]
    tl.store(out_ptr + row * PLANES * L + c[None, :], value.to(out_ptr.dtype.element_ty), mask=keep)


@triton.jit
def _pack_kernel(
    w1_a, w1_b, v1_a, v1_b, w2_a, w2_b, up_a, up_b, down_a, down_b, d, f, rank, scale,
    PLANES: tl.constexpr, L: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    factor = tl.program_id(2)
    if factor == 0:
        _pack_a(w1_a, up_a, d, rank, 0, PLANES, L, ROWS)
    elif factor == 1:
        _pack_b(w1_b, up_b, f, rank, scale, 0, PLANES, L, ROWS)
    elif factor == 2:
        _pack_a(w2_a, down_a, f, rank, 0, 1, L, ROWS)
    elif factor == 3:
        _pack_b(w2_b, down_b, d, rank, scale, 0, 1, L, ROWS)
    elif factor == 4:
        _pack_a(v1_a, up_a, d, rank, 1, PLANES, L, ROWS)
    else:
        _pack_b(v1_b, up_b, f, rank, scale, 1, PLANES, L, ROWS)


def pack(factors: Factors, like_EDF: Tensor, planes: int, scale: float) -> Packed:
    """The factors of weights w2 like these, in their dtype: one launch."""
    experts, d, f = like_EDF.shape
    factors = Factors(*(None if factor is None else factor.contiguous() for factor in factors))
    columns = columns_of(factors.rank)
    packed = Packed(
        like_EDF.new_empty(experts, planes * columns, d),
        like_EDF.new_empty(planes, experts, f, planes * columns),
        like_EDF.new_empty(experts, columns, f),
        like_EDF.new_empty(1, experts, d, columns),
    )
    launch(
        _pack_kernel, (cdiv(max(d, f), 128), experts, 2 * planes + 2),
        *factors, *packed, d, f, factors.rank, float(scale),
        PLANES=planes, L=columns, ROWS=128, num_warps=4,
    )  # fmt: skip
    return packed


@triton.jit
def _row_pointers(a_ptr, source_ptr, r, inside, stride, CHOICES: tl.constexpr):
    """Pointers to rows, or to the tokens of rows, if there are several choices per token (CHOICES above 0)."""
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
    factor = factor_ptr + (expert * L + l[:, None]) * width + k[None, :]
    acc = tl.zeros((ROWS, L), tl.float32)
    for first in range(0, width, COLUMNS):
        within = None if EVEN else first + k < width
        a = load_within(a_row + (first + k)[None, :], inside, within)
        acc = tl.dot(a, tl.trans(load_within(factor + first, None, within)), acc)
    tl.store(out_ptr + r.to(tl.int64)[:, None] * L + l[None, :], acc.to(out_ptr.dtype.element_ty), mask=inside[:, None])


def project(a: Tensor | Tokens, factor_ELK: Tensor, rows: RaggedRows) -> Tensor:
    """[R, L]: each row, or its token, times its expert's factor; rows past the end are undefined.

    Args:
        a: [R, K].
        factor_ELK: in the dtype of a, zeros in columns that are padding.
    """
    matrix, source_R, choices = (a.x_TD, a.source_R, a.choices) if isinstance(a, Tokens) else (a, None, 0)
    _, columns, width = factor_ELK.shape
    out_RL = torch.empty(rows.num_rows, columns, dtype=matrix.dtype, device=matrix.device)
    if rows.num_rows:
        sizes = PROJECT
        block = expert_products.BLOCK
        entries_M4, count = rows.blocks[block]
        height = min(sizes.rows, block)
        launch(
            _project_kernel, (entries_M4.shape[0] * (block // height),),
            matrix, source_R, factor_ELK, out_RL, entries_M4, count, rows.num_rows, width, matrix.stride(0),
            CHOICES=choices, L=columns, BLOCK=block, ROWS=height, COLUMNS=sizes.columns,
            EVEN=width % sizes.columns == 0, num_warps=sizes.warps, num_stages=sizes.stages,
        )  # fmt: skip
    return out_RL


@triton.jit
def _span(offsets_ptr, expert):
    """The rows [first, last) of an expert."""
    first = tl.load(offsets_ptr + expert - 1, mask=expert > 0, other=0)
    return first, tl.load(offsets_ptr + expert)


@triton.jit(do_not_specialize=["num_rows"])
def _outer_kernel(
    a_ptr, source_ptr, low_ptr, weights_ptr, factor_ptr, partial_ptr, out_ptr, offsets_ptr,
    num_rows, width, stride, low_stride, factor_stride, rank, plane_size, scale,
    CHOICES: tl.constexpr, PLANES: tl.constexpr, WEIGHTED: tl.constexpr, PROJECTED: tl.constexpr, L: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """A program has columns of `a` and an expert. low is [R, PLANES * L], and out [PLANES, E, K, rank].

    PROJECTED: also partial[chunk of columns, R] = a factor, of those columns; there is one plane then.
    """
    chunk, expert = tl.program_id(0), tl.program_id(1)
    if CHOICES:  # programs of the same columns run at the same time: L2 then holds these columns of all tokens
        expert, chunk = tl.program_id(0), tl.program_id(1)
    first, last = _span(offsets_ptr, expert)
    k = chunk * COLUMNS + tl.arange(0, COLUMNS)
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
        a = load_within(a_row + k[None, :], inside, None if EVEN else keep)
        at = r.to(tl.int64)[:, None]
        low = tl.load(low_ptr + at * low_stride + wide[None, :], mask=inside[:, None], other=0.0)
        if WEIGHTED:
            weight = tl.load(weights_ptr + tl.load(source_ptr + r, mask=inside, other=0), mask=inside, other=0.0)
            low = (low.to(tl.float32) * weight.to(tl.float32)[:, None]).to(low.dtype)
        acc = tl.dot(tl.trans(a), low, acc)
        if PROJECTED:
            out = partial_ptr + (chunk.to(tl.int64) * num_rows + at) * low_stride + l[None, :]
            tl.store(out, tl.dot(a, factor).to(partial_ptr.dtype.element_ty), mask=inside[:, None])
    place = (wide // L).to(tl.int64) * plane_size + wide % L
    out = out_ptr + (expert.to(tl.int64) * width + k[:, None]) * rank + place[None, :]
    tl.store(out, acc * scale, mask=keep[:, None] & (wide % L < rank)[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def _planes_outer_kernel(
    z_ptr, u_ptr, b_ptr, partial_ptr, out_ptr, offsets_ptr, num_rows, width, rank, plane_size, scale,
    PLANES: tl.constexpr, L: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Each plane of z [PLANES, R, F] with its columns of u; out is [PLANES, E, F, rank]."""
    plane = tl.program_id(2).to(tl.int64)
    WIDE: tl.constexpr = PLANES * L
    _outer_kernel(
        z_ptr + plane * num_rows * width, None, u_ptr + plane * L, None,
        b_ptr + plane * tl.num_programs(1) * width * WIDE + plane * L, partial_ptr + plane * L,
        out_ptr + plane * plane_size, offsets_ptr, num_rows, width, width, WIDE, WIDE, rank, plane_size, scale,
        0, 1, False, True, L, ROWS, COLUMNS, EVEN,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def _activation_outer_kernel(
    dh_ptr, z_ptr, low_ptr, weights_ptr, source_ptr, dots_ptr, out_ptr, offsets_ptr, num_rows, width, rank,
    ACT: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, SHIFT: tl.constexpr, GLU: tl.constexpr,
    WEIGHTED: tl.constexpr, L: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """z becomes its gradient, as in `pointwise`; out [E, F, rank] sums h and low, and dots is [chunks, R]."""
    chunk, expert = tl.program_id(0), tl.program_id(1)
    first, last = _span(offsets_ptr, expert)
    k = chunk * COLUMNS + tl.arange(0, COLUMNS)
    keep = k < width
    l = tl.arange(0, L)
    dtype = z_ptr.dtype.element_ty
    up_at = num_rows.to(tl.int64) * width
    acc = tl.zeros((COLUMNS, L), tl.float32)
    for begin in range(first, last, ROWS):
        r = begin + tl.arange(0, ROWS)
        inside = r < last
        here = inside[:, None] if EVEN else inside[:, None] & keep[None, :]
        at = r.to(tl.int64)[:, None] * width + k[None, :]
        dh = tl.load(dh_ptr + at, mask=here, other=0.0).to(tl.float32)
        gate = tl.load(z_ptr + at, mask=here, other=0.0).to(tl.float32)
        low = tl.load(low_ptr + r.to(tl.int64)[:, None] * L + l[None, :], mask=inside[:, None], other=0.0)
        weight = tl.full((ROWS,), 1.0, tl.float32)
        if WEIGHTED:
            source = tl.load(source_ptr + r, mask=inside, other=0)
            weight = tl.load(weights_ptr + source, mask=inside, other=0.0).to(tl.float32)
        weighted = dh * weight[:, None]
        if GLU:
            up = tl.load(z_ptr + up_at + at, mask=here, other=0.0).to(tl.float32)
            h, dgate, dup = glu_with_grad(gate, up, ACT, ALPHA, LIMIT, SHIFT)
            tl.store(z_ptr + up_at + at, (weighted * dup).to(dtype), mask=here)
        else:
            h, dgate = activate_with_grad(gate, ACT)
        tl.store(z_ptr + at, (weighted * dgate).to(dtype), mask=here)
        if WEIGHTED:
            tl.store(dots_ptr + chunk.to(tl.int64) * num_rows + r, tl.sum(dh * h, axis=1), mask=inside)
        acc = tl.dot(tl.trans((h * weight[:, None]).to(dtype)), low, acc)
    out = out_ptr + (expert.to(tl.int64) * width + k[:, None]) * rank + l[None, :]
    tl.store(out, acc, mask=keep[:, None] & (l < rank)[None, :])


def _options(sizes: ProgramSize, width: int) -> dict[str, Any]:
    """Constants of kernels whose programs have columns of an operand of this width."""
    return {
        "ROWS": sizes.rows, "COLUMNS": sizes.columns, "EVEN": width % sizes.columns == 0, "num_warps": sizes.warps,
        "num_stages": sizes.stages,
    }  # fmt: skip


def outer(
    a: Tensor | Tokens,
    low: Tensor,
    rows: RaggedRows,
    rank: int,
    *,
    planes: int = 1,
    scale: float = 1.0,
    weights_TK: Tensor | None = None,
    factor_EKL: Tensor | None = None,
    source_R: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Sums over each expert's rows of a_r low_r, fp32 [Y, E, K, rank], and, given a factor, [R, L] = a factor.

    Args:
        a: [R, K].
        low: [R, Y * L].
        weights_TK, source_R: multiply each row of low.
    """
    matrix, choices = (a.x_TD, a.choices) if isinstance(a, Tokens) else (a, 0)
    source_R = a.source_R if isinstance(a, Tokens) else source_R
    experts, width, columns = rows.offsets_E.shape[0], matrix.shape[1], low.shape[1] // planes
    sizes = OUTER if factor_EKL is None else OUTER_PROJECTED
    chunks = cdiv(width, sizes.columns)
    made = torch.empty(planes, experts, width, rank, dtype=torch.float32, device=matrix.device)
    partial = None
    if factor_EKL is not None:
        partial = torch.empty(chunks, rows.num_rows, columns, dtype=matrix.dtype, device=matrix.device)
    launch(
        _outer_kernel, (experts, chunks) if choices else (chunks, experts),
        matrix, source_R, low, weights_TK, factor_EKL, partial, made, rows.offsets_E,
        rows.num_rows, width, matrix.stride(0), low.stride(0), columns, rank, made[0].numel(), float(scale),
        CHOICES=choices, PLANES=planes, WEIGHTED=weights_TK is not None, PROJECTED=partial is not None, L=columns,
        **_options(sizes, width),
    )  # fmt: skip
    return made, None if partial is None else torch.sum(partial, 0)


def hidden_backward_(
    dh_RF: Tensor,
    z_YRF: Tensor,
    u_RL: Tensor,
    v_down_RL: Tensor,
    b_YEFL: Tensor,
    rows: RaggedRows,
    rank: int,
    *,
    scale: float,
    activation: str,
    weights_TK: Tensor | None,
    source_R: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The backward pass of the activation and its adapters' products, in two launches. z_YRF becomes its gradient dz.

    Args:
        dh_RF: gradient of each row's hidden units, not yet weighted.
        u_RL: x A of the up products, [R, Y * L].
        v_down_RL: dy B of the down product, not weighted.
        b_YEFL: B of the up products as `LowRank` has them: [Y, E, F, Y * L], of plane p in columns p * L and on.

    Returns:
        db: fp32 [Y, E, F, rank], of dz and u, times scale. da: fp32 [E, F, rank], of h, weighted, and v_down. v_RL:
        dz B, [R, Y * L]. dots: fp32 [chunks, R], which add up to the gradient of each row's weight.
    """
    planes, num_rows, width = z_YRF.shape
    columns, experts = v_down_RL.shape[1], b_YEFL.shape[1]
    like: dict[str, Any] = {"device": z_YRF.device}
    act, alpha, limit, shift = formula(activation)
    # H100, Qwen3's layer: 0.82 of full training with the product of h in the activation's launch, 0.83 with h written
    # and read again. With those of dz there too, whose tiles change layout for each, it took longer
    sizes = HIDDEN if width < 1024 else WIDE_HIDDEN
    chunks = cdiv(width, sizes.columns)
    da = torch.empty(experts, width, rank, dtype=torch.float32, **like)
    dots = None if weights_TK is None else torch.empty(chunks, num_rows, dtype=torch.float32, **like)
    launch(
        _activation_outer_kernel, (chunks, experts),
        dh_RF, z_YRF, v_down_RL, weights_TK, source_R, dots, da, rows.offsets_E, num_rows, width, rank,
        ACT=act, ALPHA=alpha, LIMIT=limit, SHIFT=shift, GLU=planes == 2, WEIGHTED=weights_TK is not None, L=columns,
        **_options(sizes, width),
    )  # fmt: skip
    chunks = cdiv(width, PLANES_OUTER.columns)
    db = torch.empty(planes, experts, width, rank, dtype=torch.float32, **like)
    partial = torch.empty(chunks, num_rows, planes * columns, dtype=z_YRF.dtype, **like)
    launch(
        _planes_outer_kernel, (chunks, experts, planes),
        z_YRF, u_RL, b_YEFL, partial, db, rows.offsets_E, num_rows, width, rank, db[0].numel(), float(scale),
        PLANES=planes, L=columns, **_options(PLANES_OUTER, width),
    )  # fmt: skip
    return db, da, torch.sum(partial, 0), dots
