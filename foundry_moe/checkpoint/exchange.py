"""Ranks give each other what they fetched, in rounds of one range each: in memory that they share, or over a CPU group.

Every rank first tells the others which pieces it will give in which round; after that each round is point-to-point
between ranks that share something, so that a large job's replica groups do not wait for each other. A rank on the same
host gets a word, and then reads the giver's memory; or, of a file, what the giver's reading left in the host's memory.
Another gets the bytes. A rank that has failed, at whatever, goes on giving (the bytes are then of no worth), so that no
rank waits for ever; its error is raised when all rounds are done.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from foundry_moe.checkpoint.collective_errors import FirstError
from foundry_moe.checkpoint.errors import CheckpointError
from foundry_moe.checkpoint.layout import Block, Box
from foundry_moe.checkpoint.range_reads import READS_IN_FLIGHT, Range
from foundry_moe.checkpoint.shared_memory import SharedSlots

Memory = Callable[[int, int], Sequence[memoryview]]  # (number of the range, bytes): see `ranges.Fetcher.fetch`
Reading = Generator[Sequence[memoryview] | CheckpointError, None, None]
Pieces = list[tuple[Block, int]]  # blocks, with where each begins in its range
Pending = tuple[dist.Work | None, Tensor]  # a message that is under way, and its memory

AHEAD = 3  # rounds that a giver may be ahead of who reads its memory: waiting in every round cost half the speed
SLOTS = READS_IN_FLIGHT + 1 + AHEAD  # ranges that are being read, and those that are being given
WORDS = 2**20  # tags of "you may read" and "I have read" lie above those of rounds
ALIGN_BYTES = 64  # of what comes from different ranks, in one buffer


@dataclass(kw_only=True)
class Traffic:
    """What a load cost this rank. Sent are bytes for other ranks, by whichever way."""

    bytes_fetched: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Fetch:
    """A range that this rank fetches. `into` is the final memory of each of its blocks, if it is read straight there:
    then all others that need any of it are neighbours. None: it is read into a slot."""

    part: Range
    into: Sequence[memoryview] | None


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What the exchange asks of the plan, and what is done with blocks on this rank.

    receivers: for a fetched block, all ranks that need some of it, this one among them.
    piece, piece_bytes: what a rank needs of a block, as a box and in bytes.
    block: (item, index) to the block, for those that this rank needs.
    neighbours: ranks that can read again, from the memory of their host, what this one has read, and the other way.
    cut: (block, its bytes, rank) to the contiguous piece that the rank needs.
    place: puts this rank's piece of a block, as uint8, where it belongs.
    read_again: reads a block that a neighbour has read, and puts this rank's piece of it in its place.
    """

    receivers: Callable[[Block], Sequence[int]]
    piece: Callable[[Block, int], Box]
    piece_bytes: Callable[[Block, int], int]
    block: Callable[[int, int], Block]
    neighbours: frozenset[int]
    cut: Callable[[Block, Tensor, int], Tensor]
    place: Callable[[Block, Tensor], None]
    read_again: Callable[[Block], None]


@dataclass(frozen=True, kw_only=True)
class _Parcel:
    """Bytes that are sent in one round: the pieces of some blocks that all of `ranks` need alike."""

    ranks: list[int]
    pieces: Pieces
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class _Arrival:
    """What one rank gives this one in one round; `at` is where it is received if it is sent."""

    source: int
    number: int
    pieces: Pieces
    sizes: list[int]
    at: int

    @property
    def size_bytes(self) -> int:
        return sum(self.sizes)


def exchange(
    plan: Callable[[], Sequence[Fetch]],
    stream: Callable[[Sequence[Range], Memory], Reading],
    needs: Needs,
    group: dist.ProcessGroup | None,
    traffic: Traffic,
) -> None:
    """Fetches, keeps and gives this rank's ranges, and receives the others'. Collective, whatever fails on a rank.

    Args:
        plan: what this rank fetches, in order.
        stream: starts reading that; it is given a function (number of the range, bytes) that returns memory for one,
            which may be used again `SLOTS` ranges later.
        group: a CPU group over all ranks; None for a single process.

    Raises:
        CheckpointError: a range of this rank could not be read.
        Exception: something else failed on this rank; it is raised as it is. Whatever it was, all ranks have finished
            the rounds by then, and nothing of this rank is being read any more.
    """
    _Exchange(needs, group, traffic).run(plan, stream)


