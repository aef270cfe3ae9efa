"""`Reader`: a StorageReader of torch.distributed.checkpoint for any planner, over a folder of commits.

Items of a plan are converted to boxes of global tensors, so that a load can fall back from a damaged commit to the
previous one. Metadata is built from the manifest; nothing from the store is unpickled.
"""

from __future__ import annotations

import dataclasses
import io
import logging
import os
from typing import Any

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

from foundry_moe.checkpoint import open_store
from foundry_moe.checkpoint.codec import DTYPES, decode
from foundry_moe.checkpoint.collective_errors import Ranks, RanksError
from foundry_moe.checkpoint.dcp_writer import Writer, step_of
from foundry_moe.checkpoint.errors import CheckpointError, DamagedError, MismatchError, NotFoundError, worst
from foundry_moe.checkpoint.exchange import Place, Targets, Traffic, read_blocks
from foundry_moe.checkpoint.layout import Box, Chunks, narrow_to
from foundry_moe.checkpoint.ledger import Found, Ledger
from foundry_moe.checkpoint.manifest import Manifest
from foundry_moe.checkpoint.records import CommitKey
from foundry_moe.checkpoint.store import StoreOptions
from foundry_moe.checkpoint.strict import shown

log = logging.getLogger(__name__)

Items = list[tuple[ReadItem, Tensor]]  # items of a plan with their target
Needs = dict[str, list[Box]]  # boxes that a rank needs, by tensor


class Reader(StorageReader):
    """Loads the newest good commit of a folder, or that of a step, with any planner of torch.distributed.checkpoint.

        reader = Reader("s3://bucket/run")
        if reader.steps():
            dcp.load(state_dict, storage_reader=reader)     # checkpoint_id=100 for that step
            step = reader.step

    Every block's hash is verified, and the previous commit is loaded if one is damaged. If all ranks of the job load,
    one of them fetches each block and sends it to the others over a gloo group: `group`, or a new one. If only some
    ranks load, or with `no_dist`, each rank fetches what it needs.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        group: dist.ProcessGroup | None = None,
        options: StoreOptions | None = None,
    ) -> None:
        """Sends no request.

        Args:
            folder: as `Writer`'s.
            group: a CPU group over all ranks.

        Raises:
            ValueError: the address is invalid.
        """
        self.ledger = Ledger(open_store(os.fspath(folder), options))
        self.step: int | None = None  # of the last load
        self.traffic = Traffic()  # of the last load on this rank
        self._group = group
        self._asked: int | None = None
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
        """The index of the commit. PyTorch drops errors that are raised here, so they are raised by the next call."""
        self._found = self._error = None
        try:
            while True:
                self._found = self._choose()
                try:
                    return metadata_of(self._found.manifest)
                except DamagedError as error:
                    log.warning("Passed over the checkpoint of step %d: %s", self._found.commit.step, error)
                    self.ledger.damaged.add(self._found.commit.where)
        except Exception as error:
            self._error = error
            return Metadata(state_dict_metadata={}, planner_data={})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if self._error is not None:
            raise self._error

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        assert self._found is not None
        chosen = len(plans), self._found.commit.where  # number of ranks that load, and the commit
        return [dataclasses.replace(plan, storage_data=chosen) for plan in plans]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads all items, falling back from damaged commits.

        Raises:
            MismatchError: the previous commit holds other tensors.
            DamagedError: no commit can be used.
        """
        count, where = plan.storage_data
        ranks = Ranks(self._group_of(count))
        tensors = [item for item in plan.items if item.type == LoadItemType.TENSOR]
        items: Items | None = None
        while True:
            try:
                if items is None:
                    items = ranks.every(lambda: [(item, planner.resolve_tensor(item)) for item in tensors])
                self._load(where, items, ranks)
                break
            except RanksError as failed:
                reason = worst(failed.reasons.values())
                if isinstance(reason, DamagedError):
                    self.ledger.damaged.add(where)
                if not isinstance(reason, DamagedError) or ranks.size == 1 < count:
                    raise reason from failed  # other ranks load separately and may have found it good
                log.warning("Checkpoint of step %d is damaged, trying the one before: %s", where.step, reason)
                where = ranks.first(lambda: self._choose().commit.where)  # the newest remaining one
        assert self._found is not None
        for item, tensor in items:
            planner.commit_tensor(item, tensor)
        contents = Contents(self._found.manifest)
        for item in plan.items:
            if item.type != LoadItemType.TENSOR:
                value = io.BytesIO()  # planners unpickle it, which is safe because it is pickled here
                torch.save(contents.value(item.storage_index.fqn), value)
                value.seek(0)
                planner.load_bytes(item, value)
        self.step, self._asked = self._found.commit.step, None
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _choose(self) -> Found:
        asked = self._asked
        keys = [key for key in self.ledger.newest_first() if asked is None or key.step == asked]
        if not keys:
            of_step = "" if asked is None else f" of step {asked}"
            raise NotFoundError(f"{self.ledger.store.url} holds no checkpoint{of_step}")
        found, rejected = self.ledger.first_good(keys, finite=asked is None)
        for sentence in rejected:
            log.warning("Passed over a checkpoint: %s", sentence)
        return found

    def _group_of(self, ranks: int) -> dist.ProcessGroup | None:
        """A CPU group over the ranks that load; None if one loads, or only some of the job's."""
        if ranks == 1:
            return None
        if self._group is None and ranks == dist.get_world_size():
            self._group = dist.new_group(backend="gloo")
        if self._group is None or dist.get_world_size(self._group) != ranks:
            log.warning("Each of %d ranks fetches all that it needs, because they are not all ranks of the job.", ranks)
            return None
        return self._group

    def _load(self, where: CommitKey, items: Items, ranks: Ranks) -> None:
        """Fills all tensors from one commit. Collective."""
        places: dict[str, list[Place]] = {}

        def look() -> Needs:
            if self._found is None or self._found.commit.where != where:  # after a fallback, or a new commit since
                self._found = self.ledger.open(where)
            places.update(_placed(self._found, items))
            return {name: [box for box, _ in mine] for name, mine in places.items()}

        needs = ranks.decide(look, _chunks)
        assert self._found is not None
        found = self._found
        targets = ranks.every(lambda: Targets(found.manifest, ranks.rank, needs, places))
        self.traffic = read_blocks(self.ledger.store, found, ranks, targets)


