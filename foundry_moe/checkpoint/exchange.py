"""Reading blocks of one commit to where ranks need them: each block once, whoever needs any of it.

Each stored block is fetched by one of the ranks that need any of it and sent to the others, so that the store sends
every byte once. `Targets` say what a rank needs, and where it belongs; this module knows no state dict and no planner.

Ranks send each other whole blocks as messages over a CPU group, in rounds of one range each. Every rank first
announces to the others which blocks it will send in which round; after that each round is point-to-point between ranks
that share something, so that a large job's replica groups do not wait for each other. Ranks of one host that read a
local path are sent nothing: they read the file themselves, last, from the memory of their host. A rank that has failed,
at whatever, goes on sending (its bytes are not used then), so that no rank waits for ever; its error is raised when all
rounds are done.
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

Place = tuple[Box, Tensor]  # a box of a whole tensor, and the memory that it fills
Announced = dict[tuple[int, int], list[list[int]]]  # by round and source: (item, index, start, size of the range)


@dataclass(kw_only=True)
class Traffic:
    """What a load cost this rank: bytes from the store, and those sent to ranks or read after another of this host."""

    bytes_fetched: int = 0
    bytes_sent: int = 0
    seconds: float = 0.0


class Targets:
    """What one rank needs of a commit, and the memory to which each block goes."""

    def __init__(
        self, manifest: Manifest, rank: int, needs: Mapping[str, Chunks], places: Mapping[str, Sequence[Place]]
    ) -> None:
        """Plans this rank's part of a load.

        Args:
            needs: for each tensor that is loaded, which ranks need which boxes of it; the same on all ranks.
            places: for each tensor this rank's boxes, with their memory.
        """
        self.manifest, self.rank = manifest, rank
        self.needed = plan_reads(manifest, needs, rank)
        self.dtypes = [DTYPES[entry.dtype] for entry in manifest.tensors.values()]
        self._places = [places.get(name, ()) for name in manifest.tensors]

    def memory(self, part: Range) -> memoryview | None:
        """The final memory of a range that is one block, if the rank needs it whole and its bytes lie together."""
        block = part.blocks[0][0]
        (box, tensor), *more = self._places_of(block)
        if more or len(part.blocks) > 1 or intersect(block.box, box) != block.box:
            return None
        view = narrow_to(tensor, box[0], block.box)
        if view.device.type != "cpu" or view.dtype != self.dtypes[block.item] or not view.is_contiguous():
            return None
        return view.view(-1).view(torch.uint8).numpy().data

    def _places_of(self, block: Block) -> list[Place]:
        """Where this rank needs a block: boxes of the whole tensor that meet it, and the memory of each box."""
        return [place for place in self._places[block.item] if intersect(block.box, place[0]) is not None]

    def place(self, block: Block, raw: Tensor) -> None:
        """Copies what this rank needs of a block's bytes to where it belongs."""
        elements = raw.view(self.dtypes[block.item]).view(block.box[1])
        for box, tensor in self._places_of(block):
            common = intersect(block.box, box)
            assert common is not None
            narrow_to(tensor, box[0], common).copy_(narrow_to(elements, block.box[0], common))


def read_blocks(store: Store, found: Found, ranks: Ranks, plan: Callable[[], Targets]) -> Traffic:
    """Brings every block to its places on all ranks. Collective.

    Args:
        plan: makes this rank's targets.

    Raises:
        RanksError: what failed on which ranks, on all of them.
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
    """Some tensors of a commit in the memory of this process, for tools.

    Raises:
        CheckpointError: data is damaged.
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
    """One rank's side. What needs no other rank runs under `failure`; what does, always runs.

    here: this rank and the others that read a file of the store from the same host's memory.
    """

    def __init__(
        self, targets: Targets, fetcher: Fetcher, here: set[int], group: dist.ProcessGroup | None, traffic: Traffic
    ) -> None:
        self.targets, self.fetcher, self.here, self.group, self.traffic = targets, fetcher, here, group, traffic
        self.failure = FirstError()
        self.parts: list[Range] = []  # first this rank's own, one a round; then those that others of its host fetch
        self.memories: list[memoryview | None] = []  # of `parts`, where they are read to the final memory
        self.receivers: list[list[int]] = []  # of this rank's own ranges
        self.incoming: dict[int, list[tuple[int, Range]]] = {}  # by round, with their source

    def run(self) -> None:
        """Fetches, keeps and sends this rank's ranges, and receives the others'. Collective, whatever fails on a rank.

        Raises:
            Exception: what failed on this rank, as it is. Whatever it was, all ranks have finished the rounds by then,
                and nothing of this rank is being read any more.
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
        """What this rank reads and sends: everything that can fail without a block having been read."""
        mine: dict[tuple[int, ...], list[Block]] = {}  # by receivers, who need all blocks of a range that they get
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
        """Collective. A rank that does not know what it must send or take cannot end the rounds with the others."""
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
            data = self._read(number, reading)  # kept until it is sent
            sent = [dist.isend(data, to, group=self.group, tag=number) for to in self.receivers[number]]
        for part, work, buffer in arriving:
            assert work is not None
            work.wait()
            self.failure.guard(self._keep, part, buffer)
        for work in sent:
            assert work is not None
            work.wait()

    def _read(self, number: int, reading: Reading) -> Tensor:
        """The bytes of a range, this rank's part of which is in its place; any bytes after a failure."""
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
    """Sends every rank what it will get in which round. Collective."""
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
