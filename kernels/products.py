"""Block-sparse products of any shape, dtype and orientation on a topology: SDD, DSD, DDS with plain pointer kernels.

S is sparse [R, C] (R rows of tokens, C columns: all experts' widths side by side); its values are as `topology` lays
them out. The fast kernels of a layer are in `expert_products`; these are their fallback on any Triton from 3.3, and the
general interface (experts of different widths, blocks of any power of two).

A dense operand or result that meets S's columns is either one matrix over all C columns, or a stack [E, F, ...] of
one matrix an expert where widths are equal. fp32, fp16 and bf16; sums in fp32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from foundry_moe_kernels.topology import Topology
from torch import Tensor

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@triton.jit
def _sdd_kernel(
    a_ptr, b_ptr, s_ptr, row_starts, row_sizes, strides, row_offsets, columns, rows, values, column_sizes, column_bases,
    block_rows, inner, a_row, a_k, b_column, b_k,
    BLOCK: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    z = tl.program_id(0)
    if z >= tl.load(row_offsets + block_rows):
        return
    m, n = tl.load(rows + z), tl.load(columns + z)
    i, j, k = tl.arange(0, BLOCK), tl.arange(0, BLOCK), tl.arange(0, BK)
    keep_i, keep_j = i < tl.load(row_sizes + m), j < tl.load(column_sizes + n)
    a = a_ptr + (tl.load(row_starts + m) + i).to(tl.int64)[:, None] * a_row
    b = b_ptr + tl.load(column_bases + n) + j.to(tl.int64)[None, :] * b_column
    acc = tl.zeros((BLOCK, BLOCK), tl.float32)
    for first in range(0, inner, BK):
        keep_k = first + k < inner
        at_k = (first + k).to(tl.int64)
        a_tile = tl.load(a + at_k[None, :] * a_k, mask=keep_i[:, None] & keep_k[None, :], other=0.0)
        b_tile = tl.load(b + at_k[:, None] * b_k, mask=keep_k[:, None] & keep_j[None, :], other=0.0)
        acc = tl.dot(a_tile, b_tile, acc, input_precision=PRECISION)
    s = s_ptr + tl.load(values + z) + i.to(tl.int64)[:, None] * tl.load(strides + m) + j[None, :]
    tl.store(s, acc.to(s_ptr.dtype.element_ty), mask=keep_i[:, None] & keep_j[None, :])


@triton.jit
def _dsd_kernel(
    s_ptr, b_ptr, out_ptr, row_starts, row_sizes, strides, row_offsets, columns, values, column_sizes, column_bases,
    width, b_inner, b_n, out_row, out_n,
    BLOCK: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out = S B: a block row of S, one column tile of B."""
    m = tl.program_id(0)
    rows = tl.load(row_sizes + m)
    if rows == 0:
        return
    i, j, k = tl.arange(0, BLOCK), tl.program_id(1) * BN + tl.arange(0, BN), tl.arange(0, BK)
    keep_i, keep_j = i < rows, j < width
    stride = tl.load(strides + m).to(tl.int64)
    acc = tl.zeros((BLOCK, BN), tl.float32)
    for z in range(tl.load(row_offsets + m), tl.load(row_offsets + m + 1)):
        n = tl.load(columns + z)
        size = tl.load(column_sizes + n)
        s = s_ptr + tl.load(values + z) + i.to(tl.int64)[:, None] * stride
        b = b_ptr + tl.load(column_bases + n) + j.to(tl.int64)[None, :] * b_n
        for first in range(0, size, BK):
            keep_k = first + k < size
            s_tile = tl.load(s + (first + k)[None, :], mask=keep_i[:, None] & keep_k[None, :], other=0.0)
            b_at = b + (first + k).to(tl.int64)[:, None] * b_inner
            b_tile = tl.load(b_at, mask=keep_k[:, None] & keep_j[None, :], other=0.0)
            acc = tl.dot(s_tile, b_tile, acc, input_precision=PRECISION)
    out = out_ptr + (tl.load(row_starts + m) + i).to(tl.int64)[:, None] * out_row + j.to(tl.int64)[None, :] * out_n
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=keep_i[:, None] & keep_j[None, :])


