"""Ranks give each other what they fetched, in rounds of one range each: in memory that they share, or over a CPU group.

Every rank first tells the others which pieces it will give in which round; after that each round is point-to-point
between ranks that share something, so that a large job's replica groups do not wait for each other. A rank on the same
host gets a word, and then reads the giver's memory; or, of a file, what the giver's reading left in the host's memory.
Another gets the bytes. A rank whose fetch failed goes on giving, so that no rank waits for ever; the failure is raised
when all rounds are done.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from foundry_moe.checkpoint.errors import CheckpointError
from foundry_moe.checkpoint.layout import Block
from foundry_moe.checkpoint.ranges import READS_IN_FLIGHT, Range
from foundry_moe.checkpoint.sharing import SharedSlots

Cut = Callable[[Block, Tensor, int], Tensor]  # (block, its bytes, rank): the contiguous piece that the rank needs
Place = Callable[[int, int, Tensor], None]  # (item, index of the block, this rank's piece of it as uint8)
Memory = Callable[[int, int], Sequence[memoryview]]  # (number of the range, bytes): see `ranges.Fetcher.fetch`
Stream = Callable[[Memory], Iterator[Sequence[memoryview] | CheckpointError]]
Given = dict[int, list[tuple[int, int, int]]]  # by round: (item, index, where the block begins in the range)

AHEAD = 3  # rounds that a giver may be ahead of who reads its memory: waiting in every round cost half the speed
SLOTS = READS_IN_FLIGHT + 1 + AHEAD  # ranges that are being read, and those that are being given
WORDS = 2**20  # tags of "you may read" and "I have read" lie above those of rounds


@dataclass(kw_only=True)
class Traffic:
    """What a load cost this rank. Sent are bytes for other ranks, by whichever way."""

    bytes_fetched: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What the exchange asks of the plan.

    receivers: for a fetched block, all ranks that need some of it, this one among them.
    piece_bytes: (block, rank) to the bytes of the rank's piece.
    block: (item, index) to the block, for those that this rank needs.
    neighbours: ranks that can read again, from the memory of their host, what this one has read, and the other way.
    read_again: does that for a block that a neighbour has read, and puts this rank's piece in its place.
    targets: the final memory of each of a range's blocks, if this rank needs all of them whole and can be read to.
    """

    receivers: Callable[[Block], Sequence[int]]
    piece_bytes: Callable[[Block, int], int]
    block: Callable[[int, int], Block]
    neighbours: frozenset[int]
    read_again: Callable[[Block], None]
    targets: Callable[[Range], Sequence[memoryview] | None]


