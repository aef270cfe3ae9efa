"""Sketches of tensors: the sum of squares and some random projections, which are equal however a tensor is divided.

A projection is the inner product of normal numbers with all elements of a small tensor, or with `SAMPLES` elements at
random places of a larger one. Numbers and places depend on the whole tensor's shape alone, so a shard computes its part
of the sum, and the sketches of shards add up to that of the whole. A tensor of three or more dimensions is a stack,
such as the matrices of experts: each index of its first dimension has a sketch of its own.

Shapes: U units (1, or the length of a stack), J projections, M sampled elements of a unit that are in the shard.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

STACK = 3  # dimensions from which on the first one is a stack's
SAMPLES = 2**16  # 3% of a matrix of 2048 x 1024
_SAMPLED_AT_ONCE = 256 * SAMPLES  # elements that are copied for one product, at 16 bytes or less


class Part(NamedTuple):
    """A rank's box of a tensor. local: its elements. begin: index of the box in the whole, which has this shape."""

    local: Tensor
    begin: tuple[int, ...]
    shape: tuple[int, ...]


def units_of(shape: tuple[int, ...]) -> int:
    """U of a tensor, or of a shard of it."""
    return shape[0] if len(shape) >= STACK else 1


@torch.no_grad()
def sketch(parts: Sequence[Part], projections: int) -> Tensor:
    """fp64 [sum of U, 1 + J] of tensors on one device: sums of squares, then projections. Does not wait for the device.

    All norms of a dtype are one call, and tensors of the same shape and place share a product.
    """
    counts = [units_of(tuple(part.local.shape)) for part in parts]
    flat = [
        part.local.reshape(units, part.local.numel() // max(units, 1))
        for units, part in zip(counts, parts, strict=True)
    ]
    zero = torch.zeros(1, 1 + projections, dtype=torch.float64, device=parts[0].local.device)
    squares = [zero[0, :1].expand(units) for units in counts]
    projected = [zero[:, 1:].expand(units, -1) for units in counts]
    by_dtype: dict[torch.dtype, list[int]] = {}
    by_place: dict[tuple, list[int]] = {}
    for index, part in enumerate(parts):
        if part.local.numel():
            by_dtype.setdefault(part.local.dtype, []).append(index)
            place = (part.local.dtype, tuple(part.local.shape), tuple(part.begin), tuple(part.shape))
            by_place.setdefault(place, []).append(index)
    for indices in by_dtype.values():
        norms = torch._foreach_norm([row for i in indices for row in flat[i].unbind(0)], 2, torch.float64)
        rows = torch.stack(norms).square().split([counts[i] for i in indices])
        for i, of_tensor in zip(indices, rows, strict=True):
            squares[i] = of_tensor
    for (_, size, begin, shape), indices in by_place.items():
        index_M, numbers_MJ = _draw(size, begin, shape, projections, zero.device)
        units = max(1, _SAMPLED_AT_ONCE // max(1, len(numbers_MJ)))
        pieces = [piece for i in indices for piece in flat[i].split(units)]
        at_once = max(1, units // counts[indices[0]])  # one, if a tensor has more than one piece
        products = [
            _project(pieces[first : first + at_once], index_M, numbers_MJ) for first in range(0, len(pieces), at_once)
        ]
        for i, of_tensor in zip(indices, torch.cat(products).split(counts[indices[0]]), strict=True):
            projected[i] = of_tensor
    return torch.cat([torch.cat(squares)[:, None], torch.cat(projected)], dim=1)


def _project(pieces: Sequence[Tensor], index_M: Tensor | None, numbers_MJ: Tensor) -> Tensor:
    sampled = pieces if index_M is None else [piece.index_select(1, index_M) for piece in pieces]
    return torch.cat(list(sampled)).double() @ numbers_MJ


@functools.lru_cache(maxsize=512)
def _draw(
    size: tuple[int, ...], begin: tuple[int, ...], shape: tuple[int, ...], projections: int, device: torch.device
) -> tuple[Tensor | None, Tensor]:
    """Of the sampled elements of a unit: [M] indices of those in the box, None = all of it; fp64 [M, J] numbers."""
    skip = 1 if len(shape) >= STACK else 0
    size, begin, shape = size[skip:], begin[skip:], shape[skip:]
    seed = int.from_bytes(hashlib.sha256(repr(shape).encode()).digest()[:8], "little") >> 1
    random, numel = torch.Generator().manual_seed(seed), math.prod(shape)
    whole_M = torch.arange(numel) if numel <= SAMPLES else torch.randint(numel, (SAMPLES,), generator=random).sort()[0]
    numbers_MJ = torch.randn(len(whole_M), projections, dtype=torch.float64, generator=random)
    inside_M, local_M = torch.ones(len(whole_M), dtype=torch.bool), torch.zeros_like(whole_M)
    stride = numel
    for dim, length in enumerate(shape):
        stride //= length
        place_M = whole_M // stride % length - begin[dim]
        inside_M &= (place_M >= 0) & (place_M < size[dim])
        local_M = local_M * size[dim] + place_M
    index_M = None if numel <= SAMPLES else local_M[inside_M].to(device)
    return index_M, numbers_MJ[inside_M].to(device)
