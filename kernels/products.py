"""The block-sparse products of a layer with experts, on any chip from sm_80: SDD, DSD, and DSD of Sᵀ.

S is block-diagonal [R, C] (R rows of tokens, C columns: all experts' widths side by side); its values are as `topology`
lays them out. Where a chip has faster kernels for a whole layer (`expert_products`), layers use those; for other
topologies, and every transpose, there is `block_products`.

A dense operand or result that meets S's columns is either one matrix over all C columns, or a stack [E, F, ...] of
one matrix per expert where widths are equal. fp32, fp16 and bf16; sums in fp32.

Shapes: R rows, C columns of S, E experts, D model width, F expert width, Y planes (gate and up: 2, else 1),
W values of a plane.
"""

from __future__ import annotations

import math

import torch
from foundry_moe_kernels import tuning
from foundry_moe_kernels.launch import cdiv, divisor, launch
from foundry_moe_kernels.sparse_kernels import inner_kernel, rows_kernel
from foundry_moe_kernels.sparse_tiles import SparseTile, choose
from foundry_moe_kernels.topology import Topology
from torch import Tensor


def _meets_columns(matrix_CN: Tensor, topology: Topology) -> bool:
    """Whether a dense operand, one matrix or a stack, has the columns of S."""
    return math.prod(matrix_CN.shape[:-1]) == topology.num_columns


def _strides(matrix: Tensor) -> tuple[int, int, int]:
    """Strides of a matrix [rows, columns] or a stack of them: (between experts, along rows, along columns)."""
    return (matrix.stride(0) if matrix.dim() == 3 else 0), matrix.stride(-2), matrix.stride(-1)


def _by_expert(matrix: Tensor, topology: Topology, dim: int) -> Tensor:
    """A matrix that meets all C columns along `dim` as a view [E, ...], one matrix per expert, where widths are equal.

    An expert's part then lies at a stride that the kernel is compiled for, with loads of 16 bytes; at a first column
    read from the topology it has to load element by element.
    """
    if matrix.dim() == 3 or not topology.uniform:
        return matrix
    view = matrix.unflatten(dim, (len(topology.widths), -1))
    return view if dim == 0 else view.movedim(1, 0)


def _along(b_KN: Tensor) -> bool:
    return b_KN.stride(-2) == 1 and b_KN.stride(-1) != 1


def _precision(tf32: bool) -> str:
    return "tf32" if tf32 else "ieee"