@triton.jit
def _dtsd_kernel(
    s_ptr, b_ptr, out_ptr, row_starts, row_sizes, strides, column_offsets, transposed, rows, values, column_sizes,
    column_bases, width, b_row, b_n, out_inner, out_n,
    BLOCK: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out = S^T B: a block column of S by the secondary index; its blocks' rows are the inner, ragged dimension."""
    n = tl.program_id(0)
    size = tl.load(column_sizes + n)
    i, j, k = tl.arange(0, BLOCK), tl.program_id(1) * BN + tl.arange(0, BN), tl.arange(0, BK)
    keep_i, keep_j = i < size, j < width
    acc = tl.zeros((BLOCK, BN), tl.float32)
    for y in range(tl.load(column_offsets + n), tl.load(column_offsets + n + 1)):
        z = tl.load(transposed + y)
        m = tl.load(rows + z)
        inner = tl.load(row_sizes + m)
        s = s_ptr + tl.load(values + z) + i[:, None]
        stride = tl.load(strides + m).to(tl.int64)
        b = b_ptr + j.to(tl.int64)[None, :] * b_n
        start = tl.load(row_starts + m)
        for first in range(0, inner, BK):
            keep_k = first + k < inner
            s_tile = tl.load(s + (first + k)[None, :] * stride, mask=keep_i[:, None] & keep_k[None, :], other=0.0)
            b_at = b + (start + first + k).to(tl.int64)[:, None] * b_row
            b_tile = tl.load(b_at, mask=keep_k[:, None] & keep_j[None, :], other=0.0)
            acc = tl.dot(s_tile, b_tile, acc, input_precision=PRECISION)
    out = out_ptr + tl.load(column_bases + n) + i.to(tl.int64)[:, None] * out_inner + j.to(tl.int64)[None, :] * out_n
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=keep_i[:, None] & keep_j[None, :])


def _bases(matrix: Tensor, topology: Topology) -> tuple[Tensor, int]:
    """(int64 offset of every block column in a dense operand [C, N] or [E, F, N], stride along S's columns)."""
    if matrix.dim() == 3:
        offsets = topology.column_experts_N.long() * matrix.stride(0) + topology.column_locals_N.long() * matrix.stride(
            1
        )
        return offsets, matrix.stride(1)
    return topology.column_starts_N.long() * matrix.stride(0), matrix.stride(0)


def _check_columns(matrix: Tensor, topology: Topology, name: str) -> None:
    columns = matrix.shape[0] if matrix.dim() == 2 else matrix.shape[0] * matrix.shape[1]
    if matrix.dim() not in (2, 3) or columns != topology.num_columns:
        raise ValueError(
            f"{name} {tuple(matrix.shape)} (after transposing) must meet the topology's {topology.num_columns} "
            f"columns: [{topology.num_columns}, n] or [experts, width, n]"
        )


def _check_same(a: Tensor, b: Tensor) -> None:
    if a.dtype != b.dtype or a.dtype not in _DTYPES:
        raise ValueError(f"operands must share one dtype of fp32, fp16, bf16, not {a.dtype} and {b.dtype}")
    if a.device != b.device:
        raise ValueError(f"operands are on {a.device} and {b.device}")


def _check_values(s: Tensor, topology: Topology) -> None:
    if not s.is_contiguous() or s.numel() != topology.num_values:
        raise ValueError(
            f"values {tuple(s.shape)} must be contiguous and hold {topology.num_values} elements, as `sdd` makes them"
        )


def _tiles(topology: Topology, dtype: torch.dtype) -> tuple[int, int]:
    """(BN, BK) that keep a 128-block's accumulator and operands within a Hopper or Ampere SM."""
    return min(topology.block, 128), min(topology.block, 32 if dtype is torch.float32 else 64)


