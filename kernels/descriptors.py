"""Tensor maps (TMA) of the ragged operands, as `launch` takes them: built on the host for one launch.

Shapes: Y planes (gate and up of a GLU: 2, else 1), R rows, C columns, E experts.

Rows of one expert end where the next expert's begin, and a tensor map clips only at its own bounds. So the map of
a ragged matrix gets two more dimensions whose strides undo each other modulo 2^64: reading at
(2^28, end, 2^28 - size + row) lands on `start + row` and is clipped (zeros on a load, nothing written on a store)
from `row = size` on. The idea is `ragged_tma` of OpenAI's triton_kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import triton
from foundry_moe_kernels.launch import TensorMap
from torch import Tensor

VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
GLUON = VERSION == (3, 6)  # its experimental Gluon is what `hopper_products` is written for
if GLUON:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

COPY_COLUMNS = 256  # of a copied row's box; a box has at most this many in each of its dimensions
# In elements: _WRAP * _WRAP_STRIDE = 2^64. Strides stay under 2^40 bytes, coordinates under 2^31
_WRAP = 2**28
_WRAP_STRIDE = 2**36
_UNBOUNDED = 2**31 - 2**16
_MAX_STRIDE_BYTES = 2**40
_ALIGN_BYTES = 16


def supported(x: Tensor) -> bool:
    """Whether the Hopper kernels take this operand: 16-bit floats on Hopper, rows of 16 bytes, no empty dimension.

    Its memory meets a tensor map's rules: 16-byte aligned, unit last stride, 16-byte strides.
    """
    if x.dtype not in (torch.bfloat16, torch.float16) or 0 in x.shape or not device_supported(x.device):
        return False
    *strides, last = x.stride()
    for stride in strides:
        if stride * x.itemsize % _ALIGN_BYTES or stride * x.itemsize >= _MAX_STRIDE_BYTES:
            return False
    return last == 1 and x.data_ptr() % _ALIGN_BYTES == 0


def descriptor(base: Tensor, shape: Sequence[int], strides: Sequence[int], block: tuple[int, ...]) -> Any:
    """Gluon's record of a tensor map: it has the layout of a box in shared memory."""
    made = object.__new__(TensorDescriptor)  # without its constructor, which checks what `supported` has
    layout = gl.NVMMASharedLayout.get_default_for(list(block), gl.float16 if base.element_size() == 2 else gl.float32)
    vars(made).update(
        base=base, shape=list(shape), strides=list(strides), block_shape=list(block), layout=layout, padding="zero"
    )
    return made


def ragged_rows(a_YRC: Tensor, block_rows: int, block_columns: int) -> TensorMap:
    """[Y, R, C] clipped at an expert's last row: boxes [1, 1, 1, rows, columns].

    Row `row` of an expert with rows [start, start + size) is at (plane, 2^28, start + size, 2^28 - size + row).
    """
    planes, rows_, columns = a_YRC.shape
    assert rows_ <= _WRAP, f"{rows_} rows: a ragged tensor map has room for {_WRAP}"
    plane, stride, _ = a_YRC.stride()
    return (
        descriptor,
        a_YRC,
        (planes, _UNBOUNDED, _UNBOUNDED, _WRAP, columns),
        (plane, _WRAP_STRIDE - stride, stride, stride, 1),
        (1, 1, 1, block_rows, block_columns),
    )


def weight_planes(weights: tuple[Tensor, ...], box: tuple[int, int, int]) -> tuple[TensorMap, bool] | None:
    """One or two [E, A, B] weights as planes [Y, E, A, B] of one map: boxes [planes, 1, A, B] by box = (planes, A, B).

    The two need not share an allocation: the distance between them is the plane stride.

    Returns:
        the map, and whether the second weight lies below the first in memory: it is plane 0 then. None where no tensor
        map can span the two.
    """
    base, *others = weights
    strides, swapped = base.stride(), False
    stride = base.shape[0] * strides[0]
    for other in others:
        assert other.stride() == strides
        distance = other.data_ptr() - base.data_ptr()
        if distance < 0:
            base, distance, swapped = other, -distance, True
        if distance == 0 or distance % _ALIGN_BYTES or distance >= _MAX_STRIDE_BYTES:
            return None
        stride = distance // base.dtype.itemsize
    planes, height, width = box
    shape = (2 if others else 1, *base.shape)
    return (descriptor, base, shape, (stride, *strides), (planes, 1, height, width)), swapped


def boxes(tensor: Tensor, block: tuple[int, ...]) -> TensorMap:
    """A tensor as it lies in memory."""
    return descriptor, tensor, tuple(tensor.shape), tensor.stride(), block


def row_map(a_RD: Tensor) -> TensorMap:
    """A tensor map whose box is a row, of a multiple of COPY_COLUMNS."""
    rows, width = a_RD.shape
    boxes = width // COPY_COLUMNS
    shape, strides = (rows, boxes, COPY_COLUMNS), (a_RD.stride(0), COPY_COLUMNS, 1)
    return _row_descriptor, a_RD, shape, strides, (1, boxes, COPY_COLUMNS)


def _row_descriptor(base: Tensor, shape: Sequence[int], strides: Sequence[int], block: tuple[int, ...]) -> Any:
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=16, rank=3)
    return TensorDescriptor(base, list(shape), list(strides), list(block), layout)


@functools.cache
def device_supported(device: torch.device) -> bool:
    """Whether `hopper_products` runs: on Hopper, with Triton 3.6."""
    return device.type == "cuda" and capability_supported(torch.cuda.get_device_capability(device))


def capability_supported(capability: tuple[int, int]) -> bool:
    """The same for a GPU that need not be present."""
    return capability[0] == 9 and GLUON


def products_compile(capability: tuple[int, int]) -> bool:
    """Whether this Triton compiles matrix products for such a GPU at all.

    Before 3.4 it ends in an assertion of its own (AccelerateMatmul: computeCapability not supported) for sm_120.
    """
    return capability[0] < 12 or VERSION >= (3, 4)
