"""The element-wise parts of Muon in one pass over memory each: momentum before orthogonalisation, weights after it.

Shapes: N matrices, R rows and C columns of one.
"""

from __future__ import annotations

import triton
import triton.language as tl
from foundry_moe_kernels.launch import cdiv, divisor, launch, multiple
from torch import Tensor

BLOCK = 1024


@triton.jit(do_not_specialize=["rows", "parts"])
def momentum_kernel(
    grad_ptr, momentum_ptr, out_ptr, factor_ptr, rows, columns, parts, g_matrix, g_row, m_matrix, m_row, beta,
    NESTEROV: tl.constexpr, HAS_FACTOR: tl.constexpr, BLOCK: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    columns, g_matrix, g_row = multiple(columns, ALIGN), multiple(g_matrix, ALIGN), multiple(g_row, ALIGN)
    m_matrix, m_row = multiple(m_matrix, ALIGN), multiple(m_row, ALIGN)
    row, column = (tl.program_id(0) // parts).to(tl.int64), tl.program_id(0) % parts * BLOCK + tl.arange(0, BLOCK)
    matrix, inside = row // rows, column < columns
    grad = tl.load(grad_ptr + matrix * g_matrix + row % rows * g_row + column, mask=inside).to(tl.float32)
    if HAS_FACTOR:
        grad *= tl.load(factor_ptr).to(tl.float32)
    place = momentum_ptr + matrix * m_matrix + row % rows * m_row + column
    mean = tl.load(place, mask=inside).to(tl.float32)
    mean += (1 - beta) * (grad - mean)
    tl.store(place, mean, mask=inside)
    out = grad + beta * (mean - grad) if NESTEROV else mean
    tl.store(out_ptr + row * columns + column, out, mask=inside)


@triton.jit(do_not_specialize=["rows", "parts"])
def subtract_kernel(
    weight_ptr, update_ptr, rows, columns, parts, w_matrix, w_row, keep, rate, BLOCK: tl.constexpr, ALIGN: tl.constexpr
):  # fmt: skip
    columns, w_matrix, w_row = multiple(columns, ALIGN), multiple(w_matrix, ALIGN), multiple(w_row, ALIGN)
    row, column = (tl.program_id(0) // parts).to(tl.int64), tl.program_id(0) % parts * BLOCK + tl.arange(0, BLOCK)
    place = weight_ptr + row // rows * w_matrix + row % rows * w_row + column
    inside = column < columns
    update = tl.load(update_ptr + row * columns + column, mask=inside).to(tl.float32)
    weight = tl.load(place, mask=inside).to(tl.float32)
    tl.store(place, keep * weight - rate * update, mask=inside)


def momentum_(grad: Tensor, momentum: Tensor, out: Tensor, factor: Tensor | None, beta: float, nesterov: bool) -> None:
    """momentum += (1 - beta) (factor grad - momentum); out = the same step again towards `momentum`, or `momentum`.

    Args:
        grad, momentum: [N, R, C] of adjacent columns.
        out: [N, R, C], contiguous.
        factor: scalar that multiplies the gradient, or None.
    """
    number, rows, columns = out.shape
    parts, strides = cdiv(columns, BLOCK), (*grad.stride()[:2], *momentum.stride()[:2])
    launch(
        momentum_kernel, (number * rows * parts,),
        grad, momentum, out, grad if factor is None else factor, rows, columns, parts,
        *strides, beta,
        NESTEROV=nesterov, HAS_FACTOR=factor is not None, BLOCK=BLOCK, ALIGN=divisor(columns, *strides),
    )  # fmt: skip


def subtract_(weight: Tensor, update: Tensor, keep: float, rate: float) -> None:
    """weight = keep weight - rate update.

    Args:
        weight: [N, R, C] of adjacent columns.
        update: [N, R, C], contiguous.
    """
    number, rows, columns = weight.shape
    parts = cdiv(columns, BLOCK)
    launch(
        subtract_kernel, (number * rows * parts,),
        weight, update, rows, columns, parts, *weight.stride()[:2], keep, rate,
        BLOCK=BLOCK, ALIGN=divisor(columns, *weight.stride()[:2]),
    )  # fmt: skip