def sdd(
    a: Tensor, b: Tensor, topology: Topology, *, trans_a: bool = False, trans_b: bool = False, tf32: bool = False
) -> Tensor:
    """Values of S = op(a) op(b) at the topology's blocks: flat, as `topology` lays them out ([R, F] for equal widths).

    Args:
        a: [R, K], or [K, R] with `trans_a`.
        b: [K, C] or [E, K, F]; with `trans_b` [C, K] or [E, F, K].

    Raises:
        ValueError: shapes, dtypes or devices that do not fit.
    """
    a_RK = a.mT if trans_a else a
    b_CK = b if trans_b else b.mT
    _check_same(a, b)
    _check_columns(b_CK, topology, "b")
    if a_RK.shape != (topology.num_rows, b_CK.shape[-1]):
        raise ValueError(
            f"op(a) {tuple(a_RK.shape)} must be [{topology.num_rows}, {b_CK.shape[-1]}]: topology's rows, op(b)'s depth"
        )
    s = torch.zeros(topology.num_values, dtype=a.dtype, device=a.device)
    blocks = topology.columns_Z.shape[0]
    if blocks and s.numel():
        bases, b_column = _bases(b_CK, topology)
        _, bk = _tiles(topology, a.dtype)
        _sdd_kernel[(blocks,)](
            a_RK, b_CK, s, topology.row_starts_M, topology.row_sizes_M, topology.strides_M, topology.row_offsets_M1,
            topology.columns_Z, topology.rows_Z, topology.value_offsets_Z, topology.column_sizes_N, bases,
            topology.block_rows, a_RK.shape[1], a_RK.stride(0), a_RK.stride(1), b_column, b_CK.stride(-1),
            BLOCK=topology.block, BK=bk, PRECISION="tf32" if tf32 else "ieee",
            num_warps=8 if topology.block > 64 else 4,
        )  # fmt: skip
    return s.view(topology.num_rows, -1) if topology.uniform else s


def dsd(
    s: Tensor,
    b: Tensor,
    topology: Topology,
    *,
    trans_s: bool = False,
    trans_b: bool = False,
    stacked: bool = False,
    tf32: bool = False,
) -> Tensor:
    """op(S) op(b), dense. Rows of S past the loads' end give zeros.

    Args:
        s: values as `sdd` returns them.
        b: without `trans_s` [C, N] or [E, F, N] (with `trans_b` [N, C] or [E, N, F]) and the result is [R, N];
            with `trans_s` [R, N] (with `trans_b` [N, R]) and the result is [C, N], or [E, F, N] if `stacked`.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit.
    """
    _check_same(s, b)
    _check_values(s, topology)
    b_in = b.mT if trans_b else b
    precision = "tf32" if tf32 else "ieee"
    bn, bk = _tiles(topology, s.dtype)
    warps = 8 if topology.block > 64 else 4
    n = b_in.shape[-1]
    if trans_s:
        if b_in.dim() != 2 or b_in.shape[0] != topology.num_rows:
            raise ValueError(f"op(b) {tuple(b_in.shape)} must have the topology's {topology.num_rows} rows")
        out = torch.zeros(topology.num_columns, n, dtype=s.dtype, device=s.device)
        if out.numel():
            bases, inner = _bases(out, topology)
            _dtsd_kernel[(topology.block_columns, triton.cdiv(n, bn))](
                s, b_in, out, topology.row_starts_M, topology.row_sizes_M, topology.strides_M,
                topology.column_offsets_N1, topology.transposed_Z, topology.rows_Z, topology.value_offsets_Z,
                topology.column_sizes_N, bases,
                n, b_in.stride(0), b_in.stride(1), inner, out.stride(1),
                BLOCK=topology.block, BN=bn, BK=bk, PRECISION=precision, num_warps=warps,
            )  # fmt: skip
        return out.view(-1, topology.max_columns, n) if stacked else out
    _check_columns(b_in, topology, "b")
    out = torch.zeros(topology.num_rows, n, dtype=s.dtype, device=s.device)
    if out.numel() and topology.block_rows:
        bases, inner = _bases(b_in, topology)
        _dsd_kernel[(topology.block_rows, triton.cdiv(n, bn))](
            s, b_in, out, topology.row_starts_M, topology.row_sizes_M, topology.strides_M, topology.row_offsets_M1,
            topology.columns_Z, topology.value_offsets_Z, topology.column_sizes_N, bases,
            n, inner, b_in.stride(-1), out.stride(0), out.stride(1),
            BLOCK=topology.block, BN=bn, BK=bk, PRECISION=precision, num_warps=warps,
        )  # fmt: skip
    return out


def dds(
    a: Tensor, s: Tensor, topology: Topology, *, trans_a: bool = False, trans_s: bool = False, tf32: bool = False
) -> Tensor:
    """op(a) op(S), dense: [N, C], or [N, R] with `trans_s`. The transpose of `dsd`, on the same kernels.

    Args:
        a: [N, R] (with `trans_a` [R, N]); with `trans_s` [N, C] (with `trans_a` [C, N]).
        s: values as `sdd` returns them.
    """
    a_T = a if trans_a else a.mT
    return dsd(s, a_T, topology, trans_s=not trans_s, tf32=tf32).mT
