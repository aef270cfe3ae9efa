"""Placement of tensors over ranks, and which rank writes which blocks: plain integers, no process group.

From a DTensor's mesh and placements every rank computes what all ranks hold, so that plans need no communication.
Legend: a box is (offsets, sizes) in the global tensor; a chunk is the box that a rank holds, with all ranks that hold
the same one; a block is a part of a chunk that is stored and hashed as one unit.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import xxhash

if TYPE_CHECKING:  # commands that read a checkpoint without its tensors start without torch
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

Box = tuple[tuple[int, ...], tuple[int, ...]]

MIN_EXPERT_BYTES = 4096  # smaller experts share blocks
BLOCK_BYTES = 16 * 2**20  # one request reads one block; a rank that needs part of a block reads all of it


def intersect(a: Box, b: Box) -> Box | None:
    """The intersection of two boxes; None if it is empty."""
    starts = tuple(max(x, y) for x, y in zip(a[0], b[0], strict=True))
    ends = tuple(min(x + m, y + n) for x, m, y, n in zip(a[0], a[1], b[0], b[1], strict=True))
    sizes = tuple(e - s for s, e in zip(starts, ends, strict=True))
    return (starts, sizes) if all(size > 0 for size in sizes) else None


def narrow_to(tensor: Tensor, origin: Sequence[int], box: Box) -> Tensor:
    """The part `box` of a tensor whose first element is at `origin`."""
    for dim, (start, size) in enumerate(zip(*box, strict=True)):
        if size != tensor.shape[dim]:
            tensor = tensor.narrow(dim, start - origin[dim], size)
    return tensor


class Grid(NamedTuple):
    """The ranks of a mesh, in its shape. `ranks` is row-major."""

    shape: tuple[int, ...]
    ranks: tuple[int, ...]


class Chunks:
    """The boxes of one tensor that ranks hold or need, each with all its ranks."""

    def __init__(self, chunks: list[tuple[Box, tuple[int, ...]]]) -> None:
        self.chunks = chunks

    @functools.cached_property
    def chunks_of_rank(self) -> dict[int, list[int]]:
        """The indices of each rank's chunks."""
        found: dict[int, list[int]] = {}
        for index, (_, ranks) in enumerate(self.chunks):
            for rank in ranks:
                found.setdefault(rank, []).append(index)
        return found

    def boxes_of(self, rank: int) -> list[Box]:
        return [self.chunks[index][0] for index in self.chunks_of_rank.get(rank, ())]

    @functools.cached_property
    def corners(self) -> tuple[np.ndarray, np.ndarray]:
        """Starts and ends of all chunks, each [chunks, dims]."""
        starts = np.array([box[0] for box, _ in self.chunks], dtype=np.int64).reshape(len(self.chunks), -1)
        sizes = np.array([box[1] for box, _ in self.chunks], dtype=np.int64).reshape(len(self.chunks), -1)
        return starts, starts + sizes


