"""Blocks on one rank of a load: in what ranges they are fetched, where they go, and what pieces of them others need."""

from __future__ import annotations

import abc
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foundry_moe.checkpoint.codec import DTYPES
from foundry_moe.checkpoint.layout import Block, Box, intersect, narrow_to
from foundry_moe.checkpoint.manifest import Manifest
from foundry_moe.checkpoint.range_reads import Fetcher, Range, ReadPlan, coalesce

DIRECT_BYTES = 2**18  # blocks below this on average are read together and copied to their places


class Targets(abc.ABC):
    """What one rank needs of a commit, and where it belongs. `reads` fits those of all other ranks."""

    rank: int
    manifest: Manifest
    reads: ReadPlan

    @abc.abstractmethod
    def piece(self, block: Block, rank: int) -> Box:
        """What a rank needs of a block: of those this rank fetches any of their needers, else itself."""

    @abc.abstractmethod
    def boxes(self, block: Block) -> Sequence[tuple[Box, Tensor]]:
        """Where this rank needs a block: boxes of the whole tensor that meet it, and the memory of each box."""

    @functools.cached_property
    def dtypes(self) -> list[torch.dtype]:
        """Of the manifest's tensors."""
        return [DTYPES[entry.dtype] for entry in self.manifest.tensors.values()]

    def place(self, block: Block, piece: Tensor) -> None:
        """Puts this rank's piece of a block, in its dtype and flat, where it belongs."""
        mine = self.piece(block, self.rank)
        for box, tensor in self.boxes(block):
            common = intersect(mine, box)
            assert common is not None
            narrow_to(tensor, box[0], common).copy_(narrow_to(piece.view(mine[1]), mine[0], common))

    def memory(self, block: Block) -> memoryview | None:
        """The final memory of a block, if the rank needs it whole and its bytes lie together."""
        (box, tensor), *more = self.boxes(block)
        if more or intersect(block.box, box) != block.box:
            return None
        view = narrow_to(tensor, box[0], block.box)
        if view.device.type != "cpu" or view.dtype != self.dtypes[block.item] or not view.is_contiguous():
            return None
        return view.view(-1).view(torch.uint8).numpy().data


@dataclass(frozen=True, kw_only=True)
class Fetch:
    """A range that this rank fetches. `into` is the final memory of each of its blocks, if it is read straight there:
    then all others that need any of it are neighbours. None: it is read, and then copied or sent."""

    part: Range
    into: Sequence[memoryview] | None


class Mover:
    """Brings blocks to their places on one rank, and cuts pieces of them for others.

    `neighbours` are ranks that can read again, from the memory of their host, what this one has read, and the other
    way.
    """

    def __init__(self, targets: Targets, fetcher: Fetcher, neighbours: frozenset[int]) -> None:
        self.fetcher, self.rank, self.neighbours = fetcher, targets.rank, neighbours
        self.piece, self._targets = targets.piece, targets
        self._needed = {(block.item, block.index): block for block in targets.reads.needed}

    def fetches(self) -> list[Fetch]:
        """What this rank fetches, in order."""
        here = self.neighbours | {self.rank}
        fetches = []
        for part in coalesce(self.fetcher.manifest, self._targets.reads.fetched, self.fetcher.store.range_bytes):
            among_us = all(here.issuperset(self.receivers(block)) for block, _ in part.blocks)
            fetches.append(Fetch(part=part, into=self._memories(part) if among_us else None))
        return fetches

    def _memories(self, part: Range) -> list[memoryview] | None:
        """The final memory of each of a range's blocks, if this rank needs all of them whole and can read to it."""
        if part.size_bytes < DIRECT_BYTES * len(part.blocks):
            return None  # small blocks: one request, and then copies
        found = [self._targets.memory(block) for block, _ in part.blocks]
        return None if any(memory is None for memory in found) else [m for m in found if m is not None]

    def receivers(self, block: Block) -> Sequence[int]:
        """For a fetched block, all ranks that need some of it, this one among them."""
        return self._targets.reads.needers[block.item, block.index]

    def block(self, item: int, index: int) -> Block:
        """One of those that this rank needs."""
        return self._needed[item, index]

    def piece_bytes(self, block: Block, rank: int) -> int:
        return math.prod(self.piece(block, rank)[1]) * self._targets.dtypes[block.item].itemsize

    def cut(self, block: Block, raw: Tensor, rank: int) -> Tensor:
        """A rank's piece of a block's bytes, contiguous."""
        box = self.piece(block, rank)
        if box == block.box:
            return raw
        whole = raw.view(self._targets.dtypes[block.item]).view(block.box[1])
        return narrow_to(whole, block.box[0], box).contiguous().view(-1).view(torch.uint8)

    def place(self, block: Block, piece: Tensor) -> None:
        """Puts this rank's piece of a block, as uint8, where it belongs."""
        dtype = self._targets.dtypes[block.item]
        if piece.storage_offset() % dtype.itemsize:
            piece = piece.clone()  # it came behind a piece of a smaller dtype
        self._targets.place(block, piece.view(dtype))

    def read_again(self, block: Block) -> None:
        """Reads a block that a neighbour has read and checked, and puts this rank's piece of it in its place."""
        memory = self._targets.memory(block)
        if memory is not None:
            self.fetcher.read_again(block, memory)
            return
        raw = torch.empty(block.size_bytes, dtype=torch.uint8)
        self.fetcher.read_again(block, raw.numpy().data)
        self.place(block, self.cut(block, raw, self.rank))
