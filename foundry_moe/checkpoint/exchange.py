"""Reads the blocks of one commit to the ranks that need them, each block once from the store.

One of the ranks that need a block fetches it and sends it to the others. `Targets` describes what a rank needs and the
memory it fills; this module depends neither on state dicts nor on planners.

Ranks exchange whole blocks over a CPU group. Ranks that need the same blocks form a set, and each of them plans what
every rank of the set reads. In round n each rank sends the n-th range that it reads for each of its sets to the others
of the set: point-to-point, so that the replica groups of a large job do not wait for each other. With a local path,
ranks of the same host are not sent anything: they read the file themselves at the end, from the page cache. A rank that
has failed continues to send (receivers discard the data), so that no rank waits forever; its error is raised after the
last round.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from foundry_moe.checkpoint.codec import DTYPES
from foundry_moe.checkpoint.collective_errors import Ranks, RanksError, T
from foundry_moe.checkpoint.layout import Block, Box, Chunks, intersect, narrow_to, replicated
from foundry_moe.checkpoint.ledger import Found
from foundry_moe.checkpoint.manifest import Manifest
from foundry_moe.checkpoint.range_reads import Fetcher, Range, Read, Reading, coalesce, plan_reads
from foundry_moe.checkpoint.store import Store

Place = tuple[Box, Tensor]  # a box of a global tensor, and the memory it fills


@dataclass(kw_only=True)
class Traffic:
    """Cost of a load on this rank: bytes from the store, and bytes sent to other ranks or read from the page cache."""

    bytes_fetched: int = 0
    bytes_sent: int = 0
    seconds: float = 0.0


class Targets:
    """The parts of a commit that one rank needs, and the memory they fill."""

    def __init__(
        self, manifest: Manifest, rank: int, needs: Mapping[str, Chunks], places: Mapping[str, Sequence[Place]]
    ) -> None:
        """Plans this rank's part of a load.

        Args:
            needs: for each tensor to load, the boxes that each rank needs; equal on all ranks.
            places: for each tensor, this rank's boxes with their memory.
        """
        self.manifest, self.rank = manifest, rank
        self.needed = plan_reads(manifest, needs, rank)
        self.dtypes = [DTYPES[entry.dtype] for entry in manifest.tensors.values()]
        self._places = [places.get(name, ()) for name in manifest.tensors]

    def memory(self, part: Range) -> memoryview | None:
        """The final memory of a range of one block, if the rank needs the whole block and its memory is contiguous."""
        block = part.blocks[0][0]
        (box, tensor), *more = self._places_of(block)
        if more or len(part.blocks) > 1 or intersect(block.box, box) != block.box:
            return None
        view = narrow_to(tensor, box[0], block.box)
        if view.device.type != "cpu" or view.dtype != self.dtypes[block.item] or not view.is_contiguous():
            return None
        return view.view(-1).view(torch.uint8).numpy().data

    def _places_of(self, block: Block) -> list[Place]:
        """This rank's boxes that intersect a block, with their memory."""
        return [place for place in self._places[block.item] if intersect(block.box, place[0]) is not None]

    def place(self, block: Block, raw: Tensor) -> None:
        """Copies the part of a block that this rank needs to its memory."""
        elements = raw.view(self.dtypes[block.item]).view(block.box[1])
        for box, tensor in self._places_of(block):
            common = intersect(block.box, box)
            assert common is not None
            narrow_to(tensor, box[0], common).copy_(narrow_to(elements, block.box[0], common))


def read_blocks(store: Store, found: Found, ranks: Ranks, targets: Targets) -> Traffic:
    """Reads every block to its memory on all ranks. Collective.

    Raises:
        RanksError: on all ranks, what failed on which rank.
    """
    traffic, began = Traffic(), time.perf_counter()
    hosts = ranks.decide(lambda: store.host, lambda hosts: hosts)
    here = {rank for rank, host in enumerate(hosts) if host is not None and host == hosts[ranks.rank]} | {ranks.rank}
    fetcher = Fetcher(store, found.commit.attempt, found.manifest)
    exchange = ranks.every(lambda: _Exchange(targets, fetcher, here, ranks.group, traffic))
    ranks.every(exchange.run)
    traffic.seconds = time.perf_counter() - began
    return traffic