class Layout(Chunks):
    """Placement of one tensor: its global shape, the mesh, and for each mesh dimension the tensor dimension that it
    shards, or None where it replicates."""

    def __init__(self, shape: tuple[int, ...], grid: Grid, sharded: tuple[int | None, ...]) -> None:
        self.shape, self.grid, self.sharded = shape, grid, sharded

    @functools.cached_property
    def digest(self) -> bytes:
        """Equal for equal layouts in all processes."""
        return xxhash.xxh3_128_digest(repr((self.shape, self.grid, self.sharded)).encode())

    @functools.cached_property
    def chunks(self) -> list[tuple[Box, tuple[int, ...]]]:  # type: ignore[override]
        """The distinct non-empty boxes; a rank holds at most one."""
        ranks = np.asarray(self.grid.ranks).reshape(self.grid.shape)
        counts = [n if dim is not None else 1 for n, dim in zip(self.grid.shape, self.sharded, strict=True)]
        found = []
        for coordinate in itertools.product(*(range(n) for n in counts)):
            offsets, sizes = [0] * len(self.shape), list(self.shape)
            for index, count, dim in zip(coordinate, self.grid.shape, self.sharded, strict=True):
                if dim is None:
                    continue
                step = -(-sizes[dim] // count)  # torch.chunk's rule: all but the last are full
                start = min(step * index, sizes[dim])
                offsets[dim] += start
                sizes[dim] = min(step, sizes[dim] - start)
            if all(sizes):
                where = tuple(
                    slice(None) if dim is None else i for i, dim in zip(coordinate, self.sharded, strict=True)
                )
                found.append(((tuple(offsets), tuple(sizes)), tuple(ranks[where].reshape(-1).tolist())))
        return found


make_layout = functools.lru_cache(maxsize=65536)(Layout)  # equal layouts are one object


@functools.lru_cache(maxsize=65536)
def replicated(shape: tuple[int, ...], world_size: int) -> Layout:
    """A tensor that every rank holds in full."""
    return make_layout(shape, Grid((world_size,), tuple(range(world_size))), (None,))


def layout_of(tensor: Tensor, world_size: int, name: str = "tensor") -> Layout:
    """The layout of a tensor; one that is not a DTensor must be equal on all ranks.

    Raises:
        ValueError: a placement other than Replicate and Shard.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    if not isinstance(tensor, DTensor):
        return replicated(tuple(tensor.shape), world_size)
    sharded: list[int | None] = []
    for placement in tensor.placements:
        if type(placement) is Shard:
            sharded.append(placement.dim)
        elif isinstance(placement, Replicate):
            sharded.append(None)
        else:
            raise ValueError(f"{name} has the placement {placement}: only Shard and Replicate can be checkpointed")
    return make_layout(tuple(tensor.shape), _grid_of(tensor.device_mesh), tuple(sharded))


@functools.lru_cache(maxsize=16)  # PyTorch recomputes the ranks at each access: a quarter of the time of a plan
def _grid_of(mesh: DeviceMesh) -> Grid:
    return Grid(tuple(mesh.mesh.shape), tuple(mesh.mesh.flatten().tolist()))


@functools.lru_cache(maxsize=65536)
def cut(box: Box, itemsize: int, max_bytes: int = BLOCK_BYTES) -> tuple[Box, ...]:
    """Cuts a chunk into blocks of at most `max_bytes`, in row-major order. In a tensor of three dimensions each index
    of the first, an expert, has its own blocks unless they would be tiny."""
    offsets, sizes = box
    if not sizes or (itemsize * math.prod(sizes) <= max_bytes and not _is_experts(sizes, itemsize)):
        return (box,)
    if sizes[0] == 1:
        inner = cut((offsets[1:], sizes[1:]), itemsize, max_bytes)
        return tuple(((offsets[0], *o), (1, *s)) for o, s in inner)
    row_bytes = itemsize * math.prod(sizes[1:])
    rows = 1 if _is_experts(sizes, itemsize) else max(1, max_bytes // row_bytes)
    pieces = (
        ((offsets[0] + start, *offsets[1:]), (min(rows, sizes[0] - start), *sizes[1:]))
        for start in range(0, sizes[0], rows)
    )
    return tuple(itertools.chain.from_iterable(cut(piece, itemsize, max_bytes) for piece in pieces))


def _is_experts(sizes: tuple[int, ...], itemsize: int) -> bool:
    return len(sizes) == 3 and sizes[0] > 1 and itemsize * math.prod(sizes[1:]) >= MIN_EXPERT_BYTES


@dataclass(frozen=True)
class Block:
    """One block of one tensor, ordered by (item, index) on all ranks."""

    item: int
    index: int
    box: Box
    size_bytes: int


def deal(blocks: Iterable[Block], holders: Sequence[int]) -> dict[int, list[Block]]:
    """Divides blocks among the ranks that all hold them, evenly by bytes: the largest first, each to the rank with the
    fewest bytes. Deterministic. Each rank's blocks are in (item, index) order."""
    loads = [(0, position) for position in range(len(holders))]
    dealt: dict[int, list[Block]] = {rank: [] for rank in holders}
    for block in sorted(blocks, key=lambda b: (-b.size_bytes, b.item, b.index)):
        load, position = loads[0]
        heapq.heapreplace(loads, (load + block.size_bytes, position))
        dealt[holders[position]].append(block)
    for mine in dealt.values():
        mine.sort(key=lambda b: (b.item, b.index))
    return dealt


def plan_writes(
    tensors: Sequence[tuple[Layout, int]], *, rank: int | None = None, max_bytes: int = BLOCK_BYTES
) -> dict[int, list[Block]]:
    """Plans which blocks each rank writes, so that every element is written exactly once.

    Args:
        tensors: (layout, bytes of an element) of each tensor, in an order that all ranks share.
        rank: plan for this rank alone, at the cost of what it holds; None plans for all.
        max_bytes: the largest block.

    Returns:
        For each planned rank its blocks, in (item, index) order. A block's index counts through the tensor's chunks
        in order, so it is the same however many ranks are planned.
    """
    groups: dict[tuple[int, ...], list[Block]] = {}
    for item, (layout, itemsize) in enumerate(tensors):
        first = 0
        for box, holders in layout.chunks:
            pieces = cut(box, itemsize, max_bytes)
            if rank is None or rank in holders:
                group = groups.setdefault(holders, [])
                group.extend(
                    Block(item, first + i, piece, itemsize * math.prod(piece[1])) for i, piece in enumerate(pieces)
                )
            first += len(pieces)
    plan: dict[int, list[Block]] = {} if rank is None else {rank: []}
    for holders, blocks in groups.items():
        for member, mine in deal(blocks, holders).items():
            if rank is None or member == rank:
                plan.setdefault(member, []).extend(mine)
    for mine in plan.values():
        mine.sort(key=lambda b: (b.item, b.index))
    return plan
