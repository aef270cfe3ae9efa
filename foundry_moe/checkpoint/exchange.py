"""Reading blocks of one commit to where ranks need them: each block once, whoever needs any of it.

Each stored block is fetched by one of the ranks that need any of it and given to the others, so that the store sends
every byte once. `Targets` say what a rank needs, and where it belongs; this module knows no state dict and no planner.

Ranks give each other what they fetched as messages over a CPU group, in rounds of one range each. Every rank first
tells the others which pieces it will give in which round; after that each round is point-to-point between ranks that
share something, so that a large job's replica groups do not wait for each other. Neighbours, which find in the memory
of their host what another has read, are told the blocks and sent nothing. A rank that has failed, at whatever, goes on
giving (its bytes are not used then), so that no rank waits for ever; its error is raised when all rounds are done.
"""

from __future__ import annotations

import collections
import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from foundry_moe.checkpoint import fault_injection
from foundry_moe.checkpoint.collective_errors import FirstError, Ranks
from foundry_moe.checkpoint.dtypes import DTYPES
from foundry_moe.checkpoint.errors import CheckpointError
from foundry_moe.checkpoint.layout import Block, Box, Chunks, bounds, intersect, narrow_to
from foundry_moe.checkpoint.ledger import Found
from foundry_moe.checkpoint.manifest import Manifest
from foundry_moe.checkpoint.range_reads import READS_IN_FLIGHT, Fetcher, Range, Reading, coalesce, plan_reads
from foundry_moe.checkpoint.store import Store

Place = tuple[Box, Tensor]  # a box of a whole tensor, and the memory that it fills
Pieces = list[tuple[Block, int]]  # blocks, with where each begins in its range
Pending = tuple[dist.Work | None, Tensor]  # a message that is under way, and its memory
Told = dict[int, dict[int, list[tuple[int, int, int]]]]  # for each source, by round: (item, index, start) of its blocks

AHEAD = 3  # rounds that a giver may be ahead of who receives
SLOTS = READS_IN_FLIGHT + 1 + AHEAD  # ranges that are being read, and those that are being sent
DIRECT_BYTES = 2**18  # blocks below this on average are read together and copied to their places


@dataclass(kw_only=True)
class Traffic:
    """What a load cost this rank. Sent are bytes for other ranks, those that they read again among them."""

    bytes_fetched: int = 0
    bytes_sent: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Fetch:
    """A range that this rank fetches. `into` is the final memory of each of its blocks, if it is read straight there:
    then all others that need any of it are neighbours. None: it is read, and then copied or sent."""

    part: Range
    into: Sequence[memoryview] | None


