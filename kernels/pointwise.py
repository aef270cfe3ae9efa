"""The activation, forwards and backwards, row by row: for products that do not carry it in their epilogue.

Shapes: R rows, F expert width, P planes (gate and up: 2, else 1), V values of one plane, T tokens, K choices.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from foundry_moe_kernels.activations import activate as _activate
from foundry_moe_kernels.activations import activate_with_grad
from foundry_moe_kernels.launch import cdiv, launch, next_power_of_2
from foundry_moe_kernels.topology import Topology, load_multiple, multiple
from torch import Tensor


@triton.jit(do_not_specialize=["rows"])
def _activate_kernel(z_ptr, h_ptr, end_ptr, rows, width, ACT: tl.constexpr, GLU: tl.constexpr, WIDTH: tl.constexpr):
    r = tl.program_id(0).to(tl.int64)
    if r >= tl.load(end_ptr):
        return
    f = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    keep = f < width
    h = _activate(tl.load(z_ptr + r * width + f, mask=keep).to(tl.float32), ACT)
    if GLU:
        h *= tl.load(z_ptr + (rows + r) * width + f, mask=keep).to(tl.float32)
    tl.store(h_ptr + r * width + f, h.to(h_ptr.dtype.element_ty), mask=keep)


def activate(z_PRF: Tensor, offsets_E: Tensor, activation: str) -> Tensor:
    """h_RF = act(z[0]) (times z[1]); rows past the end are undefined."""
    planes, rows, width = z_PRF.shape
    z_PRF = z_PRF.contiguous()
    h_RF = torch.empty(rows, width, dtype=z_PRF.dtype, device=z_PRF.device)
    if rows and width:
        wide = min(next_power_of_2(width), 2048)
        launch(
            _activate_kernel, (rows, cdiv(width, wide)),
            z_PRF, h_RF, offsets_E[-1:], rows, width,
            ACT=activation, GLU=planes == 2, WIDTH=wide, num_warps=max(1, min(8, wide // 256)),
        )  # fmt: skip
    return h_RF


@triton.jit
def activation_backward_tile(
    dh_ptr, z_ptr, at, keep, weight, up_plane, ACT: tl.constexpr, GLU: tl.constexpr
):  # fmt: skip
    """Of a tile of rows, at offsets `at` where `keep`: writes dz over z, and over dh the weighted h.

    Returns dot(dh, h) of each row, from dh before it was weighted.
    """
    dtype = dh_ptr.dtype.element_ty
    dh = tl.load(dh_ptr + at, mask=keep, other=0.0).to(tl.float32)
    value, slope = activate_with_grad(tl.load(z_ptr + at, mask=keep, other=0.0).to(tl.float32), ACT)
    weighted = dh * weight[:, None]
    h = value
    dgate = weighted * slope
    if GLU:
        up = tl.load(z_ptr + up_plane + at, mask=keep, other=0.0).to(tl.float32)
        tl.store(z_ptr + up_plane + at, (weighted * value).to(dtype), mask=keep)
        h = value * up
        dgate = dgate * up
    tl.store(z_ptr + at, dgate.to(dtype), mask=keep)
    tl.store(dh_ptr + at, (h * weight[:, None]).to(dtype), mask=keep)
    return tl.sum(dh * h, axis=1)


@triton.jit(do_not_specialize=["rows"])
def _activation_backward_kernel(
    dh_ptr, z_ptr, weights_ptr, source_ptr, dots_ptr, end_ptr, rows, width,
    ACT: tl.constexpr, GLU: tl.constexpr, WEIGHTED: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = r < tl.load(end_ptr)
    weight = tl.full((ROWS,), 1.0, tl.float32)
    if WEIGHTED:
        source = tl.load(source_ptr + r, mask=inside, other=0)
        # a slot of the padded layout may be unused: -1
        weight = tl.load(weights_ptr + source, mask=inside & (source >= 0), other=0.0).to(tl.float32)
    base = r.to(tl.int64)[:, None] * width
    up_plane = rows.to(tl.int64) * width
    dots = tl.zeros((ROWS,), tl.float32)
    for first in range(0, width, WIDTH):
        f = first + tl.arange(0, WIDTH)
        keep = inside[:, None] & (f < width)[None, :]
        at = base + f[None, :]
        dots += activation_backward_tile(dh_ptr, z_ptr, at, keep, weight, up_plane, ACT, GLU)
    if WEIGHTED:
        tl.store(dots_ptr + r, dots, mask=inside)


def activation_backward_(
    dh_RF: Tensor,
    z_PRF: Tensor,
    offsets_E: Tensor,
    activation: str,
    weights_TK: Tensor | None,
    source_R: Tensor,
) -> Tensor | None:
    """In place: z_PRF becomes its gradient, dh_RF the weighted h. Rows past the end keep what they hold.

    Returns:
        Given weights, fp32 [1, R]: dot(dh, h) of each row, from dh before it was weighted.
    """
    planes, rows, width = z_PRF.shape
    if not (dh_RF.is_contiguous() and z_PRF.is_contiguous() and dh_RF.shape == (rows, width)):
        raise ValueError(f"dh {tuple(dh_RF.shape)} and z {tuple(z_PRF.shape)} must be contiguous and of one [R, F]")
    dots = torch.empty(1, rows, dtype=torch.float32, device=dh_RF.device) if weights_TK is not None else None
    if rows and width:
        # whole power-of-two parts of a row where there are: 768 as 3 x 256 leaves no thread idle
        wide = min(width & -width, 1024)
        wide = wide if wide >= 128 else min(next_power_of_2(width), 1024)
        block = max(1, 2048 // wide)
        launch(
            _activation_backward_kernel, (cdiv(rows, block),),
            dh_RF, z_PRF, weights_TK, source_R, dots, offsets_E[-1:], rows, width,
            ACT=activation, GLU=planes == 2, WEIGHTED=weights_TK is not None, ROWS=block, WIDTH=wide, num_warps=4,
        )  # fmt: skip
    return dots


@triton.jit(do_not_specialize=["plane"])
def _values_backward_kernel(
    dh_ptr, z_ptr, weights_ptr, source_ptr, dots_ptr, starts, sizes, experts, values, widths_E, plane,
    ACT: tl.constexpr, GLU: tl.constexpr, WEIGHTED: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0)
    size = tl.load(sizes + m)
    first = tl.program_id(1) * ROWS
    if first >= size:
        return
    i = first + tl.arange(0, ROWS)
    inside = i < size
    width = load_multiple(widths_E + tl.load(experts + m), ALIGNED)
    plane = multiple(plane, ALIGNED)
    row = tl.load(starts + m) + i
    weight = tl.full((ROWS,), 1.0, tl.float32)
    if WEIGHTED:
        source = tl.load(source_ptr + row, mask=inside, other=0)
        weight = tl.load(weights_ptr + source, mask=inside, other=0.0).to(tl.float32)
    base = load_multiple(values + m, ALIGNED) + i.to(tl.int64)[:, None] * width
    dots = tl.zeros((ROWS,), tl.float32)
    for column in range(0, width, WIDTH):
        f = column + tl.arange(0, WIDTH)
        keep = inside[:, None] & (f < width)[None, :]
        at = base + f[None, :]
        dots += activation_backward_tile(dh_ptr, z_ptr, at, keep, weight, plane, ACT, GLU)
    if WEIGHTED:
        tl.store(dots_ptr + row, dots, mask=inside)


def values_backward_(
    dh_V: Tensor,
    z_PV: Tensor,
    topology: Topology,
    activation: str,
    weights_TK: Tensor | None,
    source_R: Tensor,
) -> Tensor | None:
    """`activation_backward_` over the values of a topology whose experts differ in width.

    Values lie as `topology` defines: the rows of an expert one after another, each as wide as the expert.

    Returns:
        Given weights, fp32 [1, R]: dot(dh, h) of each row, from dh before it was weighted.
    """
    planes = z_PV.shape[0]
    weighted = weights_TK is not None
    dots = torch.empty(1, topology.num_rows, dtype=torch.float32, device=dh_V.device) if weighted else None
    wide = min(next_power_of_2(max(topology.widths)), 512)
    rows = min(max(1, 2048 // wide), topology.block)
    launch(
        _values_backward_kernel, (topology.block_rows, topology.block // rows),
        dh_V, z_PV, weights_TK, source_R, dots,
        topology.starts_M, topology.sizes_M, topology.experts_M, topology.values_M, topology.widths_E, z_PV.stride(0),
        ACT=activation, GLU=planes == 2, WEIGHTED=weighted, ALIGNED=topology.aligned, ROWS=rows, WIDTH=wide,
        num_warps=4,
    )  # fmt: skip
    return dots