def exchange(
    ranges: Sequence[Range],
    stream: Stream,
    needs: Needs,
    cut: Cut,
    place: Place,
    group: dist.ProcessGroup | None,
    traffic: Traffic,
) -> None:
    """Fetches, keeps and gives this rank's ranges, and receives the others'.

    Args:
        ranges: what this rank fetches, in order.
        stream: starts reading them; it is given a function (number of the range, bytes) that returns memory for one,
            which may be used again `SLOTS` ranges later.
        group: a CPU group over all ranks; None for a single process.

    Raises:
        CheckpointError: a range of this rank could not be read. All ranks have finished the rounds by then.
    """
    rank, world = (dist.get_rank(group), dist.get_world_size(group)) if group is not None else (0, 1)
    outgoing: list[dict[int, list[tuple[Block, int]]]] = [
        {
            to: [(block, start) for block, start in part.blocks if to in needs.receivers(block)]
            for to in sorted({r for block, _ in part.blocks for r in needs.receivers(block)} - {rank})
        }
        for part in ranges
    ]
    direct = [
        needs.targets(part) if needs.neighbours.issuperset(gets) else None
        for part, gets in zip(ranges, outgoing, strict=True)
    ]
    slotted = [part.size_bytes for part, targets in zip(ranges, direct, strict=True) if targets is None]
    alone = len(needs.neighbours) == world - 1  # then it is so on all ranks: nothing else needs to be shared
    slots = SharedSlots(SLOTS, max(slotted, default=0), None if alone else group)
    incoming = _tell(outgoing, world, group) if group is not None and world > 1 else {}
    rounds = max([len(ranges), *(max(given, default=-1) + 1 for given in incoming.values())])

    def memory(number: int, size_bytes: int) -> Sequence[memoryview]:
        return direct[number] or [slots.own(number, size_bytes).numpy().data]

    reading = stream(memory)
    error: CheckpointError | None = None
    given_away: collections.deque[list[tuple[dist.Work | None, Tensor]]] = collections.deque()
    announced: collections.deque[list[tuple[dist.Work | None, list[Block]]]] = collections.deque()

    def read_again() -> None:
        nonlocal error
        for word, blocks in announced.popleft():
            _wait(word)
            for block in blocks:
                try:
                    needs.read_again(block)
                except CheckpointError as failed:
                    error = error or failed

    for number in range(rounds):
        while len(given_away) > AHEAD:  # then the slot that is read into next has been read by all
            _finish(given_away.popleft())
        arriving = []
        announced.append([])
        for source, given in incoming.items():
            if pieces := given.get(number):
                sizes = [needs.piece_bytes(needs.block(item, index), rank) for item, index, _ in pieces]
                size_bytes = sum(sizes)
                traffic.bytes_received += size_bytes
                shared = source in needs.neighbours or slots.reads(source)
                buffer = torch.empty(1 if shared else size_bytes, dtype=torch.uint8)
                tag = WORDS + number if shared else number
                work = dist.irecv(buffer, source, group=group, tag=tag)
                if source in needs.neighbours:
                    announced[-1].append((work, [needs.block(item, index) for item, index, _ in pieces]))
                else:
                    arriving.append((work, source, pieces, buffer, shared))
        leaving: list[tuple[dist.Work | None, Tensor]] = []
        if number < len(ranges):
            fetched = next(reading)
            if isinstance(fetched, CheckpointError):
                error = error or fetched
            data = slots.own(number, ranges[number].size_bytes) if direct[number] is None else torch.empty(0)
            if isinstance(fetched, CheckpointError):
                data.zero_()
            ready: dict[tuple[tuple[int, int], ...], Tensor] = {}
            for to, wanted in outgoing[number].items():
                if to in needs.neighbours or to in slots.readers:
                    word = torch.zeros(1, dtype=torch.uint8)
                    leaving.append((dist.isend(word, to, group=group, tag=WORDS + number), word))
                    traffic.bytes_sent += sum(needs.piece_bytes(block, to) for block, _ in wanted)
                    if to not in needs.neighbours:
                        heard = torch.empty(1, dtype=torch.uint8)
                        leaving.append((dist.irecv(heard, to, group=group, tag=2 * WORDS + number), heard))
                    continue
                parts = [cut(block, data[at : at + block.size_bytes], to) for block, at in wanted]
                traffic.bytes_sent += sum(part.numel() for part in parts)
                key = tuple((part.data_ptr(), part.numel()) for part in parts)
                if key not in ready:  # replicas that need the same bytes share one buffer
                    ready[key] = parts[0] if len(parts) == 1 else torch.cat(parts)
                leaving.append((dist.isend(ready[key], to, group=group, tag=number), ready[key]))
            if error is None and direct[number] is None:
                for block, at in ranges[number].blocks:
                    place(block.item, block.index, cut(block, data[at : at + block.size_bytes], rank))
        for receiving, source, pieces, buffer, shared in arriving:
            _wait(receiving)
            if shared:
                for item, index, start in pieces:
                    block = needs.block(item, index)
                    place(item, index, cut(block, slots.of_peer(source, number, start, block.size_bytes), rank))
                leaving.append((dist.isend(buffer, source, group=group, tag=2 * WORDS + number), buffer))
            else:
                sizes = [needs.piece_bytes(needs.block(item, index), rank) for item, index, _ in pieces]
                for (item, index, _), piece in zip(pieces, buffer.split(sizes), strict=True):
                    place(item, index, piece)
        given_away.append(leaving)
        if len(announced) > AHEAD:
            read_again()
    while announced:
        read_again()
    for leaving in given_away:
        _finish(leaving)
    if error is not None:
        raise error


def _wait(work: dist.Work | None) -> None:
    assert work is not None
    work.wait()


def _finish(leaving: list[tuple[dist.Work | None, Tensor]]) -> None:
    for work, _ in leaving:
        _wait(work)


def _tell(
    outgoing: Sequence[dict[int, list[tuple[Block, int]]]], world: int, group: dist.ProcessGroup
) -> dict[int, Given]:
    """Tells every rank what it will get: for each source, by round, (item, index, start) of its blocks in order."""
    rows: list[list[int]] = [[] for _ in range(world)]
    for number, by_rank in enumerate(outgoing):
        for to, blocks in by_rank.items():
            for block, start in blocks:
                rows[to] += (number, block.item, block.index, start)
    counts_out = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    counts_in = torch.empty_like(counts_out)
    dist.all_to_all_single(counts_in, counts_out, group=group)
    flat_out = torch.tensor([value for row in rows for value in row], dtype=torch.int64)
    flat_in = torch.empty(int(counts_in.sum()), dtype=torch.int64)
    dist.all_to_all_single(flat_in, flat_out, counts_in.tolist(), counts_out.tolist(), group=group)
    incoming: dict[int, Given] = {}
    for source, part in enumerate(flat_in.split(counts_in.tolist())):
        by_round: Given = {}
        for number, item, index, start in part.reshape(-1, 4).tolist():
            by_round.setdefault(number, []).append((item, index, start))
        if by_round:
            incoming[source] = by_round
    return incoming