def _chunks(needs: list[Needs]) -> dict[str, Chunks]:
    """The boxes that ranks need, by tensor. Tensors with equal needs share one object."""
    ranks_of: dict[str, dict[Box, list[int]]] = {}
    for rank, mine in enumerate(needs):
        for name, boxes in mine.items():
            for box in dict.fromkeys(boxes):
                ranks_of.setdefault(name, {}).setdefault(box, []).append(rank)
    alike: dict[tuple[tuple[Box, tuple[int, ...]], ...], Chunks] = {}
    found = {}
    for name, by_box in ranks_of.items():
        chunks = tuple((box, tuple(ranks)) for box, ranks in sorted(by_box.items()))
        found[name] = alike.setdefault(chunks, Chunks(list(chunks)))
    return found


def _placed(found: Found, items: Items) -> dict[str, list[Place]]:
    """The targets of a plan's items by tensor. Tensors that the manifest holds are filled at once.

    Raises:
        MismatchError: a tensor is not in this commit, or has another shape.
    """
    manifest, step = found.manifest, found.commit.step
    leaves = Contents(manifest).leaves
    places: dict[str, list[Place]] = {}
    for item, target in items:
        tensor, name = target.detach(), item.storage_index.fqn
        box = tuple(item.storage_offsets), tuple(item.lengths)  # of the only chunk, see `metadata_of`
        small = leaves.get(name)
        if not isinstance(small, Tensor):
            raise MismatchError(f"the checkpoint of step {step} has no tensor {name}")
        shape = tuple(small.shape)
        if len(shape) != len(box[0]) or any(o + s > most for o, s, most in zip(*box, shape, strict=True)):
            raise MismatchError(f"{name} is {list(shape)} in the checkpoint of step {step}")
        if tuple(tensor.shape) != box[1]:
            raise CheckpointError(f"{name}: the planner gives {list(tensor.shape)} for {list(box[1])}")
        if name in manifest.tensors:
            places.setdefault(name, []).append((box, tensor))
        else:
            tensor.copy_(narrow_to(small, (0,) * len(shape), box))
    return places


class Contents:
    """The leaves of a commit with the names of PyTorch's planners.

    leaves: values, tensors that the manifest holds, and meta tensors for all others.
    paths: the path of each leaf in the state dict.
    """

    def __init__(self, manifest: Manifest) -> None:
        """Raises DamagedError if two leaves have the same name."""
        names: dict[int, str] = {}

        def stub(name: str) -> Tensor:
            entry = manifest.tensors[name]
            tensor = torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device="meta")
            names[id(tensor)] = name
            return tensor

        try:
            flat, paths = flatten_state_dict(decode(manifest.values, tensor=stub))
        except ValueError as error:
            raise DamagedError(f"the checkpoint's values have two leaves of one name: {shown(str(error))}") from error
        own = {path: names[id(leaf)] if _is_stub(leaf) else path for path, leaf in flat.items()}
        self.leaves: dict[str, Any] = {own[path]: leaf for path, leaf in flat.items()}
        self.paths = {own[path]: paths[path] for path in flat}
        if len(self.leaves) != len(flat):
            raise DamagedError("the checkpoint's values have two leaves of one name")

    def value(self, name: str) -> Any:
        """A value. Raises CheckpointError if it holds stored tensors, or does not exist."""
        if name not in self.leaves:
            raise MismatchError(f"{name} is not in the checkpoint")
        if _holds_stub(self.leaves[name]):
            raise CheckpointError(f"{name} holds tensors in a tuple or set, which PyTorch's planners do not support")
        return self.leaves[name]


def _is_stub(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_meta


def _holds_stub(value: Any) -> bool:
    if isinstance(value, dict):
        return any(_holds_stub(item) for item in value.values())
    return _is_stub(value) or (isinstance(value, list | tuple | set) and any(_holds_stub(item) for item in value))


def metadata_of(manifest: Manifest) -> Metadata:
    """PyTorch's index of a commit. Each tensor is one chunk, so that planners create one item for what a rank needs,
    not one for each block."""
    contents = Contents(manifest)
    found: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    for name, leaf in contents.leaves.items():
        if isinstance(leaf, Tensor):
            whole = ChunkStorageMetadata(torch.Size([0] * leaf.ndim), leaf.shape)
            found[name] = TensorStorageMetadata(TensorProperties(dtype=leaf.dtype), leaf.shape, [whole])
        else:
            found[name] = BytesStorageMetadata()
    return Metadata(state_dict_metadata=found, planner_data=contents.paths)