class Targets:
    """What one rank needs of a commit and where it belongs: brings blocks there, and cuts pieces of them for others."""

    fetcher: Fetcher
    neighbours: frozenset[int]

    def __init__(
        self, manifest: Manifest, rank: int, needs: Mapping[str, Chunks], places: Mapping[str, Sequence[Place]]
    ) -> None:
        """Plans this rank's part of a load.

        Args:
            needs: for each tensor that is loaded, which ranks need which boxes of it; the same on all ranks.
            places: for each tensor this rank's boxes, with their memory.
        """
        self.manifest, self.rank = manifest, rank
        self.reads = plan_reads(manifest, needs, rank)
        self.dtypes = [DTYPES[entry.dtype] for entry in manifest.tensors.values()]
        self._needs = [needs.get(name) for name in manifest.tensors]
        self._places = [places.get(name, ()) for name in manifest.tensors]
        self._pieces: dict[tuple[int, int, int], Box] = {}
        self._needed = {(block.item, block.index): block for block in self.reads.needed}

    def meet(self, fetcher: Fetcher, neighbours: frozenset[int]) -> None:
        """What to read by, and which ranks can read again, from the memory of their host, what this one has read."""
        self.fetcher, self.neighbours = fetcher, neighbours

    def fetches(self) -> list[Fetch]:
        """What this rank fetches, in order."""
        here = self.neighbours | {self.rank}
        fetches = []
        for part in coalesce(self.manifest, self.reads.fetched, self.fetcher.store.range_bytes):
            among_us = all(here.issuperset(self.receivers(block)) for block, _ in part.blocks)
            fetches.append(Fetch(part=part, into=self._memories(part) if among_us else None))
        return fetches

    def _memories(self, part: Range) -> list[memoryview] | None:
        """The final memory of each of a range's blocks, if this rank needs all of them whole and can read to it."""
        if part.size_bytes < DIRECT_BYTES * len(part.blocks):
            return None  # small blocks: one request, and then copies
        found = [self._memory(block) for block, _ in part.blocks]
        return None if any(memory is None for memory in found) else [m for m in found if m is not None]

    def _memory(self, block: Block) -> memoryview | None:
        """The final memory of a block, if the rank needs it whole and its bytes lie together."""
        (box, tensor), *more = self._places_of(block)
        if more or intersect(block.box, box) != block.box:
            return None
        view = narrow_to(tensor, box[0], block.box)
        if view.device.type != "cpu" or view.dtype != self.dtypes[block.item] or not view.is_contiguous():
            return None
        return view.view(-1).view(torch.uint8).numpy().data

    def _places_of(self, block: Block) -> list[Place]:
        """Where this rank needs a block: boxes of the whole tensor that meet it, and the memory of each box."""
        return [place for place in self._places[block.item] if intersect(block.box, place[0]) is not None]

    def receivers(self, block: Block) -> Sequence[int]:
        """For a fetched block, all ranks that need some of it, this one among them."""
        return self.reads.needers[block.item, block.index]

    def block(self, item: int, index: int) -> Block:
        """One of those that this rank needs."""
        return self._needed[item, index]

    def piece(self, block: Block, rank: int) -> Box:
        """The smallest box that holds all that a rank needs of a block."""
        key = (block.item, block.index, rank)
        if key not in self._pieces:
            needs = self._needs[block.item]
            assert needs is not None
            common = (intersect(block.box, box) for box in needs.boxes_of(rank))
            self._pieces[key] = bounds([box for box in common if box is not None])
        return self._pieces[key]

    def piece_bytes(self, block: Block, rank: int) -> int:
        return math.prod(self.piece(block, rank)[1]) * self.dtypes[block.item].itemsize

    def cut(self, block: Block, raw: Tensor, rank: int) -> Tensor:
        """A rank's piece of a block's bytes, contiguous."""
        box = self.piece(block, rank)
        if box == block.box:
            return raw
        whole = raw.view(self.dtypes[block.item]).view(block.box[1])
        return narrow_to(whole, block.box[0], box).contiguous().view(-1).view(torch.uint8)

    def place(self, block: Block, piece: Tensor) -> None:
        """Puts this rank's piece of a block, as uint8, where it belongs."""
        dtype, mine = self.dtypes[block.item], self.piece(block, self.rank)
        if piece.storage_offset() % dtype.itemsize:
            piece = piece.clone()  # it came behind a piece of a smaller dtype
        elements = piece.view(dtype).view(mine[1])
        for box, tensor in self._places_of(block):
            common = intersect(mine, box)
            assert common is not None
            narrow_to(tensor, box[0], common).copy_(narrow_to(elements, mine[0], common))

    def read_again(self, block: Block) -> None:
        """Reads a block that a neighbour has read and checked, and puts this rank's piece of it in its place."""
        memory = self._memory(block)
        if memory is not None:
            self.fetcher.read_again(block, memory)
            return
        raw = torch.empty(block.size_bytes, dtype=torch.uint8)
        self.fetcher.read_again(block, raw.numpy().data)
        self.place(block, self.cut(block, raw, self.rank))


def read_blocks(store: Store, found: Found, ranks: Ranks, plan: Callable[[], Targets]) -> Traffic:
    """Brings every block to its places on all ranks. Collective.

    Args:
        plan: makes this rank's targets.

    Raises:
        RanksError: what failed on which ranks, on all of them.
    """
    traffic, began = Traffic(), time.perf_counter()
    objects = found.manifest.objects
    made: list[Targets] = []

    def look() -> str | None:
        made.append(plan())
        return store.identity(f"{found.commit.attempt}/{objects[0][0]}") if objects else None

    seen = ranks.decide(look, lambda seen: seen)
    alike = frozenset(
        rank for rank, identity in enumerate(seen) if identity is not None and identity == seen[ranks.rank]
    )
    (targets,) = made
    targets.meet(Fetcher(store, found.commit.attempt, found.manifest), alike - {ranks.rank})
    again: list[Block] = []
    ranks.decide(lambda: again.extend(_Exchange(targets, ranks.group, traffic).run()), lambda _: None)

    def read_again() -> None:  # what others have read, now that every hash is known to be right
        with ThreadPoolExecutor(READS_IN_FLIGHT, "checkpoint-read") as pool:
            list(pool.map(targets.read_again, again))

    ranks.decide(read_again, lambda _: None)
    traffic.bytes_fetched = targets.fetcher.bytes_read
    traffic.seconds = time.perf_counter() - began
    fault_injection.point("load.done")
    return traffic