def read_whole(store: Store, found: Found, names: Iterable[str]) -> dict[str, Tensor]:
    """Reads some tensors of a commit in this process, for tools.

    Raises:
        CheckpointError: the data is damaged.
    """
    entries = {name: found.manifest.tensors[name] for name in names}
    tensors = {name: torch.empty(entry.shape, dtype=DTYPES[entry.dtype]) for name, entry in entries.items()}
    needs = {name: replicated(entry.shape, 1) for name, entry in entries.items()}
    places = {name: [(box, tensors[name]) for box in needs[name].boxes_of(0)] for name in entries}
    try:
        read_blocks(store, found, Ranks(None), Targets(found.manifest, 0, needs, places))
    except RanksError as failed:
        raise failed.reasons[0] from None
    return tensors


@dataclass
class _Round:
    """One round: ranges that this rank reads, with the ranks that are sent them, and ranges that arrive from others."""

    sent: list[tuple[Range, list[int]]] = field(default_factory=list)
    arriving: list[tuple[Range, int]] = field(default_factory=list)


class _Exchange:
    """One rank's side. In the rounds, local steps run in `_guard`, and messages are always exchanged."""

    def __init__(
        self, targets: Targets, fetcher: Fetcher, here: set[int], group: dist.ProcessGroup | None, traffic: Traffic
    ) -> None:
        """Plans what this rank reads, sends and receives, before any block is read.

        Args:
            here: this rank and the other ranks of its host that share its page cache.
        """
        self.targets, self.fetcher, self.group = targets, fetcher, group
        self.failure: Exception | None = None  # the first
        rounds: defaultdict[int, _Round] = defaultdict(_Round)
        others: list[Block] = []  # that other ranks of this host read first
        manifest, most = targets.manifest, fetcher.store.range_bytes
        for ranks, dealt in sorted(targets.needed.items()):
            away = [rank for rank in ranks if rank not in here]
            for reader, blocks in dealt.items():
                if reader in here and reader != targets.rank:
                    others += blocks
                    continue
                for number, part in enumerate(coalesce(manifest, blocks, most)):
                    if reader == targets.rank:
                        rounds[number].sent.append((part, away))
                    else:
                        rounds[number].arriving.append((part, reader))
        self.rounds = [rounds[number] for number in range(len(rounds))]
        sent = [part_to for each in self.rounds for part_to in each.sent]
        self.last = coalesce(manifest, others, most)
        parts = [*(part for part, _ in sent), *self.last]  # all that this rank reads, in order
        self.reads: list[Read] = [(part, targets.memory(part)) for part in parts]
        traffic.bytes_fetched = sum(part.size_bytes for part, _ in sent)
        traffic.bytes_sent = sum(part.size_bytes * len(to) for part, to in sent)
        traffic.bytes_sent += sum(part.size_bytes for part in self.last)

    def run(self) -> None:
        """Fetches, places and sends this rank's ranges, and receives those of others. Collective, also after a failure.

        Raises:
            Exception: the failure of this rank, after all rounds and reads have ended.
        """
        with contextlib.closing(self.fetcher.stream(self.reads)) as reading:
            reads = iter(self.reads)
            for number, each in enumerate(self.rounds):
                self._exchange(number, each, reading, reads)
            for _ in self.last:
                self._read(reading, *next(reads))
        if self.failure is not None:
            raise self.failure

    def _exchange(self, number: int, each: _Round, reading: Reading, reads: Iterator[Read]) -> None:
        arriving = []
        for part, source in each.arriving:
            buffer = torch.empty(part.size_bytes, dtype=torch.uint8)
            arriving.append((part, buffer, dist.irecv(buffer, source, group=self.group, tag=number)))
        sent = []
        for _, to in each.sent:
            data = self._read(reading, *next(reads))
            sent += [(dist.isend(data, rank, group=self.group, tag=number), data) for rank in to]
        for part, buffer, work in arriving:
            assert work is not None
            work.wait()
            self._guard(self._keep, part, buffer)
        for work, _ in sent:  # the data must outlive its messages
            assert work is not None
            work.wait()

    def _read(self, reading: Reading, part: Range, memory: memoryview | None) -> Tensor:
        """The bytes of a range, already copied to this rank's memory; arbitrary bytes after a failure."""
        data = self._guard(lambda: torch.frombuffer(next(reading).result(), dtype=torch.uint8))
        if data is None:
            return torch.empty(part.size_bytes, dtype=torch.uint8)
        if memory is None:
            self._guard(self._keep, part, data)
        return data

    def _keep(self, part: Range, data: Tensor) -> None:
        for block, start in part.blocks:
            self.targets.place(block, data[start : start + block.size_bytes])

    def _guard(self, step: Callable[..., T], *arguments: Any) -> T | None:
        """Runs a local step, unless an earlier one has failed, and records its error. Returns None for a failure."""
        if self.failure is None:
            try:
                return step(*arguments)
            except Exception as error:
                self.failure = error
        return None
