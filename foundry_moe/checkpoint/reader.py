"""Reading blocks of one commit to where ranks need them: each block once, whoever needs any of it.

Each stored block is fetched by one of the ranks that need any of it and given to the others, so that the store sends
every byte once. What is needed, and where it belongs, a `Targets` says; this module knows no state dict and no planner.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from foundry_moe.checkpoint import fault_injection
from foundry_moe.checkpoint.codec import DTYPES
from foundry_moe.checkpoint.collective_errors import Ranks
from foundry_moe.checkpoint.exchange import Fetch, Needs, Traffic, exchange
from foundry_moe.checkpoint.layout import Block, Box
from foundry_moe.checkpoint.ledger import Found
from foundry_moe.checkpoint.range_reads import READS_IN_FLIGHT, Fetcher, Range, ReadPlan, coalesce, narrow_to
from foundry_moe.checkpoint.store import Store

WIDE_BYTES = 2**28  # the widest range that neighbours read again
DIRECT_BYTES = 2**18  # blocks below this on average are read together and copied to their places


class Targets(Protocol):
    """What one rank needs of a commit, and where it belongs."""

    @property
    def reads(self) -> ReadPlan:
        """Fits those of all other ranks."""

    def piece(self, block: Block, rank: int) -> Box:
        """What a rank needs of a block: of those this rank fetches any of their needers, else itself."""

    def place(self, block: Block, piece: Tensor) -> None:
        """Puts this rank's piece of a block, in its dtype and flat, where it belongs."""

    def memory(self, block: Block) -> memoryview | None:
        """The final memory of a block, if the rank needs it whole and its bytes lie together."""


def read_blocks(store: Store, found: Found, ranks: Ranks, targets: Targets) -> Traffic:
    """Brings every block to its places on all ranks. Collective.

    Raises:
        Exception: what failed on this rank; all ranks have finished their exchange by then.
    """
    traffic, began = Traffic(), time.perf_counter()
    objects = found.manifest.objects
    neighbours = ranks.deal(
        lambda: store.identity(f"{found.commit.attempt}/{objects[0][0]}") if objects else None, _neighbours
    )
    fetcher = Fetcher(store, found.commit.attempt, found.manifest)
    mover = _Mover(targets, found, fetcher, ranks.rank)
    needers = targets.reads.needers
    exchange(
        lambda: _fetches(store, found, mover, neighbours),
        fetcher.stream,
        Needs(
            receivers=lambda block: needers[block.item, block.index],
            piece=targets.piece,
            piece_bytes=mover.piece_bytes,
            block=mover.block,
            neighbours=neighbours,
            cut=mover.cut,
            place=mover.place,
            read_again=mover.read_again,
        ),
        ranks.group,
        traffic,
    )
    traffic.bytes_fetched = fetcher.bytes_read
    traffic.seconds = time.perf_counter() - began
    fault_injection.point("load.done")
    return traffic


def _neighbours(seen: list[str | None]) -> list[frozenset[int]]:
    """For each rank those that see its files through the memory of the same host."""
    alike: dict[str, set[int]] = {}
    for rank, identity in enumerate(seen):
        if identity is not None:
            alike.setdefault(identity, set()).add(rank)
    return [
        frozenset(alike[identity] - {rank}) if identity is not None else frozenset()
        for rank, identity in enumerate(seen)
    ]


def _fetches(store: Store, found: Found, mover: _Mover, neighbours: frozenset[int]) -> list[Fetch]:
    """What this rank fetches, in ranges: wide ones of what is read straight to its place, and otherwise such as pass
    through memory that is kept for them."""
    manifest, reads = found.manifest, mover.targets.reads
    here = neighbours | {mover.rank}

    def into(part: Range) -> list[memoryview] | None:
        among_us = all(here.issuperset(reads.needers[block.item, block.index]) for block, _ in part.blocks)
        return mover.memories(part) if among_us else None

    fetches: list[Fetch] = []
    for part in coalesce(manifest, reads.fetched, _range_bytes(store, reads.fetched, neighbours)):
        memory = into(part)
        if memory is not None or part.size_bytes <= store.range_bytes:
            fetches.append(Fetch(part=part, into=memory))
        else:
            narrow = coalesce(manifest, [block for block, _ in part.blocks], store.range_bytes)
            fetches += [Fetch(part=piece, into=into(piece)) for piece in narrow]
    return fetches


def _range_bytes(store: Store, fetched: Sequence[Block], neighbours: frozenset[int]) -> int:
    """Neighbours hear of each range, and a word costs more than a millisecond of a core (976 MiB on four ranks took
    0.66 core-seconds in ranges of 16 MiB, 0.58 of 61): few, but enough for all threads that read."""
    share = sum(block.size_bytes for block in fetched) // READS_IN_FLIGHT
    return max(store.range_bytes, min(share, WIDE_BYTES)) if neighbours else store.range_bytes


class _Mover:
    """Brings blocks to their places on one rank, and cuts pieces of them for others."""

    def __init__(self, targets: Targets, found: Found, fetcher: Fetcher, rank: int) -> None:
        self.targets, self.rank, self._fetcher = targets, rank, fetcher
        self._entries = list(found.manifest.tensors.values())
        self._needed = {(block.item, block.index): block for block in targets.reads.needed}

    def block(self, item: int, index: int) -> Block:
        return self._needed[item, index]

    def piece_bytes(self, block: Block, rank: int) -> int:
        return math.prod(self.targets.piece(block, rank)[1]) * self._entries[block.item].itemsize

    def cut(self, block: Block, raw: Tensor, rank: int) -> Tensor:
        """A rank's piece of a block's bytes, contiguous."""
        box = self.targets.piece(block, rank)
        if box == block.box:
            return raw
        whole = raw.view(DTYPES[self._entries[block.item].dtype]).view(block.box[1])
        return narrow_to(whole, block.box[0], box).contiguous().view(-1).view(torch.uint8)

    def place(self, block: Block, piece: Tensor) -> None:
        """Puts this rank's piece of a block, as uint8, where it belongs."""
        dtype = DTYPES[self._entries[block.item].dtype]
        if piece.storage_offset() % dtype.itemsize:
            piece = piece.clone()  # it came behind a piece of a smaller dtype
        self.targets.place(block, piece.view(dtype))

    def read_again(self, block: Block) -> None:
        """Does all of that for a block that a neighbour has read and checked."""
        memory = self.targets.memory(block)
        if memory is not None:
            self._fetcher.read_again(block, memory)
            return
        raw = torch.empty(block.size_bytes, dtype=torch.uint8)
        self._fetcher.read_again(block, raw.numpy().data)
        self.place(block, self.cut(block, raw, self.rank))

    def memories(self, part: Range) -> list[memoryview] | None:
        """The final memory of each of a range's blocks, if this rank needs all of them whole and can read to it."""
        if part.size_bytes < DIRECT_BYTES * len(part.blocks):
            return None  # small blocks: one request, and then copies
        found = [self.targets.memory(block) for block, _ in part.blocks]
        return None if any(memory is None for memory in found) else [m for m in found if m is not None]
