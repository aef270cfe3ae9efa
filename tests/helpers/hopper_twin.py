"""The Hopper kernels in plain torch, called with the arguments of their launches, for tests on a CPU.

Gluon has no interpreter. Here tensor maps are read as the chip would read them, by address, shape and strides, so that
a wrong map, plane or count gives wrong numbers. Tiles, stages and warps are not modelled: those run on GPUs alone.

Shapes: R rows, E experts, K inputs, N outputs, Y planes (gate, up), M block rows, L columns of a low-rank operand.
"""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from foundry_moe_kernels import descriptors, expert_products, hopper_inner, hopper_products, tuning
from foundry_moe_kernels.launch import TensorMap
from torch import Tensor

from tests.helpers.kernel_twins import activate


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of experts compute as on Hopper, by these twins."""

    def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        assert kernel is hopper_products.rows_kernel or kernel is hopper_inner.inner_kernel
        (_rows if kernel is hopper_products.rows_kernel else _inner)(*arguments, **constants)

    monkeypatch.setattr(expert_products, "launch", launch)
    monkeypatch.setattr(descriptors, "device_supported", lambda device: True)


def _memory(base: Tensor, shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    """The elements from the address of `base` on, whichever allocation they are in."""
    extent = 1 + sum(max(size - 1, 0) * stride for size, stride in zip(shape, strides, strict=True))
    raw = (ctypes.c_byte * (extent * base.itemsize)).from_address(base.data_ptr())
    return torch.frombuffer(raw, dtype=base.dtype).as_strided(shape, strides)


def _plain(tensor_map: TensorMap) -> Tensor:
    _, base, shape, strides, _ = tensor_map
    return _memory(base, tuple(shape), tuple(strides))


def _ragged(tensor_map: TensorMap, rows: int) -> Tensor:
    """[Y, R, C] of a map from `descriptors.ragged_rows`: strides undo each other modulo 2^64, so row r is at 0 + r."""
    _, base, shape, strides, _ = tensor_map
    for row in (0, 7):  # of an expert with rows [5, 5 + 9)
        offset = 2**28 * strides[1] + (5 + 9) * strides[2] + (2**28 - 9 + row) * strides[3]
        assert offset % 2**64 == (5 + row) * strides[3]
    return _memory(base, (shape[0], rows, shape[4]), (strides[0], strides[3], strides[4]))


def _rows(
    a_map: TensorMap, b_map: TensorMap, low_a_map: TensorMap | None, low_b_map: TensorMap | None, c_map: TensorMap,
    h_map: TensorMap | None, in_map: TensorMap | None, out_map: TensorMap | None,
    entries_M4: Tensor, count: Tensor, x: Tensor | None, source_R: Tensor | None, end: Tensor | None,
    x_stride: int, num_rows: int, column_tiles: int, k_tiles: int, swapped: int, grouped: int, low_tiles: int,
    **constants: Any,
) -> None:  # fmt: skip
    """`hopper_products.rows_kernel`."""
    bn, bk, consumers = constants["BN"], constants["BK"], constants["CONSUMERS"]
    gated, transposed = constants["GATED"], constants["TRANS_B"]
    height, sides = consumers * tuning.HEIGHT, consumers - 1
    together = gated and sides == 1  # a box of both planes
    a, b, c = _plain(a_map).float(), _plain(b_map).float(), _ragged(c_map, num_rows)
    b = b if not transposed else b.mT  # [Y, E, K, N]
    columns = bn // 2 if gated else bn
    inner, n = b.shape[2:]
    box = (2 if together else 1, 1, *((bn // (2 if gated else sides), bk) if transposed else (bk, bn // sides)))
    assert b_map[4] == box and a_map[4] == (1, tuning.HEIGHT, bk)
    assert column_tiles * columns >= n and k_tiles * bk >= inner and count[1:].tolist() == [0, 0]
    assert c_map[4] == (1, 1, 1, tuning.HEIGHT, bn // constants["SPLIT"])
    for expert, first, size, row in entries_M4[: int(count[0])].tolist():
        rows = slice(first + row, first + min(row + height, size))
        planes = (0, 1) if gated else range(constants["PLANES"])
        if constants["GATHERED"]:
            assert x is not None and source_R is not None and x_stride == x.stride(0)
            of_planes = [x[source_R[rows].clamp(min=0).long() // constants["CHOICES"]].float()] * len(planes)
        else:
            of_planes = [a[0 if gated else plane, rows] for plane in planes]
        read = [plane if together else plane ^ swapped for plane in planes]
        parts = [of_plane @ b[at, expert] for of_plane, at in zip(of_planes, read, strict=True)]
        if constants["LOW"]:
            assert low_a_map is not None and low_b_map is not None
            low_a, low_b = _plain(low_a_map).float()[0, rows], _plain(low_b_map).float()
            low_b = low_b.mT if transposed else low_b
            assert low_tiles * low_a_map[4][2] >= low_a.shape[1]
            for plane in range(len(parts) if gated else 1):
                parts[plane] += low_a @ low_b[plane, expert]
        if not gated:
            c[0, rows] = sum(parts).to(c.dtype)
            continue
        assert h_map is not None
        gate, up = (part.to(c.dtype) for part in (parts[::-1] if together and swapped else parts))
        c[0, rows], c[1, rows] = gate, up
        h = activate(gate.float(), constants["ACT"]) * up.float()
        _ragged(h_map, num_rows)[0, rows] = h.to(c.dtype)
    if constants["SLOTS"]:
        assert in_map is not None and out_map is not None and source_R is not None and end is not None
        tokens = source_R[: int(end)].long() // constants["CHOICES"]
        _plain(out_map)[: int(end)] = _plain(in_map)[tokens]


def _inner(
    a_map: TensorMap, b_map: TensorMap, c_map: TensorMap, offsets_E: Tensor, order_E: Tensor,
    x: Tensor | None, source_R: Tensor | None, x_stride: int,
    experts: int, planes: int, m_tiles: int, n_tiles: int, grouped: int, height: int, **constants: Any,
) -> None:  # fmt: skip
    """`hopper_inner.inner_kernel`."""
    ends, gathered = offsets_E.tolist(), constants["GATHERED"]
    tokens = None
    if gathered:
        assert x is not None and source_R is not None and x_stride == x.stride(0) and x.shape[1] % 256 == 0
        tokens = x[source_R[: ends[-1]].long() // constants["CHOICES"]]
    a = tokens[None] if gathered == "a" else _ragged(a_map, ends[-1])
    b = tokens if gathered == "b" else _ragged(b_map, ends[-1])[0]
    c = _plain(c_map)[0]
    consumers = constants["CONSUMERS"]
    assert a.shape[2] == height <= m_tiles * consumers * tuning.HEIGHT and b.shape[1] <= n_tiles * constants["BN"]
    assert c.shape[:2] == (planes, experts) and a_map[4][3:] == (constants["BK"], tuning.HEIGHT)
    assert b_map[4][3:] == (constants["BK"], constants["BN"] // (consumers - 1))
    for expert in order_E.tolist():
        rows = slice(ends[expert - 1] if expert else 0, ends[expert])
        c[:, expert] = (a[:, rows].float().mT @ b[rows].float()).to(c.dtype)
