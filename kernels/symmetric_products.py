"""Batched products of matrices whose result is symmetric, on Hopper: tiles on and below the diagonal are computed.

What is below the diagonal is stored a second time, transposed: results are symmetric to the last bit, whatever rounding
does. Sums are in fp32; fp16 and bf16.

Shapes: N matrices, n rows and columns of the result, K inner width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from foundry_moe_kernels import descriptors
from foundry_moe_kernels.launch import TensorMap, cdiv, launch
from torch import Tensor

# Two programs share a multiprocessor. H200, 64 matrices of 1024: 469 TFLOP/s. 8 warps: 434; with 6 stages, one program
# on each: 344. The best persistent kernel: 432
TILE = {"SIDE": 128, "BK": 64, "num_stages": 3, "num_warps": 4}


@triton.jit(do_not_specialize=["tiles", "k_tiles"])
def symmetric_kernel(
    a_desc, b_desc, c_desc, d_desc, out_desc, tiles, k_tiles, alpha, beta, gamma,
    ADDED: tl.constexpr, TURNED: tl.constexpr, SIDE: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """tiles: of one matrix, on and below the diagonal."""
    matrix = tl.program_id(0) // tiles
    tile = tl.program_id(0) - matrix * tiles
    row = ((tl.sqrt_rn(8.0 * tile + 1) - 1) / 2).to(tl.int32)
    column = tile - row * (row + 1) // 2
    i, j = row * SIDE, column * SIDE
    acc = tl.zeros((SIDE, SIDE), tl.float32)
    for step in range(k_tiles):
        k = step * BK
        if TURNED:
            a = a_desc.load([matrix, k, i]).reshape(BK, SIDE).T
            b = b_desc.load([matrix, k, j]).reshape(BK, SIDE)
        else:
            a = a_desc.load([matrix, i, k]).reshape(SIDE, BK)
            b = b_desc.load([matrix, j, k]).reshape(SIDE, BK).T
        acc = tl.dot(a, b, acc)
    acc *= alpha
    if ADDED >= 1:
        acc += beta * c_desc.load([matrix, i, j]).reshape(SIDE, SIDE).to(tl.float32)
    if ADDED == 2:
        acc += gamma * d_desc.load([matrix, i, j]).reshape(SIDE, SIDE).to(tl.float32)
    out = acc.to(out_desc.dtype)
    if row == column:
        index = tl.arange(0, SIDE)
        out_desc.store([matrix, i, i], tl.where(index[:, None] >= index[None, :], out, out.T).reshape(1, SIDE, SIDE))
    else:
        out_desc.store([matrix, i, j], out.reshape(1, SIDE, SIDE))
        out_desc.store([matrix, j, i], out.T.reshape(1, SIDE, SIDE))


def _boxes(tensor: Tensor, box: tuple[int, ...]) -> TensorMap:
    return _descriptor, tensor, tuple(tensor.shape), tensor.stride(), box


def _descriptor(base: Tensor, shape: Sequence[int], strides: Sequence[int], box: Sequence[int]) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor  # absent from Triton 3.3

    return TensorDescriptor(base, list(shape), list(strides), list(box))


def supported(x: Tensor) -> bool:
    """Whether `symmetric_product` takes contiguous matrices of this shape here; of N = 0 too."""
    known = x.dtype in (torch.float16, torch.bfloat16) and descriptors.device_supported(x.device)
    return known and x.is_contiguous() and all(size and size % 8 == 0 for size in x.shape[1:])


def symmetric_product(
    a: Tensor,
    b: Tensor | None = None,
    added: Sequence[Tensor] = (),
    *,
    scales: Sequence[float] = (1.0,),
    turned: bool = False,
    tile: dict[str, int] | None = None,
) -> Tensor:
    """scales[0] a b^T + scales[1] added[0] + ..., [N, n, n], where that is symmetric.

    b is a, or both are symmetric and commute but for rounding.

    Args:
        a: [N, n, K], contiguous.
        b: of a's shape; without it a.
        added: up to two symmetric matrices [N, n, n], contiguous.
        turned: a and b are [N, K, n], for a^T b.
        tile: in place of `TILE`.
    """
    b, tile = a if b is None else b, tile or TILE
    number, n, inner = (a.mT if turned else a).shape
    assert b.shape == a.shape and b.dtype == a.dtype
    side, depth = tile["SIDE"], tile["BK"]
    out = torch.empty(number, n, n, dtype=a.dtype, device=a.device)
    box, square = (1, depth, side) if turned else (1, side, depth), (1, side, side)
    rows = cdiv(n, side)
    tiles = rows * (rows + 1) // 2
    launch(
        symmetric_kernel, (number * tiles,),
        *(_boxes(one, box) for one in (a, b)), *(_boxes(one, square) for one in [*(*added, out, out)[:2], out]),
        tiles, cdiv(inner, depth), *(*scales, 0.0, 0.0)[:3],
        ADDED=len(added), TURNED=turned, **tile,
    )  # fmt: skip
    return out
