"""`Reader`: a StorageReader of torch.distributed.checkpoint for any planner, over a folder of commits.

What planners ask for is taken as boxes of whole tensors, so that a commit whose data is damaged can be replaced by the
one before in the middle of a load. Metadata is made of our manifest; nothing from the store is unpickled.
"""

from __future__ import annotations

import dataclasses
import io
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from foundry_moe.checkpoint.codec import DTYPES, decode
from foundry_moe.checkpoint.collective_errors import Ranks, RanksError, portable_errors
from foundry_moe.checkpoint.dcp_writer import Writer, step_of
from foundry_moe.checkpoint.errors import CheckpointError, DamagedError, MismatchError, NotFoundError, worst
from foundry_moe.checkpoint.exchange import Traffic
from foundry_moe.checkpoint.layout import Block, Box, deal, intersect, narrow_to
from foundry_moe.checkpoint.ledger import Found, Ledger
from foundry_moe.checkpoint.manifest import Manifest, TensorEntry
from foundry_moe.checkpoint.moving import Targets
from foundry_moe.checkpoint.range_reads import ReadPlan, block_of
from foundry_moe.checkpoint.reader import read_blocks
from foundry_moe.checkpoint.records import CommitKey
from foundry_moe.checkpoint.retention import distrust
from foundry_moe.checkpoint.store import StoreOptions
from foundry_moe.checkpoint.stores import open_store
from foundry_moe.checkpoint.strict import shown

log = logging.getLogger(__name__)

Items = list[tuple[ReadItem, Tensor]]  # what a plan asks for, with where it belongs
Needs = dict[tuple[int, int], Box]  # what a rank needs of each block, by its item and index
Fetched = dict[tuple[int, int], dict[int, Box]]  # for each block that a rank fetches, what which ranks need of it


@dataclass(frozen=True)
class _Told:
    """What rank 0 tells each rank: how many load, and which commit."""

    ranks: int
    where: CommitKey


class Reader(StorageReader):
    """Loads the newest good commit of a folder, or that of a step, with torch.distributed.checkpoint's planners.

        reader = Reader("s3://bucket/run")
        if reader.steps():
            dcp.load(state_dict, storage_reader=reader)     # checkpoint_id=100 for that step
            step = reader.step

    Every block is checked by its hash, and of the commits the one before is loaded if one turns out damaged. If all
    ranks of the job load, each block is fetched by one of them and given to the others over a gloo group, which is
    made for that unless `group` is one; part of the job's ranks, or `no_dist`, fetch what each needs.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        group: dist.ProcessGroup | None = None,
        options: StoreOptions | None = None,
    ) -> None:
        """No store is asked for anything yet.

        Args:
            folder: as `Writer`'s.
            group: a CPU group over all ranks.

        Raises:
            ValueError: an address that is none.
        """
        self.ledger = Ledger(open_store(os.fspath(folder), options))
        self.step: int | None = None  # that was loaded last
        self.traffic = Traffic()  # what that cost this rank
        self._group = group
        self._asked: int | None = None
        self._skip: set[CommitKey] = set()  # commits whose data turned out damaged
        self._found: Found | None = None
        self._error: Exception | None = None

    def steps(self) -> list[int]:
        """The steps of all commits, newest first."""
        return [key.step for key in self.ledger.newest_first()]

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return Writer.validate_checkpoint_id(checkpoint_id)

    def reset(self, checkpoint_id: Any = None) -> None:
        self._asked = None if checkpoint_id is None else step_of(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What the commit holds. PyTorch drops an error that is raised here, so it is kept for the next call."""
        self._found = self._error = None
        try:
            self._found = self._choose()
            return metadata_of(self._found.manifest)
        except Exception as error:
            self._error = error
            return Metadata(state_dict_metadata={}, planner_data={})

    @portable_errors
    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if self._error is not None:
            raise self._error

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        assert self._found is not None
        told = _Told(ranks=len(plans), where=self._found.commit.where)
        return [dataclasses.replace(plan, storage_data=told) for plan in plans]

    @portable_errors
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads all items.

        Raises:
            MismatchError: the commit before a damaged one holds other tensors.
            DamagedError: no commit can be used.
        """
        told = plan.storage_data
        assert isinstance(told, _Told)
        ranks = Ranks(self._group_of(told.ranks))
        items: Items = []  # resolved where a rank that fails tells the others
        where = told.where
        while True:
            try:
                self._load(where, plan, planner, items, ranks)
                break
            except RanksError as failed:
                reason = worst(failed.reasons.values())
                if not isinstance(reason, DamagedError) or (ranks.size == 1 and told.ranks > 1):
                    self._skip |= {where} if isinstance(reason, DamagedError) else set()
                    raise reason from failed  # alone among others, who may have found it good
                log.warning("Checkpoint of step %d is damaged, trying the one before: %s", where.step, reason)
                self._skip.add(where)
                distrust(self.ledger.store, [where])
                where = ranks.first(lambda: self._choose().commit.where)  # the newest that is left
        assert self._found is not None
        for item, tensor in items:
            planner.commit_tensor(item, tensor)
        contents = Contents(self._found.manifest)
        for item in plan.items:
            if not _is_tensor(item):
                planner.load_bytes(item, contents.pickled(item.storage_index.fqn))
        self.step, self._asked = self._found.commit.step, None
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _choose(self) -> Found:
        asked = self._asked
        keys = [key for key in self.ledger.newest_first() if asked is None or key.step == asked]
        found, rejected = self.ledger.first_good(keys, skip=self._skip, finite=asked is None)
        for sentence in rejected:
            log.warning("Passed over a checkpoint: %s", sentence)
        if found is None:
            of_step = "" if asked is None else f" of step {asked}"
            raise NotFoundError(f"{self.ledger.store.url} holds no checkpoint{of_step}")
        return found

    def _group_of(self, ranks: int) -> dist.ProcessGroup | None:
        """A CPU group over the ranks that load; None if one loads, or only some of the job's."""
        if ranks == 1:
            return None
        if self._group is None and ranks == dist.get_world_size():
            self._group = dist.new_group(backend="gloo")
        if self._group is None or dist.get_world_size(self._group) != ranks:
            log.warning("Each of %d ranks fetches what it needs by itself: they are not all of the job's.", ranks)
            return None
        return self._group

    def _load(self, where: CommitKey, asked: LoadPlan, planner: LoadPlanner, items: Items, ranks: Ranks) -> None:
        """Fills all tensors from one commit. Collective."""
        targets: list[_Boxes] = []

        def plan() -> Needs:
            if not items:
                items.extend((item, planner.resolve_tensor(item)) for item in asked.items if _is_tensor(item))
            if self._found is None or self._found.commit.where != where:  # gone back, or one more was just committed
                self._found = self.ledger.open(where)
            targets.append(_Boxes(self._found.manifest, Contents(self._found.manifest), items, ranks.rank))
            return targets[0].needs

        def deal_out(needs: list[Needs]) -> list[Fetched]:
            assert self._found is not None
            return deal_reads(self._found.manifest, needs)

        dealt = ranks.deal(plan, deal_out)
        targets[0].take(dealt)
        assert self._found is not None
        self.traffic = read_blocks(self.ledger.store, self._found, ranks, targets[0])


