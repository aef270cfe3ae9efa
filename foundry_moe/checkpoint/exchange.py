"""Ranks give each other what they fetched, in rounds of one range each: tensors over a CPU group, or shared memory.

Every rank first tells the others which pieces it will give in which round; after that each round is point-to-point
between ranks that share something, so that a large job's replica groups do not wait for each other. A rank on the same
host gets a word and reads the giver's memory; another gets the bytes. A rank whose fetch failed goes on giving, so that
no rank waits for ever; the failure is raised when all rounds are done.
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
Stream = Callable[[Callable[[int, int], Tensor]], Iterator[Tensor | CheckpointError]]
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

    receivers: for a fetched block, all ranks that need some of it, this one perhaps among them.
    piece_bytes: (item, index) to the bytes of this rank's piece.
    block: (item, index) to the block, for those that this rank needs.
    """

    receivers: Callable[[Block], Sequence[int]]
    piece_bytes: Callable[[int, int], int]
    block: Callable[[int, int], Block]


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
    slots = SharedSlots(SLOTS, max((part.size_bytes for part in ranges), default=0), group)
    incoming = _tell(outgoing, world, group) if group is not None and world > 1 else {}
    rounds = max([len(ranges), *(max(given, default=-1) + 1 for given in incoming.values())])
    reading = stream(slots.own)
    error: CheckpointError | None = None
    given_away: collections.deque[list[tuple[dist.Work | None, Tensor]]] = collections.deque()
    for number in range(rounds):
        while len(given_away) > AHEAD:  # then the slot that is read into next has been read by all
            _finish(given_away.popleft())
        arriving = []
        for source, given in incoming.items():
            if pieces := given.get(number):
                size_bytes = sum(needs.piece_bytes(item, index) for item, index, _ in pieces)
                shared = slots.reads(source)
                buffer = torch.empty(1 if shared else size_bytes, dtype=torch.uint8)
                tag = WORDS + number if shared else number
                arriving.append((dist.irecv(buffer, source, group=group, tag=tag), source, pieces, buffer, shared))
                traffic.bytes_received += size_bytes
        leaving: list[tuple[dist.Work | None, Tensor]] = []
        if number < len(ranges):
            data = next(reading)
            if isinstance(data, CheckpointError):
                error = error or data
                data = slots.own(number, ranges[number].size_bytes).zero_()
            ready: dict[tuple[tuple[int, int], ...], Tensor] = {}
            for to, wanted in outgoing[number].items():
                parts = [cut(block, data[at : at + block.size_bytes], to) for block, at in wanted]
                traffic.bytes_sent += sum(part.numel() for part in parts)
                if to in slots.readers:
                    word = torch.zeros(1, dtype=torch.uint8)
                    leaving.append((dist.isend(word, to, group=group, tag=WORDS + number), word))
                    heard = torch.empty(1, dtype=torch.uint8)
                    leaving.append((dist.irecv(heard, to, group=group, tag=2 * WORDS + number), heard))
                    continue
                key = tuple((part.data_ptr(), part.numel()) for part in parts)
                if key not in ready:  # replicas that need the same bytes share one buffer
                    ready[key] = parts[0] if len(parts) == 1 else torch.cat(parts)
                leaving.append((dist.isend(ready[key], to, group=group, tag=number), ready[key]))
            if error is None:
                for block, at in ranges[number].blocks:
                    if rank in needs.receivers(block):
                        place(block.item, block.index, cut(block, data[at : at + block.size_bytes], rank))
        for receiving, source, pieces, buffer, shared in arriving:
            _wait(receiving)
            if shared:
                for item, index, start in pieces:
                    block = needs.block(item, index)
                    place(item, index, cut(block, slots.of_peer(source, number, start, block.size_bytes), rank))
                leaving.append((dist.isend(buffer, source, group=group, tag=2 * WORDS + number), buffer))
            else:
                sizes = [needs.piece_bytes(item, index) for item, index, _ in pieces]
                for (item, index, _), piece in zip(pieces, buffer.split(sizes), strict=True):
                    place(item, index, piece)
        given_away.append(leaving)
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
