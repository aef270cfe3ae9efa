"""Tensor maps (TMA) of the ragged operands, as `launch` takes them: built on the host for one launch.

Shapes: P planes (gate and up of a GLU: 2, else 1), R rows, C columns, E experts. `specialised` maps are for the kernels
of `hopper_products`.

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
import triton.language as tl
from foundry_moe_kernels.launch import TensorMap
from torch import Tensor

# In elements: _WRAP * _WRAP_STRIDE = 2^64. Strides stay under 2^40 bytes, coordinates under 2^31
_WRAP = 2**28
_WRAP_STRIDE = 2**36
_UNBOUNDED = 2**31 - 2**16
WRAP_COORDINATE = tl.constexpr(_WRAP)
_MAX_STRIDE_BYTES = 2**40
_ALIGN_BYTES = 16


def supported(*tensors: Tensor) -> bool:
    """Whether each tensor's memory meets a tensor map's rules: 16-byte aligned, unit last stride, 16-byte strides."""
    for tensor in tensors:
        size = tensor.dtype.itemsize
        *strides, last = tensor.stride()
        if tensor.data_ptr() % _ALIGN_BYTES or last != 1:
            return False
        for stride in strides:
            if stride * size % _ALIGN_BYTES or stride * size >= _MAX_STRIDE_BYTES:
                return False
    return True


def _plain(base: Tensor, shape: Sequence[int], strides: Sequence[int], block: tuple[int, ...]) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor  # absent from Triton 3.3

    return TensorDescriptor(base, list(shape), list(strides), list(block))


def _specialised(base: Tensor, shape: Sequence[int], strides: Sequence[int], block: tuple[int, ...]) -> Any:
    from foundry_moe_kernels import hopper_products  # needs Triton 3.6

    return hopper_products.descriptor(base, shape, strides, block)


def ragged_rows(a_PRC: Tensor, block_rows: int, block_columns: int, specialised: bool = False) -> TensorMap:
    """[P, R, C] clipped at an expert's last row: boxes [1, 1, 1, rows, columns], see `ragged_index`."""
    planes, rows_, columns = a_PRC.shape
    assert rows_ <= _WRAP, f"{rows_} rows: a ragged tensor map has room for {_WRAP}"
    plane, stride, _ = a_PRC.stride()
    return (
        _specialised if specialised else _plain,
        a_PRC,
        (planes, _UNBOUNDED, _UNBOUNDED, _WRAP, columns),
        (plane, _WRAP_STRIDE - stride, stride, stride, 1),
        (1, 1, 1, block_rows, block_columns),
    )


def weight_planes(
    weights: tuple[Tensor, ...], box: tuple[int, int, int], specialised: bool = False
) -> tuple[TensorMap, bool] | None:
    """One or two [E, A, B] weights as planes [P, E, A, B] of one map: boxes [planes, 1, A, B] by box = (planes, A, B).

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
    make = _specialised if specialised else _plain
    return (make, base, shape, (stride, *strides), (planes, 1, height, width)), swapped


def boxes(tensor: Tensor, block: tuple[int, ...], specialised: bool = False) -> TensorMap:
    """A tensor as it lies in memory."""
    return _specialised if specialised else _plain, tensor, tuple(tensor.shape), tensor.stride(), block


@triton.jit
def ragged_index(start, size, row):
    """The coordinates (dimensions 2 and 3 of `ragged_rows`) of `row` of an expert with rows [start, start + size)."""
    return start + size, 0x10000000 - size + row


@triton.jit
def halves(acc, BM: tl.constexpr, BN: tl.constexpr):
    """The left and the right half of a tile's columns; both stay in the threads that hold them."""
    return acc.reshape(BM, 2, BN // 2).permute(0, 2, 1).split()


@functools.cache
def device_supported(device: torch.device) -> bool:
    """Whether this is Hopper with a Triton that has host tensor descriptors."""
    return device.type == "cuda" and capability_supported(torch.cuda.get_device_capability(device))


def capability_supported(capability: tuple[int, int]) -> bool:
    """The same for a GPU that need not be present."""
    return capability[0] == 9 and _triton_version() >= (3, 4)


def products_compile(capability: tuple[int, int]) -> bool:
    """Whether this Triton compiles matrix products for such a GPU at all.

    Before 3.4 it ends in an assertion of its own (AccelerateMatmul: computeCapability not supported) for sm_120.
    """
    return capability[0] < 12 or _triton_version() >= (3, 4)


@functools.cache
def specialised_supported(device: torch.device) -> bool:
    """Whether `hopper_products` runs: on Hopper, with the Triton whose experimental Gluon it was written for."""
    return device_supported(device) and _triton_version() == (3, 6)


def _triton_version() -> tuple[int, ...]:
    return tuple(int(part) for part in triton.__version__.split(".")[:2])
