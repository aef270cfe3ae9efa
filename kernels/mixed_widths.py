"""The activation's backward pass over the values of a topology whose experts differ in width.

Values lie as `topology` says: the rows of an expert one after another, each as wide as the expert.

Shapes: R rows, P planes (gate and up: 2, else 1), V values of one plane, T tokens, K choices.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from foundry_moe_kernels.launch import launch
from foundry_moe_kernels.pointwise import activation_backward_tile
from foundry_moe_kernels.sizes import next_power_of_2
from foundry_moe_kernels.sparse_rows import load_multiple, multiple
from foundry_moe_kernels.topology import Topology
from torch import Tensor


@triton.jit(do_not_specialize=["plane"])
def _backward_kernel(
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


def activation_backward_(
    dh_V: Tensor,
    z_PV: Tensor,
    topology: Topology,
    activation: str,
    weights_TK: Tensor | None,
    source_R: Tensor,
) -> Tensor | None:
    """z_PV becomes its gradient, dh_V the weighted h.

    Returns:
        Given weights, fp32 [1, R]: dot(dh, h) of each row, from dh before it was weighted.
    """
    planes = z_PV.shape[0]
    weighted = weights_TK is not None
    dots = torch.empty(1, topology.num_rows, dtype=torch.float32, device=dh_V.device) if weighted else None
    wide = min(next_power_of_2(max(topology.widths)), 512)
    rows = min(max(1, 2048 // wide), topology.block)
    launch(
        _backward_kernel, (topology.block_rows, topology.block // rows),
        dh_V, z_PV, weights_TK, source_R, dots,
        topology.starts_M, topology.sizes_M, topology.experts_M, topology.values_M, topology.widths_E, z_PV.stride(0),
        ACT=activation, GLU=planes == 2, WEIGHTED=weighted, ALIGNED=topology.aligned, ROWS=rows, WIDTH=wide,
        num_warps=4,
    )  # fmt: skip
    return dots