class _Exchange:
    """One rank's side. What needs no other rank runs under `failure`; what does, always runs."""

    def __init__(self, needs: Needs, group: dist.ProcessGroup | None, traffic: Traffic) -> None:
        self.rank, self.world = (dist.get_rank(group), dist.get_world_size(group)) if group is not None else (0, 1)
        self.needs, self.group, self.traffic = needs, group, traffic
        self.failure = FirstError()
        self.fetches: Sequence[Fetch] = []
        self.readers: list[list[int]] = []  # by round: ranks that are told that they may read
        self.parcels: list[list[_Parcel]] = []  # by round
        self.arrivals: dict[int, list[_Arrival]] = {}  # by round
        self.received = torch.empty(0, dtype=torch.uint8)  # what one round brings
        self.given: collections.deque[list[Pending]] = collections.deque()  # of the last rounds
        self.announced: collections.deque[list[tuple[Pending, Pieces]]] = collections.deque()  # not yet read again

    def run(self, plan: Callable[[], Sequence[Fetch]], stream: Callable[[Sequence[Range], Memory], Reading]) -> None:
        self._prepare(plan)
        if self._all_are_prepared():
            with contextlib.closing(stream([fetch.part for fetch in self.fetches], self._memory)) as reading:
                for number in range(max([len(self.fetches), *(number + 1 for number in self.arrivals)])):
                    self._round(number, reading)
                while self.announced:
                    self._read_again()
                while self.given:
                    _finish(self.given.popleft())
        if self.failure.error is not None:
            raise self.failure.error

    # Before the first round

    def _prepare(self, plan: Callable[[], Sequence[Fetch]]) -> None:
        """Everything that can fail without a block having been read."""
        self.fetches = self.failure.guard(plan) or []
        outgoing = self.failure.guard(lambda: [self._wanted(fetch.part) for fetch in self.fetches]) or []
        slot_bytes = max((fetch.part.size_bytes for fetch in self.fetches if fetch.into is None), default=0)
        alone = len(self.needs.neighbours) == self.world - 1  # then it is so on all ranks: nothing is shared or sent
        self.slots = SharedSlots(SLOTS, slot_bytes, None if alone else self.group, self.failure)
        told = _tell(outgoing, self.world, self.group) if self.group is not None and self.world > 1 else {}
        self.failure.guard(self._plan_giving, outgoing)
        self.failure.guard(self._plan_arrivals, told)

    def _wanted(self, part: Range) -> dict[int, Pieces]:
        """What each other rank needs of a range."""
        wanted: dict[int, Pieces] = {}
        for block, start in part.blocks:
            for to in self.needs.receivers(block):
                if to != self.rank:
                    wanted.setdefault(to, []).append((block, start))
        return wanted

    def _plan_giving(self, outgoing: list[dict[int, Pieces]]) -> None:
        can_read = self.needs.neighbours | self.slots.readers
        for fetch, wanted in zip(self.fetches, outgoing, strict=True):
            assert fetch.into is None or self.needs.neighbours.issuperset(wanted), "a slot's reader would find nothing"
            self.readers.append([to for to in wanted if to in can_read])
            alike: dict[tuple[tuple[int, int, Box], ...], list[int]] = {}  # replicas that need the same bytes
            for to in sorted(wanted.keys() - can_read):
                boxes = tuple((block.item, block.index, self.needs.piece(block, to)) for block, _ in wanted[to])
                alike.setdefault(boxes, []).append(to)
            self.parcels.append(
                [
                    _Parcel(ranks=ranks, pieces=wanted[ranks[0]], size_bytes=self._bytes(wanted[ranks[0]], ranks[0]))
                    for ranks in alike.values()
                ]
            )
            self.traffic.bytes_sent += sum(self._bytes(pieces, to) for to, pieces in wanted.items())

    def _bytes(self, pieces: Pieces, rank: int) -> int:
        return sum(self.needs.piece_bytes(block, rank) for block, _ in pieces)

    def _plan_arrivals(self, told: dict[int, dict[int, list[tuple[int, int, int]]]]) -> None:
        ends: collections.Counter[int] = collections.Counter()  # by round: bytes that are received
        for source, rounds in told.items():
            for number, rows in rounds.items():
                pieces = [(self.needs.block(item, index), start) for item, index, start in rows]
                sizes = [self.needs.piece_bytes(block, self.rank) for block, _ in pieces]
                arrival = _Arrival(source=source, number=number, pieces=pieces, sizes=sizes, at=ends[number])
                self.arrivals.setdefault(number, []).append(arrival)
                self.traffic.bytes_received += arrival.size_bytes
                if self._is_sent(source):
                    ends[number] += -(-arrival.size_bytes // ALIGN_BYTES) * ALIGN_BYTES
        self.received = torch.empty(max(ends.values(), default=0), dtype=torch.uint8)

    def _is_sent(self, source: int) -> bool:
        return source not in self.needs.neighbours and not self.slots.reads(source)

    def _all_are_prepared(self) -> bool:
        """Collective. A rank that does not know what it must give or take cannot end the rounds with the others."""
        failed = torch.tensor(int(self.failure.error is not None))
        if self.group is not None:
            dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=self.group)
        return not failed.item()

    # The rounds

    def _round(self, number: int, reading: Reading) -> None:
        while len(self.given) > AHEAD:  # then the slot that is read into next has been read by all
            _finish(self.given.popleft())
        self.given.append([])
        self.announced.append([])
        arriving = self._listen(number)
        if number < len(self.fetches):
            self.failure.guard(_next, reading)
            data = self._slot(number)
            self._announce(number)
            self._send(number, data)
            self.failure.guard(self._keep, number, data)
        for message, arrival in arriving:
            self._receive(message, arrival)
        if len(self.announced) > AHEAD:
            self._read_again()

    def _memory(self, number: int, size_bytes: int) -> Sequence[memoryview]:
        return self.fetches[number].into or [self.slots.own(number, size_bytes).numpy().data]

    def _slot(self, number: int) -> Tensor:
        """What was read in this round; empty if it went straight to its place."""
        fetch = self.fetches[number]
        return self.slots.own(number, fetch.part.size_bytes if fetch.into is None else 0)

    def _listen(self, number: int) -> list[tuple[Pending, _Arrival]]:
        """Awaits this round's bytes, and the words of those whose slots are read now."""
        arriving = []
        for arrival in self.arrivals.get(number, ()):
            if self._is_sent(arrival.source):
                buffer, tag = self.received[arrival.at : arrival.at + arrival.size_bytes], number
            else:
                buffer, tag = torch.empty(1, dtype=torch.uint8), WORDS + number
            message = dist.irecv(buffer, arrival.source, group=self.group, tag=tag), buffer
            if arrival.source in self.needs.neighbours:
                self.announced[-1].append((message, arrival.pieces))
            else:
                arriving.append((message, arrival))
        return arriving

    def _announce(self, number: int) -> None:
        """Tells those that can that they may read; who reads a slot answers when it has."""
        for to in self.readers[number]:
            word, heard = torch.zeros(1, dtype=torch.uint8), torch.empty(1, dtype=torch.uint8)
            self.given[-1].append((dist.isend(word, to, group=self.group, tag=WORDS + number), word))
            if to not in self.needs.neighbours:
                self.given[-1].append((dist.irecv(heard, to, group=self.group, tag=2 * WORDS + number), heard))

    def _send(self, number: int, data: Tensor) -> None:
        for parcel in self.parcels[number]:
            contents = self.failure.guard(self._pack, parcel, data)
            if contents is None:
                contents = data[: parcel.size_bytes]  # of no worth, but as many as are awaited
            for to in parcel.ranks:
                self.given[-1].append((dist.isend(contents, to, group=self.group, tag=number), contents))

    def _pack(self, parcel: _Parcel, data: Tensor) -> Tensor:
        parts = [
            self.needs.cut(block, data[at : at + block.size_bytes], parcel.ranks[0]) for block, at in parcel.pieces
        ]
        packed = parts[0] if len(parts) == 1 else torch.cat(parts)
        assert packed.numel() == parcel.size_bytes, (packed.numel(), parcel.size_bytes)
        return packed

    def _keep(self, number: int, data: Tensor) -> None:
        """Puts this rank's part of what it fetched in its place."""
        fetch = self.fetches[number]
        for block, at in fetch.part.blocks if fetch.into is None else ():
            self.needs.place(block, self.needs.cut(block, data[at : at + block.size_bytes], self.rank))

    def _receive(self, message: Pending, arrival: _Arrival) -> None:
        _finish([message])
        buffer = message[1]
        if self._is_sent(arrival.source):
            self.failure.guard(self._place_parcel, arrival, buffer)
        else:
            self.failure.guard(self._place_from_slot, arrival)
            answer = dist.isend(buffer, arrival.source, group=self.group, tag=2 * WORDS + arrival.number)
            self.given[-1].append((answer, buffer))

    def _place_parcel(self, arrival: _Arrival, buffer: Tensor) -> None:
        for (block, _), piece in zip(arrival.pieces, buffer.split(arrival.sizes), strict=True):
            self.needs.place(block, piece)

    def _place_from_slot(self, arrival: _Arrival) -> None:
        for block, start in arrival.pieces:
            raw = self.slots.of_peer(arrival.source, arrival.number, start, block.size_bytes)
            self.needs.place(block, self.needs.cut(block, raw, self.rank))

    def _read_again(self) -> None:
        """Reads what neighbours announced some rounds ago."""
        for message, pieces in self.announced.popleft():
            _finish([message])
            for block, _ in pieces:
                self.failure.guard(self.needs.read_again, block)


def _next(reading: Reading) -> None:
    """Waits for the next range; the memory is known."""
    fetched = next(reading)
    if isinstance(fetched, CheckpointError):
        raise fetched


def _finish(messages: list[Pending]) -> None:
    for work, _ in messages:
        assert work is not None
        work.wait()


def _tell(
    outgoing: Sequence[dict[int, Pieces]], world: int, group: dist.ProcessGroup
) -> dict[int, dict[int, list[tuple[int, int, int]]]]:
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
    incoming: dict[int, dict[int, list[tuple[int, int, int]]]] = {}
    for source, part in enumerate(flat_in.split(counts_in.tolist())):
        by_round: dict[int, list[tuple[int, int, int]]] = {}
        for number, item, index, start in part.reshape(-1, 4).tolist():
            by_round.setdefault(number, []).append((item, index, start))
        if by_round:
            incoming[source] = by_round
    return incoming
