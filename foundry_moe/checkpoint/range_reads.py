"""Who fetches which block on a load, and in what ranges: each block once among all ranks that need any of it.

Plain integers and a thread pool; no process group. Legend: B blocks of a tensor, C chunks of its target layout,
N dimensions.
"""

from __future__ import annotations

import collections
import itertools
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from foundry_moe.checkpoint import fault_injection
from foundry_moe.checkpoint.errors import CheckpointError, DamagedError, NotFoundError, StoreError
from foundry_moe.checkpoint.layout import BLOCK_BYTES, Block, Chunks, deal, narrow_to
from foundry_moe.checkpoint.ledger import Found
from foundry_moe.checkpoint.manifest import BlockHash, Manifest, TensorEntry, block_hash
from foundry_moe.checkpoint.store import Store

if TYPE_CHECKING:  # as in `layout`
    from torch import Tensor

RANGE_BYTES = BLOCK_BYTES  # what one request reads, and one round of the exchange sends
GAP_BYTES = 4096  # two blocks this close are read as one range; the bytes between are alignment
READS_IN_FLIGHT = 4  # 1 and 2 on files, with two ranks on a core: no difference
HASH_TRIES = 3

Memory = Callable[[int, int], Sequence[memoryview]]  # (number of the range, bytes) to where it goes: `Fetcher.fetch`
Reading = Generator[Sequence[memoryview] | CheckpointError, None, None]


def block_of(entry: TensorEntry, item: int, index: int) -> Block:
    """A stored block; `item` is the tensor's place in the manifest."""
    box = (tuple(entry.offsets_BN[index].tolist()), tuple(entry.sizes_BN[index].tolist()))
    return Block(item, index, box, int(entry.bytes_B[index]))


def blocks_of(manifest: Manifest, items: Iterable[int] | None = None) -> list[Block]:
    """All blocks of some tensors, by their place in the manifest; of all tensors if none are named."""
    entries = list(manifest.tensors.values())
    chosen = range(len(entries)) if items is None else items
    return [block_of(entries[item], item, index) for item in chosen for index in range(len(entries[item].object_B))]


@dataclass(frozen=True, kw_only=True)
class ReadPlan:
    """What one rank does on a load: the blocks it needs, those it fetches, and for these who else needs them."""

    needed: list[Block]
    fetched: list[Block]
    needers: dict[tuple[int, int], tuple[int, ...]]  # (item, index) of fetched blocks: all ranks, this one among them


def plan_reads(manifest: Manifest, targets: Mapping[str, Chunks], rank: int) -> ReadPlan:
    """The plan of one rank, which fits those that all other ranks make for themselves."""
    groups: dict[tuple[int, ...], list[Block]] = {}
    unions: dict[tuple[int, tuple[int, ...]], tuple[int, ...]] = {}
    needed = []
    for item, (name, entry) in enumerate(manifest.tensors.items()):
        layout = targets.get(name)
        if layout is None or rank not in layout.chunks_of_rank:
            continue
        starts_CN, ends_CN = layout.corners
        ends_BN = entry.offsets_BN + entry.sizes_BN
        hit_B = np.zeros(len(ends_BN), dtype=bool)
        for mine in layout.chunks_of_rank[rank]:
            hit_B |= np.all((entry.offsets_BN < ends_CN[mine]) & (ends_BN > starts_CN[mine]), axis=1)
        for index in np.flatnonzero(hit_B).tolist():
            hit_C = np.all((starts_CN < ends_BN[index]) & (ends_CN > entry.offsets_BN[index]), axis=1)
            chunks = tuple(np.flatnonzero(hit_C).tolist())
            key = (id(layout), chunks)
            if key not in unions:
                unions[key] = tuple(sorted({r for chunk in chunks for r in layout.chunks[chunk][1]}))
            block = block_of(entry, item, index)
            needed.append(block)
            groups.setdefault(unions[key], []).append(block)
    fetched: list[Block] = []
    needers = {}
    for ranks, blocks in groups.items():
        for block in deal(blocks, ranks)[rank]:
            fetched.append(block)
            needers[block.item, block.index] = ranks
    return ReadPlan(needed=needed, fetched=fetched, needers=needers)


@dataclass(frozen=True, kw_only=True)
class Range:
    """Bytes of one object that are read in one request, and the blocks in them with their places."""

    object_index: int
    start: int
    size_bytes: int
    blocks: list[tuple[Block, int]]


def coalesce(manifest: Manifest, blocks: Sequence[Block], max_bytes: int = RANGE_BYTES) -> list[Range]:
    """Groups blocks that lie close together in an object into ranges of at most `max_bytes`, or of one block."""
    entries = list(manifest.tensors.values())
    placed = sorted(
        (int(entries[b.item].object_B[b.index]), int(entries[b.item].start_B[b.index]), b.item, b.index, b)
        for b in blocks
    )
    ranges: list[Range] = []
    for where, start, _, _, block in placed:
        last = ranges[-1] if ranges else None
        end = start + block.size_bytes
        if (
            last is not None
            and last.object_index == where
            and start - (last.start + last.size_bytes) <= GAP_BYTES
            and end - last.start <= max_bytes
        ):
            last.blocks.append((block, start - last.start))
            ranges[-1] = Range(object_index=where, start=last.start, size_bytes=end - last.start, blocks=last.blocks)
        else:
            ranges.append(Range(object_index=where, start=start, size_bytes=block.size_bytes, blocks=[(block, 0)]))
    return ranges


