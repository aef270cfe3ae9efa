"""The activation, forwards and backwards, row by row: for products that do not carry it in their epilogue.

Shapes: R rows, E experts, F expert width, Y planes (gate and up: 2, else 1), W values of one plane, T tokens,
K choices.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from foundry_moe_kernels.activations import activate as _activate
from foundry_moe_kernels.activations import activate_with_grad, formula, glu, glu_with_grad
from foundry_moe_kernels.launch import cdiv, divisor, launch, load_multiple, multiple, next_power_of_2
from foundry_moe_kernels.topology import Topology
from torch import Tensor


@triton.jit
def _load_pair(
    ptr, base, first, inside, width, up_at, GLU: tl.constexpr, INTERLEAVED: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Gate and up in fp32, of columns from `first` of rows that begin at `base` [ROWS]; up is gate unless GLU."""
    if INTERLEAVED:
        f = 2 * first + tl.arange(0, 2 * WIDTH)
        keep = inside[:, None] & (f < 2 * width)[None, :]
        both = tl.load(ptr + base[:, None] + f[None, :], mask=keep, other=0.0).to(tl.float32)
        gate, up = tl.split(tl.reshape(both, (ROWS, WIDTH, 2)))
    else:
        f = first + tl.arange(0, WIDTH)
        keep = inside[:, None] & (f < width)[None, :]
        at = base[:, None] + f[None, :]
        gate = tl.load(ptr + at, mask=keep, other=0.0).to(tl.float32)
        up = gate
        if GLU:
            up = tl.load(ptr + up_at + at, mask=keep, other=0.0).to(tl.float32)
    return gate, up


