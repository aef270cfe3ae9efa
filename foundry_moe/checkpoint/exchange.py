"""Reads the blocks of one commit to the ranks that need them, each block once from the store.

One of the ranks that need a block fetches it and sends it to the others. `Targets` describes what a rank needs and the
memory it fills; this module depends neither on state dicts nor on planners.

Ranks exchange whole blocks over a CPU group, in rounds of one range each. Every rank first announces which blocks it
will send in which round. After that each round is point-to-point between ranks that share blocks, so that the replica
groups of a large job do not wait for each other. With a local path, ranks of the same host are not sent anything: they
read the file themselves at the end, from the page cache. A rank that has failed continues to send (receivers discard
the data), so that no rank waits forever; its error is raised after the last round.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from foundry_moe.checkpoint.codec import DTYPES
from foundry_moe.checkpoint.collective_errors import FirstError, Ranks, RanksError
from foundry_moe.checkpoint.errors import CheckpointError
from foundry_moe.checkpoint.layout import Block, Box, Chunks, intersect, narrow_to
from foundry_moe.checkpoint.ledger import Found
from foundry_moe.checkpoint.manifest import Manifest
from foundry_moe.checkpoint.range_reads import Fetcher, Range, Reading, coalesce, plan_reads
from foundry_moe.checkpoint.store import Store

Place = tuple[Box, Tensor]  # a box of a global tensor, and the memory it fills
Announced = dict[tuple[int, int], list[list[int]]]  # by round and source: (item, index, start, size of the range)


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


def read_blocks(store: Store, found: Found, ranks: Ranks, plan: Callable[[], Targets]) -> Traffic:
    """Reads every block to its memory on all ranks. Collective.

    Args:
        plan: returns this rank's targets.

    Raises:
        RanksError: on all ranks, what failed on which rank.
    """
    traffic, began = Traffic(), time.perf_counter()
    made: list[Targets] = []

    def look() -> str | None:
        made.append(plan())
        return store.host

    hosts = ranks.decide(look, lambda hosts: hosts)
    here = {rank for rank, host in enumerate(hosts) if host is not None and host == hosts[ranks.rank]} | {ranks.rank}
    fetcher = Fetcher(store, found.commit.attempt, found.manifest)
    ranks.decide(_Exchange(made[0], fetcher, here, ranks.group, traffic).run, lambda _: None)
    traffic.seconds = time.perf_counter() - began
    return traffic


def read_whole(store: Store, found: Found, names: Iterable[str]) -> dict[str, Tensor]:
    """Reads some tensors of a commit in this process, for tools.

    Raises:
        CheckpointError: the data is damaged.
    """
    entries = {name: found.manifest.tensors[name] for name in names}
    boxes = {name: ((0,) * len(entry.shape), entry.shape) for name, entry in entries.items()}
    tensors = {name: torch.empty(entry.shape, dtype=DTYPES[entry.dtype]) for name, entry in entries.items()}
    needs = {name: Chunks([(box, (0,))]) for name, box in boxes.items()}
    places = {name: [(box, tensors[name])] for name, box in boxes.items()}
    try:
        read_blocks(store, found, Ranks(None), lambda: Targets(found.manifest, 0, needs, places))
    except RanksError as failed:
        raise failed.reasons[0] from None
    return tensors


class _Exchange:
    """One rank's side. Local steps run under `failure`; collective steps always run.

    here: this rank and the other ranks of its host that share its page cache.
    """

    def __init__(
        self, targets: Targets, fetcher: Fetcher, here: set[int], group: dist.ProcessGroup | None, traffic: Traffic
    ) -> None:
        self.targets, self.fetcher, self.here, self.group, self.traffic = targets, fetcher, here, group, traffic
        self.failure = FirstError()
        self.parts: list[Range] = []  # its own, one each round; then those of its host's other ranks
        self.memories: list[memoryview | None] = []  # of `parts`; None: not read to the final memory
        self.receivers: list[list[int]] = []  # of this rank's own ranges
        self.incoming: dict[int, list[tuple[int, Range]]] = {}  # by round, with the source rank

    def run(self) -> None:
        """Fetches, places and sends this rank's ranges, and receives those of others. Collective, also after a failure.

        Raises:
            Exception: the failure of this rank, after all ranks have finished the rounds and all reads have ended.
        """
        self.failure.guard(self._plan)
        if self.group is not None:
            self.failure.guard(self._expect, _announce(self.parts, self.receivers, self.group))
        if self._all_are_prepared():
            with contextlib.closing(self.fetcher.stream(self.parts, self._memory)) as reading:
                for number in range(max([len(self.receivers), *(number + 1 for number in self.incoming)])):
                    self._round(number, reading)
                for number in range(len(self.receivers), len(self.parts)):
                    self._read(number, reading)
        if self.failure.error is not None:
            raise self.failure.error

    def _plan(self) -> None:
        """Plans what this rank reads and sends, before any block is read."""
        mine: dict[tuple[int, ...], list[Block]] = {}  # by receivers: they need every block of a range
        others = []
        for need in self.targets.needed.values():
            if need.reader == self.targets.rank:
                mine.setdefault(need.ranks, []).append(need.block)
            elif need.reader in self.here:
                others.append(need.block)
        manifest, most = self.targets.manifest, self.fetcher.store.range_bytes
        own = [(part, ranks) for ranks, blocks in mine.items() for part in coalesce(manifest, blocks, most)]
        own.sort(key=lambda item: (item[0].object_index, item[0].start))
        parts = [*(part for part, _ in own), *coalesce(manifest, others, most)]
        self.memories = [self.targets.memory(part) for part in parts]
        self.parts, self.receivers = parts, [[to for to in ranks if to not in self.here] for _, ranks in own]
        self.traffic.bytes_fetched = sum(part.size_bytes for part, _ in own)
        self.traffic.bytes_sent = sum(part.size_bytes for part in parts[len(own) :])
        self.traffic.bytes_sent += sum(
            part.size_bytes * len(to) for part, to in zip(parts, self.receivers, strict=False)
        )

    def _expect(self, announced: Announced) -> None:
        for (number, source), rows in announced.items():
            blocks = [(self.targets.needed[item, index].block, start) for item, index, start, _ in rows]
            part = Range(object_index=-1, start=0, size_bytes=rows[0][-1], blocks=blocks)
            self.incoming.setdefault(number, []).append((source, part))

    def _all_are_prepared(self) -> bool:
        """Collective. A rank whose plan failed cannot take part in the rounds."""
        failed = torch.tensor(int(self.failure.error is not None))
        if self.group is not None:
            dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=self.group)
        return not failed.item()

    def _memory(self, number: int, size_bytes: int) -> memoryview:
        memory = self.memories[number]
        return np.empty(size_bytes, dtype=np.uint8).data if memory is None else memory

    def _round(self, number: int, reading: Reading) -> None:
        arriving = []
        for source, part in self.incoming.get(number, ()):
            buffer = torch.empty(part.size_bytes, dtype=torch.uint8)
            arriving.append((part, dist.irecv(buffer, source, group=self.group, tag=number), buffer))
        sent = []
        if number < len(self.receivers):
            data = self._read(number, reading)  # must outlive the sends
            sent = [dist.isend(data, to, group=self.group, tag=number) for to in self.receivers[number]]
        for part, work, buffer in arriving:
            assert work is not None
            work.wait()
            self.failure.guard(self._keep, part, buffer)
        for work in sent:
            assert work is not None
            work.wait()

    def _read(self, number: int, reading: Reading) -> Tensor:
        """The bytes of a range, already copied to this rank's memory; arbitrary bytes after a failure."""
        part = self.parts[number]
        data = self.failure.guard(_next, reading)
        if data is None:
            return torch.empty(part.size_bytes, dtype=torch.uint8)
        if self.memories[number] is None:
            self.failure.guard(self._keep, part, data)
        return data

    def _keep(self, part: Range, data: Tensor) -> None:
        for block, start in part.blocks:
            self.targets.place(block, data[start : start + block.size_bytes])