class Fetcher:
    """Reads ranges ahead in the background and checks every block's hash; `bytes_read` counts what came."""

    def __init__(self, store: Store, attempt: str, manifest: Manifest) -> None:
        self.store, self.attempt, self.manifest = store, attempt, manifest
        self.bytes_read = 0
        self._entries = list(manifest.tensors.items())
        self._lock = threading.Lock()

    def fetch(self, part: Range, out: Sequence[memoryview]) -> Sequence[memoryview]:
        """Fills `out` with one range and returns it: memory for the whole range, or for each of its blocks.

        Raises:
            DamagedError: an object is missing or short, or a block's hash is still wrong when read again.
            StoreError: the store does not answer.
        """
        if len(out) == len(part.blocks):
            for (block, start), memory in zip(part.blocks, out, strict=True):
                self._read_block(part, block, start, memory)
        else:
            view = out[0]
            self._read(part, 0, view, lambda piece: None)
            for block, start in part.blocks:
                piece = view[start : start + block.size_bytes]
                if block_hash(piece) != self._expected(block):
                    self._read_block(part, block, start, piece)
        fault_injection.point("load.range_read")
        return out

    def read_again(self, block: Block, out: memoryview) -> None:
        """Reads a block that another rank has fetched and checked, where that costs a copy from memory."""
        (part,) = coalesce(self.manifest, [block])
        self._read(part, 0, out, lambda piece: None, again=True)

    def _expected(self, block: Block) -> int:
        return int(self._entries[block.item][1].hash_B[block.index])

    def _read_block(self, part: Range, block: Block, start: int, out: memoryview) -> None:
        for _ in range(HASH_TRIES):
            hasher = BlockHash()
            self._read(part, start, out, hasher.update)
            if hasher.intdigest() == self._expected(block):
                return
        raise DamagedError(
            f"{self._name(part)}: {block.size_bytes} bytes from {part.start + start} on, a block of "
            f"{self._entries[block.item][0]}, do not have the recorded hash in {HASH_TRIES} reads"
        )

    def _name(self, part: Range) -> str:
        return f"{self.attempt}/{self.manifest.objects[part.object_index][0]}"

    def _read(
        self, part: Range, start: int, out: memoryview, see: Callable[[memoryview], None], *, again: bool = False
    ) -> None:
        name = self._name(part)
        try:
            self.store.read_seen(name, part.start + start, out, see)
        except NotFoundError as error:
            raise DamagedError(f"{name} is missing") from error
        except StoreError as error:
            found, expected = self.store.size_bytes(name), self.manifest.objects[part.object_index][1]
            if found != expected:
                raise DamagedError(f"{name} has {found} bytes, not {expected}") from error
            raise
        if not again:
            with self._lock:
                self.bytes_read += len(out)

    def stream(self, ranges: Sequence[Range], memory: Memory | None = None) -> Reading:
        """The ranges' bytes in order, read ahead; a range that could not be read comes as its error.

        Args:
            memory: asked for `READS_IN_FLIGHT` ranges ahead of the one that is being used. By default each range gets
                memory of its own.
        """
        make = memory or (lambda number, size_bytes: [np.empty(size_bytes, dtype=np.uint8).data])
        with ThreadPoolExecutor(READS_IN_FLIGHT, "checkpoint-read") as pool:
            waiting: collections.deque[Future[Sequence[memoryview]]] = collections.deque()
            todo = iter(enumerate(ranges))

            def read_ahead(count: int) -> None:
                for number, part in itertools.islice(todo, count):
                    waiting.append(pool.submit(self.fetch, part, make(number, part.size_bytes)))

            read_ahead(READS_IN_FLIGHT)
            while waiting:
                future = waiting.popleft()
                try:
                    result: Sequence[memoryview] | CheckpointError = future.result()
                except CheckpointError as error:
                    result = error
                read_ahead(1)
                del future
                yield result

    def whole(self, items: Iterable[int]) -> dict[int, Tensor]:
        """Some tensors in memory, by their place in the manifest.

        Raises:
            CheckpointError: data is damaged.
        """
        import torch

        from foundry_moe.checkpoint.dtypes import DTYPES

        entries = {item: self._entries[item][1] for item in items}
        tensors = {item: torch.empty(entry.shape, dtype=DTYPES[entry.dtype]) for item, entry in entries.items()}
        ranges = coalesce(self.manifest, blocks_of(self.manifest, tensors))
        for part, data in zip(ranges, self.stream(ranges), strict=True):
            if isinstance(data, CheckpointError):
                raise data
            for block, start in part.blocks:
                whole, raw = tensors[block.item], torch.frombuffer(data[0], dtype=torch.uint8)
                piece = raw[start : start + block.size_bytes].view(whole.dtype).view(block.box[1])
                narrow_to(whole, (0,) * whole.ndim, block.box).copy_(piece)
        return tensors


def verify(store: Store, found: Found) -> list[str]:
    """Reads every block and checks its hash; a sentence for each range that is damaged."""
    fetcher = Fetcher(store, found.commit.attempt, found.manifest)
    results = fetcher.stream(coalesce(found.manifest, blocks_of(found.manifest)))
    return [str(result) for result in results if isinstance(result, CheckpointError)]