def deal_reads(manifest: Manifest, needs: Sequence[Needs]) -> list[Fetched]:
    """Who fetches which block for whom: of those that need any of it one, evenly by bytes."""
    entries = list(manifest.tensors.values())
    needers: dict[tuple[int, int], list[int]] = {}
    for rank, mine in enumerate(needs):
        for key in mine:
            needers.setdefault(key, []).append(rank)
    groups: dict[tuple[int, ...], list[Block]] = {}
    for (item, index), among in needers.items():
        groups.setdefault(tuple(among), []).append(block_of(entries[item], item, index))
    fetched: list[Fetched] = [{} for _ in needs]
    for ranks, blocks in groups.items():
        for rank, dealt in deal(blocks, ranks).items():
            for block in dealt:
                key = block.item, block.index
                fetched[rank][key] = {other: needs[other][key] for other in ranks}
    return fetched


class _Boxes(Targets):
    """Targets of a load: boxes of tensors, as a plan's items ask for them."""

    def __init__(self, manifest: Manifest, contents: Contents, items: Items, rank: int) -> None:
        """Raises MismatchError if a tensor is not in this commit, or has other bounds there."""
        self.rank, self.manifest, self._entries = rank, manifest, list(manifest.tensors.values())
        self._boxes: dict[tuple[int, int], list[tuple[Box, Tensor]]] = {}  # of each block that is needed
        numbers = {name: number for number, name in enumerate(manifest.tensors)}
        for item, target in items:
            tensor = target.detach()
            name, box = item.storage_index.fqn, _box_of(item)
            small = contents.leaves.get(name)
            if name not in numbers and not isinstance(small, Tensor):
                raise MismatchError(f"{name} is no tensor of the checkpoint of step {manifest.info['step']}")
            shape: tuple[int, ...] = tuple(small.shape) if isinstance(small, Tensor) else manifest.tensors[name].shape
            ends = tuple(offset + size for offset, size in zip(*box, strict=True))
            if len(shape) != len(ends) or any(end > most for end, most in zip(ends, shape, strict=True)):
                raise MismatchError(f"{name} is {list(shape)} in the checkpoint of step {manifest.info['step']}")
            if tuple(tensor.shape) != box[1]:
                raise CheckpointError(f"{name}: the planner gives {list(tensor.shape)} for {list(box[1])}")
            if name in numbers:
                for index in _hit(manifest.tensors[name], box):
                    self._boxes.setdefault((numbers[name], index), []).append((box, tensor))
            elif isinstance(small, Tensor):
                tensor.copy_(narrow_to(small, (0,) * len(shape), box))
        blocks = [block_of(self._entries[item], item, index) for item, index in sorted(self._boxes)]
        self.needs: Needs = {(block.item, block.index): self._bounds(block) for block in blocks}
        self._pieces = {(*key, rank): box for key, box in self.needs.items()}
        self.reads = ReadPlan(needed=blocks, fetched=[], needers={})

    def _bounds(self, block: Block) -> Box:
        """The smallest box that holds all that is needed of a block."""
        boxes = [intersect(block.box, box) for box, _ in self._boxes[block.item, block.index]]
        lower = tuple(min(box[0][dim] for box in boxes if box) for dim in range(len(block.box[0])))
        upper = [max(box[0][dim] + box[1][dim] for box in boxes if box) for dim in range(len(lower))]
        return lower, tuple(end - start for start, end in zip(lower, upper, strict=True))

    def take(self, fetched: Fetched) -> None:
        """What this rank fetches, and for whom."""
        blocks = [block_of(self._entries[item], item, index) for item, index in fetched]
        needers = {key: tuple(boxes) for key, boxes in fetched.items()}
        self._pieces |= {(*key, rank): box for key, boxes in fetched.items() for rank, box in boxes.items()}
        self.reads = ReadPlan(needed=self.reads.needed, fetched=blocks, needers=needers)

    def piece(self, block: Block, rank: int) -> Box:
        return self._pieces[block.item, block.index, rank]

    def boxes(self, block: Block) -> list[tuple[Box, Tensor]]:
        return self._boxes[block.item, block.index]


