"""Sketches of tensors: the sum of squares and some random projections, which are equal however a tensor is divided.

A projection is the inner product with a random tensor, the outer product of one vector of normal numbers for each
dimension. The vectors depend on the parameter's name and the dimension alone, so a shard needs only its slices of them,
and the sketches of shards add up to that of the whole. A tensor of three or more dimensions is a stack, such as the
matrices of experts: each index of its first dimension has a sketch of its own.

Shapes: U units (1, or the length of a stack), P projections.
"""

from __future__ import annotations

import functools
import hashlib

import torch
from torch import Tensor

STACK = 3  # dimensions from which on the first one is a stack's
_CHUNK = 2**26  # elements that are converted at a time


def units_of(shape: tuple[int, ...]) -> int:
    """U of a tensor, or of a shard of it."""
    return shape[0] if len(shape) >= STACK else 1


@torch.no_grad()
def sketch(local: Tensor, begin: tuple[int, ...], shape: tuple[int, ...], key: str, projections: int) -> Tensor:
    """fp64 [U, 1 + P] on the tensor's device: the sum of squares, then the projections.

    The inner products along the last dimension are computed in fp32 for tensors of at most 32 bits on a GPU, and in
    fp64 otherwise.

    Args:
        local: a box of the tensor.
        begin: index of the box in the whole tensor.
        shape: of the whole tensor.
        key: the parameter's name.
    """
    units = units_of(tuple(local.shape)) if local.dim() >= STACK else 1
    if not local.numel():
        return torch.zeros(units, 1 + projections, dtype=torch.float64, device=local.device)
    box = local.reshape(1) if local.dim() == 0 else local
    begin, shape = (begin, shape) if local.dim() else ((0,), (1,))
    first = 1 if box.dim() >= STACK else 0  # the first dimension that is summed
    vectors = [
        _vectors(f"{key}/{dim}", shape[dim], projections, box.device)[begin[dim] : begin[dim] + box.shape[dim]]
        for dim in range(first, box.dim())
    ]
    rows = max(1, _CHUNK // max(1, box[0].numel()))
    parts = [_contract(part, vectors, part_begin, first) for part_begin, part in _chunks(box, rows)]
    return torch.cat(parts) if first else torch.stack(parts).sum(0)


def _chunks(box: Tensor, rows: int) -> list[tuple[int, Tensor]]:
    return [(at, box[at : at + rows]) for at in range(0, box.shape[0], rows)]


def _contract(part: Tensor, vectors: list[Tensor], at: int, first: int) -> Tensor:
    """[U, 1 + P] of rows `at` and following of a box."""
    if not first:
        vectors = [vectors[0][at : at + part.shape[0]], *vectors[1:]]
    exact = part.device.type == "cpu" or part.dtype == torch.float64
    part = part.to(torch.float64 if exact else torch.float32)
    flat = part.reshape(part.shape[0] if first else 1, -1)
    squares = torch.linalg.vector_norm(flat, dim=1, dtype=torch.float64).square()
    *outer, last = vectors
    projected = _matmul(part, last.to(part.dtype)).double()
    for vector in reversed(outer):
        projected = (projected * vector).sum(-2)
    return torch.cat([squares[:, None], projected.reshape(flat.shape[0], -1)], dim=1)


def _matmul(left: Tensor, right: Tensor) -> Tensor:
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        return left @ right
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed


@functools.lru_cache(maxsize=8192)
def _vectors(key: str, size: int, projections: int, device: torch.device) -> Tensor:
    """fp64 [size, P], the same numbers on every rank and device."""
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little") >> 1
    drawn = torch.randn(size, projections, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return drawn.to(device)