@dataclass(frozen=True, kw_only=True)
class _Parcel:
    """Bytes that are sent in one round: the pieces of some blocks that all of `ranks` need alike."""

    ranks: list[int]
    pieces: Pieces
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class _Arrival:
    """What one rank sends this one in one round: a block's piece after the other."""

    source: int
    blocks: list[Block]
    sizes: list[int]


class _Exchange:
    """One rank's side. What needs no other rank runs under `failure`; what does, always runs."""

    def __init__(self, targets: Targets, group: dist.ProcessGroup | None, traffic: Traffic) -> None:
        self.targets, self.group, self.traffic = targets, group, traffic
        self.world = dist.get_world_size(group) if group is not None else 1
        self.failure = FirstError()
        self.fetches: Sequence[Fetch] = []
        self.slots, self.slot_bytes = torch.empty(0, dtype=torch.uint8), 0
        self.parcels: list[list[_Parcel]] = []  # by round
        self.arrivals: dict[int, list[_Arrival]] = {}  # by round
        self.again: list[Block] = []  # a neighbour reads them
        self.given: collections.deque[list[Pending]] = collections.deque()  # of the last rounds

    def run(self) -> list[Block]:
        """Fetches, keeps and gives this rank's ranges, and receives the others'. Collective, whatever fails on a rank.

        Returns:
            The blocks that this rank is to read again, once no rank has failed.

        Raises:
            Exception: what failed on this rank, as it is. Whatever it was, all ranks have finished the rounds by then,
                and nothing of this rank is being read any more.
        """
        self._prepare()
        if self._all_are_prepared():
            parts = [fetch.part for fetch in self.fetches]
            with contextlib.closing(self.targets.fetcher.stream(parts, self._memory)) as reading:
                for number in range(max([len(parts), *(number + 1 for number in self.arrivals)])):
                    self._round(number, reading)
                while self.given:
                    _finish(self.given.popleft())
        if self.failure.error is not None:
            raise self.failure.error
        return self.again

    # Before the first round

    def _prepare(self) -> None:
        """Everything that can fail without a block having been read."""
        self.fetches = self.failure.guard(self.targets.fetches) or []
        outgoing = self.failure.guard(lambda: [self._wanted(fetch.part) for fetch in self.fetches]) or []
        self.slot_bytes = max((fetch.part.size_bytes for fetch in self.fetches if fetch.into is None), default=0)
        slots = self.failure.guard(lambda: torch.empty(SLOTS * self.slot_bytes, dtype=torch.uint8))
        self.slots = self.slots if slots is None else slots
        told = _tell(outgoing, self.world, self.group) if self.group is not None and self.world > 1 else {}
        self.failure.guard(self._plan_giving, outgoing)
        self.failure.guard(self._plan_arrivals, told)

    def _wanted(self, part: Range) -> dict[int, Pieces]:
        """What each other rank needs of a range."""
        wanted: dict[int, Pieces] = {}
        for block, start in part.blocks:
            for to in self.targets.receivers(block):
                if to != self.targets.rank:
                    wanted.setdefault(to, []).append((block, start))
        return wanted

    def _plan_giving(self, outgoing: list[dict[int, Pieces]]) -> None:
        for fetch, wanted in zip(self.fetches, outgoing, strict=True):
            assert fetch.into is None or self.targets.neighbours.issuperset(wanted), "there would be nothing to send"
            alike: dict[tuple[tuple[int, int, Box], ...], list[int]] = {}  # replicas that need the same bytes
            for to in sorted(wanted.keys() - self.targets.neighbours):
                boxes = tuple((block.item, block.index, self.targets.piece(block, to)) for block, _ in wanted[to])
                alike.setdefault(boxes, []).append(to)
            self.parcels.append(
                [
                    _Parcel(ranks=ranks, pieces=wanted[ranks[0]], size_bytes=self._bytes(wanted[ranks[0]], ranks[0]))
                    for ranks in alike.values()
                ]
            )
            self.traffic.bytes_sent += sum(self._bytes(pieces, to) for to, pieces in wanted.items())

    def _bytes(self, pieces: Pieces, rank: int) -> int:
        return sum(self.targets.piece_bytes(block, rank) for block, _ in pieces)

    def _plan_arrivals(self, told: Told) -> None:
        for source, rounds in told.items():
            for number, rows in rounds.items():
                blocks = [self.targets.block(item, index) for item, index, _ in rows]
                sizes = [self.targets.piece_bytes(block, self.targets.rank) for block in blocks]
                if source in self.targets.neighbours:
                    self.again += blocks
                else:
                    arrival = _Arrival(source=source, blocks=blocks, sizes=sizes)
                    self.arrivals.setdefault(number, []).append(arrival)

    def _all_are_prepared(self) -> bool:
        """Collective. A rank that does not know what it must give or take cannot end the rounds with the others."""
        failed = torch.tensor(int(self.failure.error is not None))
        if self.group is not None:
            dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=self.group)
        return not failed.item()

    # The rounds

    def _round(self, number: int, reading: Reading) -> None:
        while len(self.given) > AHEAD:  # then the slot that is read into next has been sent
            _finish(self.given.popleft())
        self.given.append([])
        arriving = [(self._listen(number, arrival), arrival) for arrival in self.arrivals.get(number, ())]
        if number < len(self.fetches):
            self.failure.guard(_next, reading)
            data = self._slot(number)
            self._send(number, data)
            self.failure.guard(self._keep, number, data)
        for message, arrival in arriving:
            _finish([message])
            self.failure.guard(self._place, arrival, message[1])

    def _slot(self, number: int) -> Tensor:
        """What is read in this round; empty if it goes straight to its place."""
        fetch, start = self.fetches[number], number % SLOTS * self.slot_bytes
        return self.slots[start : start + (fetch.part.size_bytes if fetch.into is None else 0)]

    def _memory(self, number: int, size_bytes: int) -> Sequence[memoryview]:
        return self.fetches[number].into or [self._slot(number).numpy().data]

    def _listen(self, number: int, arrival: _Arrival) -> Pending:
        buffer = torch.empty(sum(arrival.sizes), dtype=torch.uint8)
        return dist.irecv(buffer, arrival.source, group=self.group, tag=number), buffer

    def _send(self, number: int, data: Tensor) -> None:
        for parcel in self.parcels[number]:
            contents = self.failure.guard(self._pack, parcel, data)
            if contents is None:
                contents = data[: parcel.size_bytes]  # not used, but as many bytes as the other rank waits for
            for to in parcel.ranks:
                self.given[-1].append((dist.isend(contents, to, group=self.group, tag=number), contents))

    def _pack(self, parcel: _Parcel, data: Tensor) -> Tensor:
        parts = [
            self.targets.cut(block, data[at : at + block.size_bytes], parcel.ranks[0]) for block, at in parcel.pieces
        ]
        packed = parts[0] if len(parts) == 1 else torch.cat(parts)
        assert packed.numel() == parcel.size_bytes, (packed.numel(), parcel.size_bytes)
        return packed

    def _keep(self, number: int, data: Tensor) -> None:
        """Puts this rank's part of what it fetched in its place."""
        fetch = self.fetches[number]
        for block, at in fetch.part.blocks if fetch.into is None else ():
            self.targets.place(block, self.targets.cut(block, data[at : at + block.size_bytes], self.targets.rank))

    def _place(self, arrival: _Arrival, buffer: Tensor) -> None:
        for block, piece in zip(arrival.blocks, buffer.split(arrival.sizes), strict=True):
            self.targets.place(block, piece)


def _next(reading: Reading) -> None:
    """Waits for the next range; the memory is known."""
    fetched = next(reading)
    if isinstance(fetched, CheckpointError):
        raise fetched


def _finish(messages: list[Pending]) -> None:
    for work, _ in messages:
        assert work is not None
        work.wait()


def _tell(outgoing: Sequence[dict[int, Pieces]], world: int, group: dist.ProcessGroup) -> Told:
    """Tells every rank what it will get."""
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
    incoming: Told = {}
    for source, part in enumerate(flat_in.split(counts_in.tolist())):
        by_round: dict[int, list[tuple[int, int, int]]] = {}
        for number, item, index, start in part.reshape(-1, 4).tolist():
            by_round.setdefault(number, []).append((item, index, start))
        if by_round:
            incoming[source] = by_round
    return incoming