def _hit(entry: TensorEntry, box: Box) -> list[int]:
    """The blocks that a box meets."""
    lower, sizes = np.array(box[0], dtype=np.int64), np.array(box[1], dtype=np.int64)
    hit_B = np.all((entry.offsets_BN < lower + sizes) & (entry.offsets_BN + entry.sizes_BN > lower), axis=1)
    return np.flatnonzero(hit_B).tolist()


def _is_tensor(item: ReadItem) -> bool:
    return item.type == LoadItemType.TENSOR


def _box_of(item: ReadItem) -> Box:
    """What an item asks for, in coordinates of the whole tensor."""
    sizes = tuple(item.lengths)
    first = item.storage_index.offset or (0,) * len(sizes)
    return tuple(a + b for a, b in zip(first, item.storage_offsets, strict=True)), sizes


class Contents:
    """What a commit holds, as PyTorch's planners name it: leaves by their path, and where each belongs.

    leaves: values, and tensors that the manifest itself holds; of others their meta tensors.
    paths: of each leaf.
    """

    def __init__(self, manifest: Manifest) -> None:
        """Raises DamagedError if two leaves have one path."""
        names: dict[int, str] = {}
        stubs: list[Tensor] = []

        def stub(name: str) -> Tensor:
            entry = manifest.tensors[name]
            stubs.append(torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device="meta"))
            names[id(stubs[-1])] = name
            return stubs[-1]

        try:
            flat, paths = flatten_state_dict(decode(manifest.values, tensor=stub))
        except ValueError as error:
            raise DamagedError(f"the checkpoint's values have two leaves of one name: {shown(str(error))}") from error
        own = {path: names.get(id(leaf), path) for path, leaf in flat.items()}
        self.leaves: dict[str, Any] = {own[path]: leaf for path, leaf in flat.items()}
        self.paths = {own[path]: paths[path] for path in flat}
        if len(self.leaves) != len(flat):
            raise DamagedError("the checkpoint's values have two leaves of one name")

    def pickled(self, name: str) -> io.BytesIO:
        """A value as planners take it. They unpickle it: what was decoded just now, not what the store gave."""
        if name not in self.leaves:
            raise MismatchError(f"{name} is not in the checkpoint")
        if _holds_stub(self.leaves[name]):
            raise CheckpointError(f"{name} holds tensors in a tuple or set, where PyTorch's planners find none")
        data = io.BytesIO()
        torch.save(self.leaves[name], data)
        data.seek(0)
        return data


def _holds_stub(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.is_meta
    if isinstance(value, dict):
        return any(_holds_stub(item) for item in value.values())
    return isinstance(value, list | tuple | set) and any(_holds_stub(item) for item in value)


def metadata_of(manifest: Manifest) -> Metadata:
    """PyTorch's index of a commit, from ours: a chunk is a block."""
    contents = Contents(manifest)
    found: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    for name, leaf in contents.leaves.items():
        if not isinstance(leaf, Tensor):
            found[name] = BytesStorageMetadata()
            continue
        entry = manifest.tensors.get(name)
        chunks = [((0,) * leaf.ndim, tuple(leaf.shape))]
        if entry is not None:
            chunks = list(zip(entry.offsets_BN.tolist(), entry.sizes_BN.tolist(), strict=True))
        found[name] = TensorStorageMetadata(
            properties=TensorProperties(dtype=leaf.dtype),
            size=torch.Size(leaf.shape),
            chunks=[ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in chunks],
        )
    return Metadata(state_dict_metadata=found, planner_data=contents.paths)
