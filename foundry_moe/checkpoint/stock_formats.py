"""A commit in PyTorch's own formats: a folder that `FileSystemReader` loads, or a file of `torch.save`."""

from __future__ import annotations

import dataclasses
import io
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType

from foundry_moe.checkpoint.dcp_reader import Contents, metadata_of
from foundry_moe.checkpoint.errors import CheckpointError
from foundry_moe.checkpoint.ledger import Found
from foundry_moe.checkpoint.range_reads import Fetcher, block_of
from foundry_moe.checkpoint.store import Store


def export_dcp(store: Store, found: Found, out: Path, *, section: str | None = None) -> int:
    """Writes a folder as torch.distributed.checkpoint does, a block in memory at a time; returns how many tensors.

    Args:
        section: this part of the state alone, for example `model`.

    Raises:
        CheckpointError: `out` holds a checkpoint already, or data is damaged: then no `.metadata` is written.
    """
    if (out / ".metadata").exists():
        raise CheckpointError(f"{out / '.metadata'} exists: export to an empty folder")
    planner = _Blocks(store, found, section)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.save({}, storage_writer=dcp.FileSystemWriter(out), planner=planner, no_dist=True)
    except CheckpointException as failed:
        raise CheckpointError("; ".join(str(reason) for reason, _ in failed.failures.values())) from failed
    return planner.tensors


def export_torch(store: Store, found: Found, out: Path, *, section: str | None = None) -> int:
    """Writes one file of `torch.save`, the state as it was saved; it is held in memory once. Returns how many tensors.

    Raises:
        CheckpointError: `out` exists, or data is damaged: then nothing is written.
    """
    if out.exists():
        raise CheckpointError(f"{out} exists: name a new file")
    blocks = _Blocks(store, found, section)
    stored = blocks.fetcher.whole(blocks.items.values())
    state: dict[str, Any] = {}
    for name in blocks.metadata.state_dict_metadata:
        value = stored[blocks.items[name]] if name in blocks.items else blocks.contents.leaves[name]
        set_element(state, blocks.metadata.planner_data[name], value)
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(out.name + ".partial")
    torch.save(state, partial)
    partial.rename(out)
    return blocks.tensors


class _Blocks(SavePlanner):
    """Plans a commit's blocks as shards; each is read, and checked by its hash, when it is written."""

    def __init__(self, store: Store, found: Found, section: str | None) -> None:
        """Raises CheckpointError if there is no such section."""
        self.contents, self.metadata = Contents(found.manifest), metadata_of(found.manifest)
        if section is not None:
            mine = {n: m for n, m in self.metadata.state_dict_metadata.items() if self.contents.paths[n][0] == section}
            if not mine:
                sections = sorted({str(path[0]) for path in self.contents.paths.values()})
                raise CheckpointError(f"the checkpoint has no section {section!r}; it has: {', '.join(sections)}")
            paths = {name: self.contents.paths[name] for name in mine}
            self.metadata = Metadata(state_dict_metadata=mine, planner_data=paths)
        self._entries = found.manifest.tensors
        self.items = {
            name: item for item, name in enumerate(self._entries) if name in self.metadata.state_dict_metadata
        }
        self.fetcher = Fetcher(store, found.commit.attempt, found.manifest)

    @property
    def tensors(self) -> int:
        return sum(isinstance(m, TensorStorageMetadata) for m in self.metadata.state_dict_metadata.values())

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """The state is the commit's, and not `state_dict`."""

    def create_local_plan(self) -> SavePlan:
        items = []
        for name, entry in self.metadata.state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata):
                items.append(WriteItem(index=MetadataIndex(name), type=WriteItemType.BYTE_IO))
                continue
            for chunk in self._chunks(name) or [_whole(entry)]:
                data = TensorWriteData(chunk=chunk, properties=entry.properties, size=entry.size)
                index = MetadataIndex(name, chunk.offsets)
                items.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))
        return SavePlan(items)

    def _chunks(self, name: str) -> list[ChunkStorageMetadata]:
        """A stored tensor's blocks; none for others."""
        if name not in self._entries:
            return []
        boxes = zip(self._entries[name].offsets_BN.tolist(), self._entries[name].sizes_BN.tolist(), strict=True)
        return [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes]

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = create_default_global_save_plan(all_plans)
        return plans, dataclasses.replace(metadata, planner_data=self.metadata.planner_data)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        name, number = write_item.index.fqn, write_item.index.index
        leaf = self.contents.leaves[name]
        if not isinstance(leaf, Tensor):
            return self.contents.pickled(name)
        if not leaf.is_meta:
            return leaf
        if not leaf.numel():
            return torch.empty(leaf.shape, dtype=leaf.dtype)
        assert number is not None
        ((_, tensor),) = self.fetcher.pieces([block_of(self._entries[name], self.items[name], number)])
        return tensor


def _whole(entry: TensorStorageMetadata) -> ChunkStorageMetadata:
    """The chunk of a tensor that has no blocks, because it has no elements or is in the manifest."""
    return ChunkStorageMetadata(torch.Size([0] * len(entry.size)), entry.size)
