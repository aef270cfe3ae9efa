"""`Writer`: a StorageWriter of torch.distributed.checkpoint for any planner. Each save is one commit."""

from __future__ import annotations

import dataclasses
import io
import os
import secrets
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from foundry_moe.checkpoint import open_store
from foundry_moe.checkpoint.codec import DTYPE_NAMES, Encoded, encode
from foundry_moe.checkpoint.committer import Committer
from foundry_moe.checkpoint.errors import CheckpointError, DamagedError
from foundry_moe.checkpoint.layout import Block, cut, narrow_to
from foundry_moe.checkpoint.ledger import Ledger
from foundry_moe.checkpoint.manifest import Manifest, Row, build_manifest
from foundry_moe.checkpoint.owners import Identity, tensors_digest
from foundry_moe.checkpoint.records import Commit, CommitKey
from foundry_moe.checkpoint.store import Store, StoreOptions
from foundry_moe.checkpoint.training_state import INLINE_BYTES, Staging, place

_PROCESS = secrets.token_hex(8)  # all writers of a process are the same owner of a folder


@dataclass(frozen=True)
class _Written:
    """The record of one rank's writes: rows of the manifest for its object, and the values that the manifest holds."""

    object_bytes: int
    rows: list[Row]
    leaves: dict[str, Encoded]


class Writer(StorageWriter):
    """Saves to a folder of commits with any planner of torch.distributed.checkpoint.

        writer = Writer("s3://bucket/run", keep=3)
        dcp.save(state_dict, storage_writer=writer, checkpoint_id=step)

    `checkpoint_id` is the step, a whole number; by default the newest commit's plus one. A checkpoint exists once its
    record is written, after the data of all ranks. The folder belongs to one run at a time (see `owners`). Values other
    than tensors are stored as data, not as pickles: numbers, text, bytes, lists, tuples, dictionaries, sets, NumPy
    arrays, times, dtypes. Other classes raise TypeError.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        keep: int | None = None,
        run_name: str = "",
        info: Mapping[str, Any] | None = None,
        options: StoreOptions | None = None,
    ) -> None:
        """Sends no request.

        Args:
            folder: `s3://bucket/run`, or a path on a file system that all nodes share.
            keep: number of good commits to keep; None keeps all.
            run_name: must equal that of the folder's run; empty matches any.
            info: mesh and versions for `checkpoints show`, as JSON.
            options: endpoint, profile, limits of the store.

        Raises:
            ValueError: the address is invalid, or `keep` is below 1.
        """
        if keep is not None and keep < 1:
            raise ValueError(f"keep ({keep}) must be at least 1, or None to keep all")
        self.folder, self.options, self.keep = os.fspath(folder), options, keep
        self.run_name, self.info = run_name, dict(info or {})
        self.commit: Commit | None = None  # rank 0: this writer's newest
        self._process_id = f"{_PROCESS}-{os.getpid()}"
        self._asked: dict[int, int | None] = {}  # by thread, because several saves may run: the step
        self._idle: list[Staging] = []  # not those of saves in progress
        self._store: Store = open_store(self.folder, options)
        self._committer: Committer | None = None  # on rank 0

    def __getstate__(self) -> dict[str, Any]:
        """For `async_save` in a process, which opens the store itself and is the same owner."""
        return {**self.__dict__, "_idle": [], "_store": None, "_committer": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _store=open_store(state["folder"], state["options"]))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return str(checkpoint_id).isascii() and str(checkpoint_id).isdigit()

    def reset(self, checkpoint_id: Any = None) -> None:
        self._asked[threading.get_ident()] = None if checkpoint_id is None else step_of(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get("use_collectives", True):
            raise CheckpointError("use_collectives=False would commit the ranks separately: omit it")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        if not all(getattr(plan, "usable", True) for plan in plans):
            raise CheckpointError(
                "enable_plan_caching=True reuses the plan of an earlier save, which holds the name of its attempt: use "
                "DefaultSavePlanner() without it"
            )
        if self._committer is None:
            committer = Committer(Ledger(self._store), keep=self.keep)
            committer.acquire(Identity(run_name=self.run_name, model=_digest(plans)), self._process_id)
            self._committer = committer
        else:
            self._committer.clean_up()  # after a save that failed on another rank
        where = _next(self._committer.ledger, self._asked.pop(threading.get_ident(), None))
        info = {"world_size": len(plans), "torch": torch.__version__, **self.info}
        attempt = self._committer.begin(where, info=info)
        return [dataclasses.replace(plan, storage_data=(rank, attempt)) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        rank, attempt = plan.storage_data
        leaves: dict[str, Encoded] = {}
        whole: list[tuple[WriteItem, TensorWriteData]] = []  # items stored in blocks
        blocks: list[Block] = []
        for item in plan.items:
            node = _inline(item, planner)
            if node is not None:
                leaves[item.index.fqn] = node
            elif item.tensor_data is not None:
                blocks += _blocks(item, len(whole))
                whole.append((item, item.tensor_data))
        staging = self._idle.pop() if self._idle else Staging()
        staging.begin(place(blocks), pinned=False)
        tensor = torch.empty(0)
        for number, block in enumerate(blocks):
            item, data = whole[block.item]
            if block.index == 0:  # freed after its last block, because a planner may create it in this call
                tensor = _tensor_of(item, data, planner)
            staging.block(number, tensor.dtype).copy_(narrow_to(tensor, data.chunk.offsets, block.box))
        placed = staging.plan
        rows = placed.rows([item.index.fqn for item, _ in whole], staging.hashes())
        staging.write(self._store, attempt, rank)
        self._idle.append(staging)
        written = _Written(placed.size_bytes, rows, leaves)
        future: Future[list[WriteResult]] = Future()  # one result for all items: only `finish` reads results
        future.set_result([WriteResult(MetadataIndex(attempt), placed.size_bytes, written)])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        assert self._committer is not None
        self.commit, begun = None, self._committer.attempt
        if begun is None or any(result.index.fqn != begun.attempt for (result,) in results):
            raise CheckpointError(
                "another save of this Writer began before this one ended, so this one was not committed: wait for the "
                "future of async_save before the next save"
            )
        try:
            manifest = _manifest(metadata, results, self._committer.info)
            try:
                Manifest.from_bytes(manifest.to_bytes())  # must be readable before it is committed
            except DamagedError as error:
                raise CheckpointError(f"step {begun.step} cannot be stored: {error}") from error
            self.commit = self._committer.commit(manifest)
        finally:
            self._committer.clean_up()


def step_of(checkpoint_id: Any) -> int:
    """The step from a `checkpoint_id`: 100 or "100".

    Raises:
        ValueError: it is not a whole number.
    """
    if not Writer.validate_checkpoint_id(checkpoint_id) or int(str(checkpoint_id)) >= 10**15:
        raise ValueError(f"checkpoint_id ({checkpoint_id!r}) must be the step, a whole number such as 100")
    return int(str(checkpoint_id))


def _next(ledger: Ledger, step: int | None) -> CommitKey:
    """The key of the next commit: newer than all others, also if a run has returned to an earlier step."""
    keys = ledger.newest_first()
    newest = ledger.newest(keys)
    if step is None:
        step = 0 if newest is None else newest.step + 1
    before = newest.where if newest is not None and newest.step < step else None
    return CommitKey(generation=ledger.next_generation(keys, before), step=step)


def _digest(plans: list[SavePlan]) -> str:
    """A digest of the model's names and shapes; of all tensors if none is below `model.`"""
    tensors = {item.index.fqn: item.tensor_data for plan in plans for item in plan.items if item.tensor_data}
    models = {name: data for name, data in tensors.items() if name.startswith("model.")} or tensors
    return tensors_digest({name: torch.empty(data.size, device="meta") for name, data in models.items()})


