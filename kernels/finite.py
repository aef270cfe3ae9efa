"""Finds which of many tensors hold a value that is not finite: one launch for each dtype, which reads lines only.

A tensor's lines are the first column and the first row of each of its matrices; a tensor that is to be read whole is
passed as a matrix of one row.

Shapes: N tensors; R rows and C columns of a tensor, M rows of each matrix in it (R is a multiple of M).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from foundry_moe_kernels.launch import cdiv, launch
from torch import Tensor

DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
FIELDS = 4  # of a tensor in the table: its address, R, M, C
PROGRAMS = 64  # for each tensor, at most
BLOCK = 1024


@triton.jit
def _nonfinite_kernel(
    table_ptr, where_ptr, only_if_ptr, bad_ptr,
    DTYPE: tl.constexpr, CONDITIONAL: tl.constexpr, FIELDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if CONDITIONAL:  # noqa: SIM102
        if tl.load(only_if_ptr) == 0:
            return
    n = tl.program_id(0)
    entry = table_ptr + n * FIELDS
    data = tl.load(entry).to(tl.pointer_type(DTYPE))
    rows, rows_of_matrix, columns = tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    count = rows + rows // rows_of_matrix * columns
    found = tl.zeros((BLOCK,), tl.int32)
    for begin in range(tl.program_id(1).to(tl.int64) * BLOCK, count, tl.num_programs(1) * BLOCK):
        i = begin + tl.arange(0, BLOCK)
        in_row = i - rows
        offset = tl.where(
            i < rows, i * columns, in_row // columns * rows_of_matrix * columns + in_row % columns
        )  # a line of rows' first values, then one of each matrix' first row
        x = tl.load(data + offset, mask=i < count, other=0.0).to(tl.float32)
        found |= ((x != x) | (tl.abs(x) == float("inf"))).to(tl.int32)
    if tl.max(found, axis=0) > 0:
        tl.store(bad_ptr + tl.load(where_ptr + n), 1)


def nonfinite(
    table_N4: Tensor, where_N: Tensor, bad_F: Tensor, only_if: Tensor | None, dtype: torch.dtype, most: int
) -> None:
    """Sets bad_F[where_N[n]] to 1 for each tensor n with a value in its lines that is not finite.

    Args:
        table_N4: int64: address, R, M and C of contiguous tensors of `dtype` on the same device.
        bad_F: uint8 flags, some of them these tensors'.
        only_if: uint8 of one element; where it is 0 nothing is read.
        most: values in the lines of the largest.
    """
    tensors = table_N4.shape[0]
    if tensors:
        launch(
            _nonfinite_kernel, (tensors, min(PROGRAMS, cdiv(most, BLOCK))),
            table_N4, where_N, only_if if only_if is not None else bad_F, bad_F,
            DTYPE=DTYPES[dtype], CONDITIONAL=only_if is not None, FIELDS=FIELDS, BLOCK=BLOCK,
        )  # fmt: skip
