"""SDD, DSD and DDS with gradients: on kernels where they run, otherwise in plain torch.

Each letter is the result or an operand, sparse or dense. A transposed operand is a view: `matrix.mT`.

Shapes: S [R, C] with Z blocks of B x B, K inner width, N columns of a dense operand.
"""

from __future__ import annotations

from typing import Any

import torch
from foundry_moe_kernels import block_products as kernels
from foundry_moe_kernels.block_products import BlockIndex
from torch import Tensor

from foundry_moe.ops.backends import blocksparse_available, tf32_allowed
from foundry_moe.ops.operators import on_device
from foundry_moe.ops.permute import cast
from foundry_moe.sparse.matrix import Matrix


def _bmm(a: Tensor, b: Tensor) -> Tensor:
    with torch.autocast(a.device.type, enabled=False):  # which kernels ignore too
        return torch.bmm(a, b)


def _sdd(a_RK: Tensor, b_KC: Tensor, index: BlockIndex) -> Tensor:
    if blocksparse_available(a_RK.device, a_RK.dtype):
        return kernels.sdd(a_RK, b_KC, index, tf32=tf32_allowed())
    block = index.block
    return _bmm(
        a_RK.unflatten(0, (-1, block))[index.rows_Z.long()],
        b_KC.unflatten(1, (-1, block)).transpose(0, 1)[index.columns_Z.long()],
    )


def _dsd(values: Tensor, b: Tensor, index: BlockIndex, transposed: bool) -> Tensor:
    """S b or Sᵀ b."""
    if blocksparse_available(values.device, values.dtype):
        return kernels.dsd(values.contiguous(), b, index, transposed=transposed, tf32=tf32_allowed())
    own, other, rows = index.rows_Z, index.columns_Z, index.shape[0]
    if transposed:
        own, other, rows, values = other, own, index.shape[1], values.mT
    block, dtype = index.block, values.dtype
    sums = torch.float32 if dtype.itemsize == 2 else dtype
    parts = _bmm(values.to(sums), b.to(sums).unflatten(0, (-1, block))[other.long()])
    out = parts.new_zeros(rows // block, block, b.shape[1]).index_add_(0, own.long(), parts)
    return cast(out.view(rows, -1), dtype)


class _SDD(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a_RK: Tensor, b_KC: Tensor, index: BlockIndex) -> Tensor:
        ctx.save_for_backward(a_RK, b_KC)
        ctx.index = index
        return _sdd(a_RK, b_KC, index)

    @staticmethod
    def backward(ctx: Any, dvalues: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        a_RK, b_KC = ctx.saved_tensors
        da = _DSD.apply(dvalues, b_KC.mT, ctx.index, False) if ctx.needs_input_grad[0] else None
        db = _DSD.apply(dvalues, a_RK, ctx.index, True).mT if ctx.needs_input_grad[1] else None
        return da, db, None


class _DSD(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, b: Tensor, index: BlockIndex, transposed: bool) -> Tensor:
        ctx.save_for_backward(values, b)
        ctx.index, ctx.transposed = index, transposed
        return _dsd(values, b, index, transposed)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        values, b = ctx.saved_tensors
        outer = (b, dout.mT) if ctx.transposed else (dout, b.mT)
        dvalues = _SDD.apply(*outer, ctx.index) if ctx.needs_input_grad[0] else None
        db = _DSD.apply(values, dout, ctx.index, not ctx.transposed) if ctx.needs_input_grad[1] else None
        return dvalues, db, None, None


def _check(name: str, left: Matrix | Tensor, right: Matrix | Tensor) -> None:
    """Raises ValueError unless `left` times `right` exists, of the kinds that `name` says, dtypes and devices equal."""
    kinds = [Matrix if letter == "s" else Tensor for letter in name[1:]]
    if not all(map(isinstance, (left, right), kinds)):
        one, two = (kind.__name__ for kind in kinds)
        raise ValueError(
            f"{name} multiplies a {one} and a {two}, not a {type(left).__name__} and a {type(right).__name__}: "
            "after the result, s is a Matrix and d a Tensor"
        )
    if len(left.shape) != 2 or len(right.shape) != 2:
        raise ValueError(f"{name} of {list(left.shape)} and {list(right.shape)}: operands must have two dimensions")
    if left.shape[1] != right.shape[0]:
        raise ValueError(f"{name} of {list(left.shape)} and {list(right.shape)}: inner sizes must agree")
    first, second = (one.values if isinstance(one, Matrix) else one for one in (left, right))
    if (first.dtype, first.device) != (second.dtype, second.device):
        raise ValueError(
            f"{name} of {first.dtype} on {first.device} and {second.dtype} on {second.device}: they must agree"
        )
    if first.device.type == "cuda" and not blocksparse_available(first.device, first.dtype):
        raise ValueError(f"{name} of {first.dtype}: on a GPU it must be fp32, fp16 or bf16")


def sdd(a_RK: Tensor, b_KC: Tensor, topology: Matrix) -> Matrix:
    """a b at the blocks of `topology`, whose values are not read.

    Raises:
        ValueError: kinds, sizes, dtypes or devices do not agree.
    """
    _check("sdd", a_RK, b_KC)
    if not isinstance(topology, Matrix):
        raise ValueError(f"sdd's topology is a {type(topology).__name__}: it must be a Matrix")
    if (a_RK.shape[0], b_KC.shape[1]) != topology.shape:
        product = [a_RK.shape[0], b_KC.shape[1]]
        raise ValueError(f"sdd gives {product}, and the topology is {list(topology.shape)}: they must agree")
    if topology.values.device != a_RK.device:
        raise ValueError(f"sdd on {a_RK.device} with a topology on {topology.values.device}: they must agree")
    pair = (b_KC.mT, a_RK.mT) if topology.transposed else (a_RK, b_KC)
    with on_device(a_RK):
        return topology.with_values(_SDD.apply(*pair, topology.index))


def dsd(s_RC: Matrix, b_CN: Tensor) -> Tensor:
    """s b, dense [R, N]. Sums are fp32; fp32 operands are rounded to tf32 if torch's own products may do that.

    Raises:
        ValueError: kinds, sizes, dtypes or devices do not agree.
    """
    _check("dsd", s_RC, b_CN)
    with on_device(b_CN):
        return _DSD.apply(s_RC.values, b_CN, s_RC.index, s_RC.transposed)


def dds(a_NR: Tensor, s_RC: Matrix) -> Tensor:
    """a s, dense [N, C]: the transpose of sᵀ aᵀ, on the same kernels as `dsd`.

    Raises:
        ValueError: kinds, sizes, dtypes or devices do not agree.
    """
    _check("dds", a_NR, s_RC)
    with on_device(a_NR):
        return _DSD.apply(s_RC.values, a_NR.mT, s_RC.index, not s_RC.transposed).mT