def _inline(item: WriteItem, planner: SavePlanner) -> Encoded | None:
    """The encoding of an item that the manifest holds: a value, or a small replicated tensor; None for others."""
    data = item.tensor_data
    if data is not None and item.type != WriteItemType.TENSOR:
        return None
    if data is not None and data.size.numel() * data.properties.dtype.itemsize > INLINE_BYTES:
        return None
    found = planner.resolve_data(item)
    if isinstance(found, io.BytesIO):
        found.seek(0)
        found = torch.load(found, map_location="cpu", weights_only=False)  # trusted: this process has just pickled it
    return Encoded(encode(found, where=item.index.fqn))


def _blocks(item: WriteItem, number: int) -> list[Block]:
    data = item.tensor_data
    assert data is not None
    if data.properties.dtype not in DTYPE_NAMES:
        raise CheckpointError(f"{item.index.fqn} has dtype {data.properties.dtype}: it cannot be stored")
    if 0 in data.chunk.sizes:
        return []
    itemsize = data.properties.dtype.itemsize
    boxes = cut((tuple(data.chunk.offsets), tuple(data.chunk.sizes)), itemsize)
    return [Block(number, index, box, itemsize * torch.Size(box[1]).numel()) for index, box in enumerate(boxes)]


def _tensor_of(item: WriteItem, data: TensorWriteData, planner: SavePlanner) -> Tensor:
    tensor = planner.resolve_data(item)
    assert isinstance(tensor, Tensor)
    if tuple(tensor.shape) != tuple(data.chunk.sizes) or tensor.dtype != data.properties.dtype:
        raise CheckpointError(
            f"{item.index.fqn} is {tensor.dtype} {list(tensor.shape)}, its plan says {data.properties.dtype} "
            f"{list(data.chunk.sizes)}"
        )
    return tensor.detach()


def _manifest(metadata: Metadata, results: list[list[WriteResult]], info: Mapping[str, Any]) -> Manifest:
    """The manifest of a save, from DCP's metadata and the results of all ranks."""
    written: list[_Written] = [result.storage_data for (result,) in results]
    rows = {rank: (mine.object_bytes, mine.rows) for rank, mine in enumerate(written)}
    leaves = {name: leaf for mine in written for name, leaf in mine.leaves.items()}
    tensors = {
        name: (entry.properties.dtype, tuple(entry.size))
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata) and name not in leaves
    }
    leaves |= {name: Encoded({"$ref": name}) for name in tensors}
    paths = metadata.planner_data or {}
    state: dict[str, Any] = {}
    for name, leaf in leaves.items():
        set_element(state, paths.get(name, (name,)), leaf)
    return build_manifest(tensors, rows, encode(state), info)