@triton.jit
def _store_pair(
    ptr, gate, up, base, first, inside, width, up_at, GLU: tl.constexpr, INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    dtype = ptr.dtype.element_ty
    if INTERLEAVED:
        f = 2 * first + tl.arange(0, 2 * WIDTH)
        keep = inside[:, None] & (f < 2 * width)[None, :]
        both = tl.reshape(tl.join(gate.to(dtype), up.to(dtype)), (ROWS, 2 * WIDTH))
        tl.store(ptr + base[:, None] + f[None, :], both, mask=keep)
    else:
        f = first + tl.arange(0, WIDTH)
        keep = inside[:, None] & (f < width)[None, :]
        at = base[:, None] + f[None, :]
        tl.store(ptr + at, gate.to(dtype), mask=keep)
        if GLU:
            tl.store(ptr + up_at + at, up.to(dtype), mask=keep)


@triton.jit(do_not_specialize=["up_rows", "experts"])
def _activate_kernel(
    z_ptr, h_ptr, bias_ptr, offsets_ptr, up_rows, width, experts,
    ACT: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, SHIFT: tl.constexpr, GLU: tl.constexpr,
    SPAN: tl.constexpr, INTERLEAVED: tl.constexpr, BIASED: tl.constexpr, EXPERTS: tl.constexpr, ALIGN: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    width = multiple(width, ALIGN)
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = r < tl.load(offsets_ptr + experts - 1)
    first = tl.program_id(1) * WIDTH
    f = first + tl.arange(0, WIDTH)
    base = r.to(tl.int64) * width * SPAN
    up_at = up_rows.to(tl.int64) * width
    gate, up = _load_pair(z_ptr, base, first, inside, width, up_at, GLU, INTERLEAVED, ROWS, WIDTH)
    if BIASED:
        e = tl.arange(0, EXPERTS)
        end_E = tl.load(offsets_ptr + e, mask=e < experts, other=0x7FFFFFFF)
        expert = tl.sum((end_E[None, :] <= r[:, None]).to(tl.int32), axis=1)
        of_expert = expert.to(tl.int64) * width * SPAN
        gate_bias, up_bias = _load_pair(bias_ptr, of_expert, first, inside, width, up_at, GLU, INTERLEAVED, ROWS, WIDTH)
        dtype = z_ptr.dtype.element_ty
        gate, up = (gate + gate_bias).to(dtype), (up + up_bias).to(dtype)
        _store_pair(z_ptr, gate, up, base, first, inside, width, up_at, GLU, INTERLEAVED, ROWS, WIDTH)
        gate, up = gate.to(tl.float32), up.to(tl.float32)
    if GLU:
        h = glu(gate, up, ACT, ALPHA, LIMIT, SHIFT)
    else:
        h = _activate(gate, ACT)
    keep = inside[:, None] & (f < width)[None, :]
    tl.store(h_ptr + r.to(tl.int64)[:, None] * width + f[None, :], h.to(h_ptr.dtype.element_ty), mask=keep)


def _options(z: Tensor, activation: str, pairs: str | None) -> dict[str, Any]:
    """Constants of kernels that follow from the formula and from where gate and up are."""
    act, alpha, limit, shift = formula(activation)
    return {
        "ACT": act, "ALPHA": alpha, "LIMIT": limit, "SHIFT": shift, "GLU": bool(pairs) or z.shape[0] == 2,
        "SPAN": 2 if pairs else 1, "INTERLEAVED": pairs == "interleaved",
    }  # fmt: skip


def activate(
    z_YRF: Tensor,
    offsets_E: Tensor,
    activation: str,
    *,
    pairs: str | None = None,
    bias_EF: Tensor | None = None,
) -> Tensor:
    """h_RF = act(z[0]) (times z[1]); rows past the end are undefined.

    Args:
        z_YRF: [Y, R, F]; with `pairs` [1, R, 2 F], the gate and up of a row side by side.
        activation: a name in `activations.NAMES`; of a GLU also a `GLUFormula`.
        pairs: concatenated | interleaved.
        bias_EF: as wide as z's rows; added to z, in place. Not for two planes.
    """
    _, rows, width = z_YRF.shape
    width = width // 2 if pairs else width
    z_YRF = z_YRF if bias_EF is not None else z_YRF.contiguous()
    h_RF = torch.empty(rows, width, dtype=z_YRF.dtype, device=z_YRF.device)
    if rows and width:
        wide, experts = min(next_power_of_2(width), 2048), offsets_E.shape[0]
        block = max(1, 1024 // wide)
        launch(
            _activate_kernel, (cdiv(rows, block), cdiv(width, wide)),
            z_YRF, h_RF, bias_EF, offsets_E, 1 if pairs else rows, width, experts, **_options(z_YRF, activation, pairs),
            BIASED=bias_EF is not None, EXPERTS=next_power_of_2(experts), ALIGN=divisor(width), ROWS=block, WIDTH=wide,
            num_warps=block * wide // 512,
        )  # fmt: skip
    return h_RF


@triton.jit
def activation_backward_tile(
    dh_ptr, z_ptr, dz_ptr, dh_base, z_base, first, inside, width, weight, up_at,
    ACT: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, SHIFT: tl.constexpr, GLU: tl.constexpr,
    INTERLEAVED: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """For a tile of rows that begin at the bases and are `inside`: writes dz, and over dh the weighted h.

    Returns dot(dh, h) of each row, from dh before it was weighted.
    """
    f = first + tl.arange(0, WIDTH)
    keep = inside[:, None] & (f < width)[None, :]
    at = dh_base[:, None] + f[None, :]
    dh = tl.load(dh_ptr + at, mask=keep, other=0.0).to(tl.float32)
    gate, up = _load_pair(z_ptr, z_base, first, inside, width, up_at, GLU, INTERLEAVED, ROWS, WIDTH)
    if GLU:
        h, dgate, dup = glu_with_grad(gate, up, ACT, ALPHA, LIMIT, SHIFT)
    else:
        h, dgate = activate_with_grad(gate, ACT)
        dup = dgate
    weighted = dh * weight[:, None]
    _store_pair(
        dz_ptr, weighted * dgate, weighted * dup, z_base, first, inside, width, up_at, GLU, INTERLEAVED, ROWS, WIDTH
    )  # fmt: skip
    tl.store(dh_ptr + at, (h * weight[:, None]).to(dh_ptr.dtype.element_ty), mask=keep)
    return tl.sum(dh * h, axis=1)


@triton.jit(do_not_specialize=["up_rows"])
def _activation_backward_kernel(
    dh_ptr, z_ptr, dz_ptr, weights_ptr, source_ptr, dots_ptr, end_ptr, up_rows, width,
    ACT: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, SHIFT: tl.constexpr, GLU: tl.constexpr,
    SPAN: tl.constexpr, INTERLEAVED: tl.constexpr, WEIGHTED: tl.constexpr, ALIGN: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    width = multiple(width, ALIGN)
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = r < tl.load(end_ptr)
    weight = tl.full((ROWS,), 1.0, tl.float32)
    if WEIGHTED:
        source = tl.load(source_ptr + r, mask=inside, other=0)
        weight = tl.load(weights_ptr + source, mask=inside, other=0.0).to(tl.float32)
    base = r.to(tl.int64) * width
    up_at = up_rows.to(tl.int64) * width
    dots = tl.zeros((ROWS,), tl.float32)
    for first in range(0, width, WIDTH):
        dots += activation_backward_tile(
            dh_ptr, z_ptr, dz_ptr, base, base * SPAN, first, inside, width, weight, up_at,
            ACT, ALPHA, LIMIT, SHIFT, GLU, INTERLEAVED, ROWS, WIDTH
        )  # fmt: skip
    if WEIGHTED:
        tl.store(dots_ptr + r, dots, mask=inside)


@functools.lru_cache(maxsize=256)
def _backward_tile(width: int) -> tuple[int, int]:
    """Columns and rows of a program: the widest part that leaves the fewest threads idle, 768 as 3 x 256."""
    wide = min((1024, 512, 256, 128), key=lambda part: cdiv(width, part) * part)
    wide = min(wide, next_power_of_2(width))
    return wide, max(1, 2048 // wide)


def activation_backward_(
    dh_RF: Tensor,
    z_YRF: Tensor,
    offsets_E: Tensor,
    activation: str,
    weights_TK: Tensor | None,
    source_R: Tensor,
    *,
    pairs: str | None = None,
    out: Tensor | None = None,
) -> Tensor | None:
    """In place: z_YRF becomes its gradient, dh_RF the weighted h. Rows past the end keep what they hold.

    Args:
        z_YRF, pairs: as in `activate`.
        out: like z_YRF; receives the gradient instead of z_YRF.

    Returns:
        Given weights, fp32 [1, R]: dot(dh, h) of each row, from dh before it was weighted.
    """
    rows, width = dh_RF.shape
    assert z_YRF.shape[1:] == (rows, 2 * width if pairs else width)
    assert dh_RF.is_contiguous() and z_YRF.is_contiguous()
    dots = torch.empty(1, rows, dtype=torch.float32, device=dh_RF.device) if weights_TK is not None else None
    if rows and width:
        wide, block = _backward_tile(width)
        launch(
            _activation_backward_kernel, (cdiv(rows, block),),
            dh_RF, z_YRF, z_YRF if out is None else out, weights_TK, source_R, dots, offsets_E[-1:],
            1 if pairs else rows, width,
            **_options(z_YRF, activation, pairs), WEIGHTED=weights_TK is not None, ALIGN=divisor(width),
            ROWS=block, WIDTH=wide, num_warps=4,
        )  # fmt: skip
    return dots


@triton.jit(do_not_specialize=["plane"])
def _values_backward_kernel(
    dh_ptr, z_ptr, dz_ptr, weights_ptr, source_ptr, dots_ptr, starts, sizes, experts, values, widths_E, plane,
    ACT: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, SHIFT: tl.constexpr, GLU: tl.constexpr,
    SPAN: tl.constexpr, INTERLEAVED: tl.constexpr, WEIGHTED: tl.constexpr, ALIGN: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0)
    size = tl.load(sizes + m)
    first = tl.program_id(1) * ROWS
    if first >= size:
        return
    i = first + tl.arange(0, ROWS)
    inside = i < size
    width = load_multiple(widths_E + tl.load(experts + m), ALIGN)
    plane = multiple(plane, ALIGN)
    row = tl.load(starts + m) + i
    weight = tl.full((ROWS,), 1.0, tl.float32)
    if WEIGHTED:
        source = tl.load(source_ptr + row, mask=inside, other=0)
        weight = tl.load(weights_ptr + source, mask=inside, other=0.0).to(tl.float32)
    base = load_multiple(values + m, ALIGN) + i.to(tl.int64) * width
    dots = tl.zeros((ROWS,), tl.float32)
    for column in range(0, width, WIDTH):
        dots += activation_backward_tile(
            dh_ptr, z_ptr, dz_ptr, base, base, column, inside, width, weight, plane,
            ACT, ALPHA, LIMIT, SHIFT, GLU, INTERLEAVED, ROWS, WIDTH
        )  # fmt: skip
    if WEIGHTED:
        tl.store(dots_ptr + row, dots, mask=inside)


def values_backward_(
    dh_W: Tensor,
    z_YW: Tensor,
    topology: Topology,
    activation: str,
    weights_TK: Tensor | None,
    source_R: Tensor,
    *,
    out: Tensor | None = None,
) -> Tensor | None:
    """`activation_backward_` over the values of a topology whose experts differ in width.

    Values lie as `topology` defines: the rows of an expert one after another, each as wide as the expert.

    Returns:
        Given weights, fp32 [1, R]: dot(dh, h) of each row, from dh before it was weighted.
    """
    weighted = weights_TK is not None
    dots = torch.empty(1, topology.num_rows, dtype=torch.float32, device=dh_W.device) if weighted else None
    wide = min(next_power_of_2(max(topology.widths)), 512)
    rows = min(max(1, 2048 // wide), topology.block)
    launch(
        _values_backward_kernel, (topology.block_rows, topology.block // rows),
        dh_W, z_YW, z_YW if out is None else out, weights_TK, source_R, dots,
        topology.starts_M, topology.sizes_M, topology.experts_M, topology.values_M, topology.widths_E, z_YW.stride(0),
        **_options(z_YW, activation, None), WEIGHTED=weighted, ALIGN=divisor(topology.common_width),
        ROWS=rows, WIDTH=wide, num_warps=4,
    )  # fmt: skip
    return dots
