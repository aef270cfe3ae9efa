"""Loading through torch.distributed.checkpoint: a planner that fills a state dict on any mesh, and a StorageReader.

As on a save, plans follow from layouts and need no other rank. Each stored block is fetched by one of the ranks that
need any of it and sent on to the others as tensors, so that the store sends every byte once.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from foundry_moe.checkpoint import fault_injection
from foundry_moe.checkpoint.codec import DTYPE_NAMES, DTYPES, decode, tensors_in
from foundry_moe.checkpoint.collective_errors import portable_errors
from foundry_moe.checkpoint.errors import MismatchError
from foundry_moe.checkpoint.exchange import Fetch, Needs, Traffic, exchange
from foundry_moe.checkpoint.layout import Block, Box, Layout
from foundry_moe.checkpoint.ledger import Found
from foundry_moe.checkpoint.manifest import Manifest
from foundry_moe.checkpoint.range_reads import (
    READS_IN_FLIGHT,
    Fetcher,
    Range,
    bytes_before,
    coalesce,
    intersect,
    narrow_to,
    plan_reads,
)
from foundry_moe.checkpoint.snapshot import flatten, local_part
from foundry_moe.checkpoint.store import Store

STRICT = ("model", "optim")  # sections whose tensors must be there, no more and no fewer
NAMES_SHOWN = 5
WIDE_BYTES = 2**28  # the widest range that neighbours read again
DIRECT_BYTES = 2**18  # blocks below this on average are read together and copied to their places


class ElasticLoadPlanner(LoadPlanner):
    """Fills the tensors of a state dict in place; `result` is then the whole state, values included."""

    def __init__(self, manifest: Manifest, *, rank: int = 0, world_size: int = 1) -> None:
        self.manifest = manifest
        self.rank, self._world_size = rank, world_size
        self.tensors: dict[str, Tensor] = {}
        self.layouts: dict[str, Layout] = {}
        self._names = list(manifest.tensors)
        self._pieces: dict[tuple[int, int, int], Box] = {}
        self._locals: dict[int, tuple[Tensor, memoryview | None]] = {}

    @portable_errors
    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        flat = flatten(state_dict, self._world_size, inline=False)
        self.tensors, self.layouts = dict(flat.tensors), dict(flat.layouts)

    @portable_errors
    def create_local_plan(self) -> LoadPlan:
        """Raises MismatchError if the checkpoint is that of another model."""
        inline = inline_tensors(self.manifest.values)
        saved = {name: (entry.shape, entry.dtype) for name, entry in self.manifest.tensors.items()}
        saved |= {name: (tuple(tensor.shape), DTYPE_NAMES[tensor.dtype]) for name, tensor in inline.items()}
        self._check(saved)
        for name, entry in self.manifest.tensors.items():
            # of a lenient section, and not here or another one here: the reader brings it anew, in full, on every rank
            if name not in self.tensors or self._described(name) != saved[name]:
                tensor = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
                fresh = flatten({name: tensor}, self._world_size, inline=False)
                self.tensors[name], self.layouts[name] = tensor, fresh.layouts[name]
        for name, tensor in inline.items():
            if name in self.tensors and self._described(name) == saved[name]:
                self._fill(name, tensor)
            else:
                self.tensors.pop(name, None)  # of a lenient section: what was saved comes as it is
        # here, and not in `finish_plan`: a rank that failed there would miss the exchange that the others begin
        self.read_plan = plan_reads(self.manifest, self.layouts, self.rank)
        return LoadPlan(items=[])

    def _described(self, name: str) -> tuple[tuple[int, ...], str]:
        """Shape and dtype of a tensor of this model."""
        return tuple(self.layouts[name].shape), DTYPE_NAMES.get(self.tensors[name].dtype, "?")

    def _check(self, saved: Mapping[str, tuple[tuple[int, ...], str]]) -> None:
        problems = []
        for name in sorted(self.tensors.keys() | saved.keys()):
            if name.split(".")[0] not in STRICT:
                continue
            if name not in saved:
                problems.append(f"{name} is not in the checkpoint")
            elif name not in self.tensors:
                problems.append(f"{name} {list(saved[name][0])} is not in this model")
            else:
                here = self._described(name)
                if here != saved[name]:
                    problems.append(
                        f"{name} is {here[1]} {list(here[0])} here and {saved[name][1]} {list(saved[name][0])} there"
                    )
        if problems:
            more = f"; and {len(problems) - NAMES_SHOWN} more" if len(problems) > NAMES_SHOWN else ""
            raise MismatchError(
                f"the checkpoint of step {self.manifest.info.get('step')} is that of another model: "
                f"{'; '.join(problems[:NAMES_SHOWN])}{more}. Nothing was loaded: give this run another folder, or the "
                "model that the checkpoint was written with"
            )

    def _fill(self, name: str, value: Tensor) -> None:
        layout = self.layouts[name]
        if self.rank in layout.chunk_of_rank:
            box, _ = layout.chunks[layout.chunk_of_rank[self.rank]]
            local_part(self.tensors[name]).copy_(narrow_to(value, (0,) * value.ndim, box))

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """The plan is `read_plan`: PyTorch's form of it, an object for each block, took as long as making it."""
        return central_plan

    def _box(self, item: int, rank: int) -> Box:
        """What a rank holds of a tensor."""
        layout = self.layouts[self._names[item]]
        return layout.chunks[layout.chunk_of_rank[rank]][0]

    def piece(self, block: Block, rank: int) -> Box:
        """What a rank needs of a stored block."""
        key = (block.item, block.index, rank)
        if key not in self._pieces:
            box = intersect(block.box, self._box(block.item, rank))
            assert box is not None
            self._pieces[key] = box
        return self._pieces[key]

    def _local(self, item: int) -> tuple[Tensor, memoryview | None]:
        """This rank's part of a tensor, and its bytes if they can be read to."""
        if item not in self._locals:
            local = local_part(self.tensors[self._names[item]])
            readable = local.device.type == "cpu" and local.is_contiguous() and local.numel() > 0
            self._locals[item] = local, local.view(-1).view(torch.uint8).numpy().data if readable else None
        return self._locals[item]

    def target(self, block: Block) -> Tensor:
        """Where this rank's piece of a block belongs."""
        return narrow_to(self._local(block.item)[0], self._box(block.item, self.rank)[0], self.piece(block, self.rank))

    def raw_target(self, block: Block) -> memoryview | None:
        """The bytes of that, if the rank needs the block whole and they lie together."""
        local, raw = self._local(block.item)
        piece = self.piece(block, self.rank)
        if raw is None or piece != block.box:
            return None
        origin, sizes = self._box(block.item, self.rank)
        start = bytes_before(sizes, origin, piece, local.element_size())
        return None if start is None else raw[start : start + block.size_bytes]

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        raise AssertionError("blocks are placed by `target`")

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        raise AssertionError("blocks are placed by `target`")

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        raise AssertionError("values travel in the manifest")

    @property
    def result(self) -> dict[str, Any]:
        """The state as it was saved; its tensors are those of the state dict that was filled."""

        def of_target(path: str) -> Tensor:
            return self.tensors[path]

        return _with_targets(decode(self.manifest.values, tensor=of_target), self.tensors, "")