def _rows(
    a_Y: tuple[Tensor, ...],
    b_Y: tuple[Tensor, ...],
    out: Tensor,
    topology: Topology,
    tile: SparseTile,
    *,
    sdd: bool,
    tf32: bool,
    source_R: Tensor | None = None,
    choices: int = 0,
    h: Tensor | None = None,
    glu: bool = False,
    activation: str | None = None,
) -> None:
    """Launches `rows_kernel`. A is S where not `sdd`; B is [inner, columns] or a stack of such."""
    a, b = a_Y[0], b_Y[0]
    uniform, block = topology.uniform, topology.block
    width = topology.widths[0] if uniform else 0  # 0: the kernel reads each expert's
    inner, columns = (b.shape[-2], width) if sdd else (width, b.shape[-1])
    b_expert, b_k, b_n = _strides(b)
    values = not (sdd or uniform)
    a_row, a_k = (0, 1) if values else (a.stride(0), a.stride(1))
    if sdd:
        programs = topology.rows_Z.shape[0] * block // tile.bn
    else:
        programs = topology.block_rows * cdiv(columns, tile.bn)
    out_row, along = out.stride(-2) if out.dim() > 1 else 0, _along(b)
    align = divisor(topology.common_width, inner, columns, a_row, b_expert, b_n if along else b_k, out_row)
    launch(
        rows_kernel, (programs,),
        a, b, a_Y[-1], b_Y[-1], out, h, source_R,
        topology.starts_M, topology.sizes_M, topology.experts_M, topology.locals_M, topology.heights_M,
        topology.values_M, topology.row_offsets_M1, topology.rows_Z, topology.widths_E, topology.columns_E,
        topology.block_rows, inner, columns, a_row, a_k, b_expert, b_k, b_n, out_row,
        out.stride(0) if glu else 0,
        SDD=sdd, UNIFORM=uniform, STACKED=b.dim() == 3, CHOICES=choices, PLANES=1 if glu else len(a_Y), GLU=glu,
        ACT=activation, BLOCK=block, BN=tile.bn, BK=tile.bk, GROUP=tile.group, ALIGN=align, ALONG=along,
        EVEN_N=(topology.common_width if sdd else columns) % tile.bn == 0,
        EVEN_K=(inner if sdd else topology.common_width) % tile.bk == 0,
        PRECISION=_precision(tf32), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def _values_shape(topology: Topology) -> tuple[int, ...]:
    return (topology.num_rows, topology.widths[0]) if topology.uniform else (topology.num_values,)


def sdd(
    a: Tensor,
    b: Tensor,
    topology: Topology,
    *,
    trans_b: bool = False,
    tf32: bool = False,
    zero_tail: bool = True,
    tile: SparseTile | None = None,
) -> Tensor:
    """a op(b) at the blocks of S: its values, a matrix [R, F] for experts of one width, else flat.

    Args:
        a: [R, K].
        b: [K, C] or [E, K, F] (with `trans_b` [C, K] or [E, F, K]).
        tf32: fp32 operands are rounded to tf32.
        zero_tail: rows past the loads' end are zeros, otherwise undefined.
    """
    b_KC = b.mT if trans_b else b
    assert a.dtype == b.dtype and _meets_columns(b_KC.mT, topology)
    assert a.shape == (topology.num_rows, b_KC.shape[-2])
    s = (torch.zeros if zero_tail else torch.empty)(_values_shape(topology), dtype=a.dtype, device=a.device)
    if s.numel():
        b_KC = _by_expert(b_KC, topology, 1)
        tile = tile or choose(
            "sdd", a.device, topology.block, a.dtype, columns=max(topology.widths), inner=a.shape[1], tf32=tf32,
            along=_along(b_KC), widths=topology.widths,
        )  # fmt: skip
        _rows((a,), (b_KC,), s, topology, tile, sdd=True, tf32=tf32)
    return s


def sdd_act(
    a: Tensor,
    weights: tuple[Tensor, ...],
    topology: Topology,
    activation: str,
    *,
    source_R: Tensor | None = None,
    choices: int = 0,
    tf32: bool = False,
    tile: SparseTile | None = None,
) -> tuple[Tensor, Tensor]:
    """The first products of a layer in one launch: z_YRF = a·W1ᵀ (and a·V1ᵀ), h_RF = act(z[0]) (times z[1]).

    For experts of different widths z and h are values as `sdd` returns them, flat: [Y, W] and [W].

    Args:
        a: [R, D]; with `source_R` (int32 [R]) [T, D], whose row source_R[r] // choices is row r.
        weights: one or two stacks [E, F, D], or matrices [C, D], of equal strides.

    Rows past the loads' end are undefined.
    """
    assert a.dtype == weights[0].dtype
    z_YRF = torch.empty(len(weights), *_values_shape(topology), dtype=a.dtype, device=a.device)
    h_RF = torch.empty_like(z_YRF[0])
    if z_YRF.numel():
        glu = len(weights) == 2
        product = "glu" if glu else "act"
        tile = tile or choose(
            product, a.device, topology.block, a.dtype, columns=max(topology.widths), inner=a.shape[1], tf32=tf32,
            along=True, widths=topology.widths,
        )  # fmt: skip
        turned = tuple(weight.mT for weight in weights)
        _rows(
            (a,), turned, z_YRF, topology, tile, sdd=True, tf32=tf32, source_R=source_R, choices=choices, h=h_RF,
            glu=glu, activation=activation,
        )  # fmt: skip
    return z_YRF, h_RF


def dsd(
    s: Tensor | tuple[Tensor, ...],
    b: Tensor | tuple[Tensor, ...],
    topology: Topology,
    *,
    trans_s: bool = False,
    trans_b: bool = False,
    stacked: bool = False,
    tf32: bool = False,
    zero_tail: bool = True,
    out: Tensor | None = None,
    tile: SparseTile | None = None,
) -> Tensor:
    """op(S) op(b), dense. Two pairs of operands, without `trans_s`, are multiplied and added.

    Args:
        s: values as `sdd` returns them.
        b: without `trans_s` [C, N] or [E, F, N] (with `trans_b` [N, C] or [E, N, F]) and the result is [R, N];
            with `trans_s` [R, N] and the result is [C, N], or [E, F, N] if `stacked`.
        zero_tail: rows of the result past the loads' end are zeros, otherwise undefined.
        out: the result's place, with `trans_s` and `stacked`; in fp32 it gets the sums unrounded.
    """
    s_Y = s if isinstance(s, tuple) else (s,)
    b_Y = tuple(matrix.mT if trans_b else matrix for matrix in (b if isinstance(b, tuple) else (b,)))
    for values, matrix in zip(s_Y, b_Y, strict=True):
        assert values.dtype == matrix.dtype and values.is_contiguous() and values.numel() == topology.num_values
        assert matrix.shape == b_Y[0].shape and matrix.stride() == b_Y[0].stride()
    if topology.uniform:
        s_Y = tuple(values.view(topology.num_rows, -1) for values in s_Y)
    s, b_in, n = s_Y[0], b_Y[0], b_Y[0].shape[-1]
    if trans_s:
        assert b_in.shape == (topology.num_rows, n) and len(b_Y) == 1
        return _inner(s, b_in, topology, stacked=stacked, tf32=tf32, out=out, tile=tile)
    assert _meets_columns(b_in, topology)
    result = (torch.zeros if zero_tail else torch.empty)(topology.num_rows, n, dtype=s.dtype, device=s.device)
    if result.numel():
        b_Y = tuple(_by_expert(matrix, topology, 0) for matrix in b_Y)
        product = "dsd2" if len(b_Y) == 2 else "dsd"
        tile = tile or choose(
            product, s.device, topology.block, s.dtype, columns=n, inner=max(topology.widths), tf32=tf32,
            along=_along(b_in),
        )  # fmt: skip
        _rows(s_Y, b_Y, result, topology, tile, sdd=False, tf32=tf32)
    return result


def _inner(
    s: Tensor, b_RN: Tensor, topology: Topology, *, stacked: bool, tf32: bool, out: Tensor | None,
    tile: SparseTile | None,
) -> Tensor:  # fmt: skip
    """Sᵀ b: [C, N], or [E, F, N]. Experts without rows get zeros."""
    n, width = b_RN.shape[1], topology.widths[0]
    assert topology.uniform or not stacked
    shape = (len(topology.widths), width, n) if stacked else (topology.num_columns, n)
    if out is None:
        out = torch.empty(shape, dtype=s.dtype, device=s.device)
    assert out.shape == shape and out.dtype in (s.dtype, torch.float32)
    if out.numel():
        b_RN = b_RN if b_RN.stride(1) == 1 else b_RN.contiguous()
        deep = tuning.per_expert(topology.num_rows, len(topology.widths))
        tile = tile or choose("inner", s.device, topology.block, s.dtype, columns=n, inner=deep, tf32=tf32)
        out_expert, out_column, out_n = _strides(out)
        along = _along(out)
        align = divisor(topology.common_width, n, b_RN.stride(0), out_expert, out_n if along else out_column)
        launch(
            inner_kernel, (topology.block_columns * cdiv(n, tile.bn),),
            s, b_RN, out,
            topology.starts_M, topology.sizes_M, topology.values_M, topology.column_rows_N, topology.column_heights_N,
            topology.order_E, topology.widths_E, topology.columns_E, topology.column_experts_N,
            topology.column_locals_N, n, width, b_RN.stride(0), b_RN.stride(1), out_expert, out_column, out_n,
            UNIFORM=topology.uniform, STACKED=stacked, BLOCK=topology.block, BN=tile.bn, BK=tile.bk, GROUP=tile.group,
            ALIGN=align, ALONG=along, EVEN_M=topology.common_width % topology.block == 0, EVEN_N=n % tile.bn == 0,
            TURNED=tf32 and s.element_size() == 4,
            PRECISION=_precision(tf32), num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return out