def _next(reading: Reading) -> Tensor:
    """The bytes of the next range."""
    fetched = next(reading)
    if isinstance(fetched, CheckpointError):
        raise fetched
    return torch.frombuffer(fetched, dtype=torch.uint8)


def _announce(parts: Sequence[Range], receivers: Sequence[Sequence[int]], group: dist.ProcessGroup) -> Announced:
    """Announces to every rank what it will receive in which round. Collective."""
    rows: list[list[int]] = [[] for _ in range(dist.get_world_size(group))]
    for number, (part, ranks) in enumerate(zip(parts, receivers, strict=False)):
        for block, start in part.blocks:
            for to in ranks:
                rows[to] += (number, block.item, block.index, start, part.size_bytes)
    counts_out = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    counts_in = torch.empty_like(counts_out)
    dist.all_to_all_single(counts_in, counts_out, group=group)
    flat_out = torch.tensor([value for row in rows for value in row], dtype=torch.int64)
    flat_in = torch.empty(int(counts_in.sum()), dtype=torch.int64)
    dist.all_to_all_single(flat_in, flat_out, counts_in.tolist(), counts_out.tolist(), group=group)
    announced: Announced = {}
    for source, part_in in enumerate(flat_in.split(counts_in.tolist())):
        for number, *row in part_in.reshape(-1, 5).tolist():
            announced.setdefault((number, source), []).append(row)
    return announced