def inline_tensors(values: Any) -> dict[str, Tensor]:
    """The small tensors that the manifest itself holds, by path."""
    return {path: decode(node) for path, tag, node in tensors_in(values) if tag == "$tensor"}


def _with_targets(tree: Any, tensors: Mapping[str, Tensor], path: str) -> Any:
    """The tree with each small tensor replaced by the target's tensor of that path, which holds the same values."""
    if isinstance(tree, Tensor):
        return tensors.get(path, tree)
    if isinstance(tree, dict):
        return {k: _with_targets(v, tensors, f"{path}.{k}" if path else str(k)) for k, v in tree.items()}
    if isinstance(tree, list | tuple) and not isinstance(tree, torch.Size):
        return type(tree)(_with_targets(v, tensors, f"{path}.{i}" if path else str(i)) for i, v in enumerate(tree))
    return tree


class _Mover:
    """Brings blocks to their places on one rank, and cuts pieces of them for others."""

    def __init__(self, planner: ElasticLoadPlanner, fetcher: Fetcher) -> None:
        self.planner, self._fetcher = planner, fetcher
        self._entries = list(planner.manifest.tensors.values())
        self._needed = {(block.item, block.index): block for block in planner.read_plan.needed}

    def block(self, item: int, index: int) -> Block:
        return self._needed[item, index]

    def piece_bytes(self, block: Block, rank: int) -> int:
        return math.prod(self.planner.piece(block, rank)[1]) * self._entries[block.item].itemsize

    def cut(self, block: Block, raw: Tensor, rank: int) -> Tensor:
        """A rank's piece of a block's bytes, contiguous."""
        box = self.planner.piece(block, rank)
        if box == block.box:
            return raw
        whole = raw.view(DTYPES[self._entries[block.item].dtype]).view(block.box[1])
        return narrow_to(whole, block.box[0], box).contiguous().view(-1).view(torch.uint8)

    def place(self, block: Block, piece: Tensor) -> None:
        """Puts this rank's piece of a block where it belongs."""
        dtype = DTYPES[self._entries[block.item].dtype]
        if piece.storage_offset() % dtype.itemsize:
            piece = piece.clone()  # it came behind a piece of a smaller dtype
        target = self.planner.target(block)
        target.copy_(piece.view(dtype).view(target.shape))

    def read_again(self, block: Block) -> None:
        """Does all of that for a block that a neighbour has read and checked."""
        memory = self.planner.raw_target(block)
        if memory is not None:
            self._fetcher.read_again(block, memory)
            return
        raw = torch.empty(block.size_bytes, dtype=torch.uint8)
        self._fetcher.read_again(block, raw.numpy().data)
        self.place(block, self.cut(block, raw, self.planner.rank))

    def targets(self, part: Range) -> list[memoryview] | None:
        """The final memory of each of a range's blocks, if this rank needs all of them whole and can read to it."""
        if part.size_bytes < DIRECT_BYTES * len(part.blocks):
            return None  # small blocks: one request, and then copies
        found = [self.planner.raw_target(block) for block, _ in part.blocks]
        return None if any(memory is None for memory in found) else [m for m in found if m is not None]


