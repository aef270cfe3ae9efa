"""Plans which rank fetches which block in a load, so that each block is fetched once; reads and verifies ranges.

Plain integers and a thread pool; no process group. Legend: B blocks of a tensor, C chunks of its target layout,
N dimensions.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from foundry_moe.checkpoint.errors import CheckpointError, DamagedError, NotFoundError, StoreError
from foundry_moe.checkpoint.layout import BLOCK_BYTES, Block, Chunks, deal
from foundry_moe.checkpoint.ledger import Found
from foundry_moe.checkpoint.manifest import BlockHash, Manifest, TensorEntry, block_hash
from foundry_moe.checkpoint.store import Store

RANGE_BYTES = BLOCK_BYTES  # of one request, and of one round of the exchange
GAP_BYTES = 4096  # closer blocks are read as one range: the bytes between them are alignment
READS_IN_FLIGHT = 4  # 1 and 2 on files, with two ranks on a core: no difference
HASH_TRIES = 3

Reading = Generator[Future[memoryview], None, None]


def block_of(entry: TensorEntry, item: int, index: int) -> Block:
    """A stored block; `item` is the index of its tensor in the manifest."""
    box = (tuple(entry.offsets_BN[index].tolist()), tuple(entry.sizes_BN[index].tolist()))
    return Block(item, index, box, int(entry.bytes_B[index]))


def plan_reads(
    manifest: Manifest, targets: Mapping[str, Chunks], rank: int
) -> dict[tuple[int, ...], dict[int, list[Block]]]:
    """The blocks of which one rank needs a part: by the set of all ranks that need a part, and by the rank of the set
    that reads them. All ranks of a set compute the same."""
    groups: dict[tuple[int, ...], list[Block]] = {}
    unions: dict[tuple[int, tuple[int, ...]], tuple[int, ...]] = {}
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
            groups.setdefault(unions[key], []).append(block_of(entry, item, index))
    return {ranks: deal(blocks, ranks) for ranks, blocks in groups.items()}


@dataclass(kw_only=True)
class Range:
    """The bytes of one request, and their blocks with their starts."""

    object_index: int
    start: int
    size_bytes: int
    blocks: list[tuple[Block, int]]


Read = tuple[Range, memoryview | None]  # a range, and the memory that it is read to


def coalesce(manifest: Manifest, blocks: Sequence[Block], max_bytes: int = RANGE_BYTES) -> list[Range]:
    """Groups adjacent blocks of an object into ranges of at most `max_bytes`, or of one block."""
    entries = list(manifest.tensors.values())
    placed = sorted(
        (int(entries[b.item].object_B[b.index]), int(entries[b.item].start_B[b.index]), b.item, b.index, b)
        for b in blocks
    )
    ranges: list[Range] = []
    for where, start, _, _, block in placed:
        last, end = ranges[-1] if ranges else None, start + block.size_bytes
        if (
            last is not None
            and last.object_index == where
            and start - (last.start + last.size_bytes) <= GAP_BYTES
            and end - last.start <= max_bytes
        ):
            last.blocks.append((block, start - last.start))
            last.size_bytes = end - last.start
        else:
            ranges.append(Range(object_index=where, start=start, size_bytes=block.size_bytes, blocks=[(block, 0)]))
    return ranges


class Fetcher:
    """Reads ranges ahead in the background and verifies the hash of every block."""

    def __init__(self, store: Store, attempt: str, manifest: Manifest) -> None:
        self.store, self.attempt, self.manifest = store, attempt, manifest
        self._entries = list(manifest.tensors.items())

    def fetch(self, part: Range, out: memoryview) -> memoryview:
        """Fills `out` with one range and returns it.

        Raises:
            DamagedError: an object is missing or short, or a block's hash is still wrong when read again.
            StoreError: the store does not answer.
        """
        name, size_bytes = self.manifest.objects[part.object_index]
        name = f"{self.attempt}/{name}"
        for _ in range(HASH_TRIES):
            hasher = BlockHash()  # of a single block, while it is read
            see: Callable[[memoryview], object] = hasher.update if len(part.blocks) == 1 else lambda piece: None
            try:
                self.store.read_into(name, part.start, out, see)
            except NotFoundError as error:
                raise DamagedError(f"{name} is missing") from error
            except StoreError as error:
                found_bytes = self.store.size_bytes(name)
                if found_bytes == size_bytes:
                    raise
                raise DamagedError(f"{name} has {found_bytes} bytes, not {size_bytes}") from error
            for block, start in part.blocks:
                piece = out[start : start + block.size_bytes]
                found = hasher.intdigest() if len(part.blocks) == 1 else block_hash(piece)
                tensor, entry = self._entries[block.item]
                if found != int(entry.hash_B[block.index]):
                    wrong = f"{block.size_bytes} bytes from {part.start + start} on, a block of {tensor}"
                    break
            else:
                return out
        raise DamagedError(f"{name}: {wrong}, do not have the recorded hash in {HASH_TRIES} reads")

    def stream(self, reads: Iterable[Read]) -> Reading:
        """Reads ranges in order, ahead of the caller: each to its memory, or to new memory for None."""
        with ThreadPoolExecutor(READS_IN_FLIGHT, "checkpoint-read") as pool:
            waiting: collections.deque[Future[memoryview]] = collections.deque()
            for part, memory in reads:
                out = np.empty(part.size_bytes, dtype=np.uint8).data if memory is None else memory
                waiting.append(pool.submit(self.fetch, part, out))
                if len(waiting) > READS_IN_FLIGHT:
                    yield waiting.popleft()
            while waiting:
                yield waiting.popleft()


def verify(store: Store, found: Found) -> list[str]:
    """Reads and verifies every block; returns one sentence for each damaged range."""
    manifest = found.manifest
    blocks = [
        block_of(entry, item, index)
        for item, entry in enumerate(manifest.tensors.values())
        for index in range(len(entry.object_B))
    ]
    reads = ((part, None) for part in coalesce(manifest, blocks))
    problems = []
    for reading in Fetcher(store, found.commit.attempt, manifest).stream(reads):
        try:
            reading.result()
        except CheckpointError as error:
            problems.append(str(error))
    return problems