class ElasticReader(StorageReader):
    """Reads one commit. `traffic` says afterwards what it cost."""

    def __init__(self, store: Store, found: Found, group: dist.ProcessGroup | None = None) -> None:
        self.store, self.found, self.group = store, found, group
        self.traffic = Traffic()

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return Metadata(
            state_dict_metadata={
                name: TensorStorageMetadata(
                    properties=TensorProperties(dtype=DTYPES[entry.dtype]),
                    size=torch.Size(entry.shape),
                    chunks=[
                        ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
                        for offsets, sizes in zip(entry.offsets_BN.tolist(), entry.sizes_BN.tolist(), strict=True)
                    ],
                )
                for name, entry in self.found.manifest.tensors.items()
            }
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    @portable_errors
    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        objects = self.found.manifest.objects
        seen = self.store.identity(f"{self.found.commit.attempt}/{objects[0][0]}") if objects else None
        return dataclasses.replace(plan, storage_data=seen)

    @portable_errors
    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Tells each rank its neighbours: those that see its files through the memory of the same host."""
        alike: dict[str, set[int]] = {}
        for rank, plan in enumerate(plans):
            if plan.storage_data is not None:
                alike.setdefault(plan.storage_data, set()).add(rank)
        return [
            dataclasses.replace(plan, storage_data=frozenset(alike.get(plan.storage_data, ())) - {rank})
            for rank, plan in enumerate(plans)
        ]

    @portable_errors
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Whatever fails in here must do so inside the exchange: torch.distributed.checkpoint would let this rank wait
        for the others, and they would wait for what it gives."""
        assert isinstance(planner, ElasticLoadPlanner)
        began = time.perf_counter()
        fetcher = Fetcher(self.store, self.found.commit.attempt, self.found.manifest)
        mover = _Mover(planner, fetcher)
        neighbours, needers = plan.storage_data, planner.read_plan.needers
        try:
            exchange(
                lambda: self._fetches(mover, neighbours),
                fetcher.stream,
                Needs(
                    receivers=lambda block: needers[block.item, block.index],
                    piece=planner.piece,
                    piece_bytes=mover.piece_bytes,
                    block=mover.block,
                    neighbours=neighbours,
                    cut=mover.cut,
                    place=mover.place,
                    read_again=mover.read_again,
                ),
                self.group,
                self.traffic,
            )
        finally:
            self.traffic.bytes_fetched = fetcher.bytes_read
            self.traffic.seconds = time.perf_counter() - began
        fault_injection.point("load.done")
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _fetches(self, mover: _Mover, neighbours: frozenset[int]) -> list[Fetch]:
        """What this rank fetches, in ranges: wide ones of what is read straight to its place, and otherwise such as
        pass through memory that is kept for them."""
        manifest, reads = self.found.manifest, mover.planner.read_plan
        here = neighbours | {mover.planner.rank}

        def into(part: Range) -> list[memoryview] | None:
            among_us = all(here.issuperset(reads.needers[block.item, block.index]) for block, _ in part.blocks)
            return mover.targets(part) if among_us else None

        fetches: list[Fetch] = []
        for part in coalesce(manifest, reads.fetched, self._range_bytes(reads.fetched, neighbours)):
            memory = into(part)
            if memory is not None or part.size_bytes <= self.store.range_bytes:
                fetches.append(Fetch(part=part, into=memory))
            else:
                narrow = coalesce(manifest, [block for block, _ in part.blocks], self.store.range_bytes)
                fetches += [Fetch(part=piece, into=into(piece)) for piece in narrow]
        return fetches

    def _range_bytes(self, fetched: Sequence[Block], neighbours: frozenset[int]) -> int:
        """Neighbours hear of each range, and a word costs more than a millisecond of a core (976 MiB on four ranks took
        0.66 core-seconds in ranges of 16 MiB, 0.58 of 61): few, but enough for all threads that read."""
        share = sum(block.size_bytes for block in fetched) // READS_IN_FLIGHT
        return max(self.store.range_bytes, min(share, WIDE_BYTES)) if neighbours else self.store.range_bytes

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False
