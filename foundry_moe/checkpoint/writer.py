"""Writing what one rank holds of a checkpoint, and the table of contents of what all wrote. No planner, no ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foundry_moe.checkpoint import fault_injection
from foundry_moe.checkpoint.codec import DTYPE_NAMES
from foundry_moe.checkpoint.layout import Block, Box
from foundry_moe.checkpoint.manifest import ALIGN_BYTES, Manifest, TensorEntry, block_hash
from foundry_moe.checkpoint.store import Store

Row = tuple[str, Box, int, int]  # a block's tensor and box, its first byte in a rank's object, its hash
Described = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]  # the tensors of a state by path


def place(blocks: list[Block]) -> tuple[list[int], int]:
    """Where each of a rank's blocks begins in its object, and the object's size."""
    starts, end = [], 0
    for block in blocks:
        starts.append(end)
        end = -(-(end + block.size_bytes) // ALIGN_BYTES) * ALIGN_BYTES
    return starts, (starts[-1] + blocks[-1].size_bytes if blocks else 0)


class StagingBuffer:
    """Memory that is kept from save to save, so that its pages are touched, and pinned, once."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def reserve(self, size_bytes: int, *, pinned: bool) -> Tensor:
        """A uint8 tensor of `size_bytes`; valid until the next call. New memory is touched here, not in a save."""
        if self._memory.numel() < size_bytes or self._memory.is_pinned() is not pinned:
            self._memory = torch.empty(0, dtype=torch.uint8)  # free the old one first
            self._memory = torch.zeros(size_bytes, dtype=torch.uint8, pin_memory=pinned)
        return self._memory[:size_bytes]


@dataclass(frozen=True, kw_only=True)
class Staged:
    """A rank's object in memory: its blocks, and where each begins."""

    blocks: list[Block]
    starts: list[int]
    raw: Tensor  # uint8

    def block(self, index: int, dtype: torch.dtype) -> Tensor:
        """A block's elements."""
        block, start = self.blocks[index], self.starts[index]
        return self.raw[start : start + block.size_bytes].view(dtype).view(block.box[1])

    def hashes(self) -> np.ndarray:
        """The blocks' hashes, uint64."""
        view = self.raw.numpy().data
        placed = zip(self.blocks, self.starts, strict=True)
        return np.array([block_hash(view[at : at + block.size_bytes]) for block, at in placed], dtype=np.uint64)

    def write(self, store: Store, attempt: str, rank: int) -> None:
        """Writes the object, if it has any bytes."""
        if self.raw.numel():
            store.put_large(
                f"{attempt}/{object_key(rank)}",
                self.raw.numpy().data,
                on_part=lambda: fault_injection.point("save.part_written"),
            )
        fault_injection.point("save.written")


def object_key(rank: int) -> str:
    """The object that a rank writes, below its attempt's folder."""
    return f"data/{rank:06d}.bin"


def build_manifest(
    tensors: Described, written: Mapping[int, tuple[int, Iterable[Row]]], values: Any, info: Mapping[str, Any]
) -> Manifest:
    """The table of contents.

    Args:
        written: for each rank the size of its object, and the blocks in it.
        values: all else, encoded.
    """
    objects: list[tuple[str, int]] = []
    blocks: dict[str, list[tuple[Box, int, int, int]]] = {name: [] for name in tensors}
    for rank, (size_bytes, rows) in sorted(written.items()):
        for name, box, start, digest in rows:
            blocks[name].append((box, len(objects), start, digest))
        if size_bytes:
            objects.append((object_key(rank), size_bytes))
    entries = {
        name: _entry(DTYPE_NAMES[dtype], shape, sorted(blocks[name])) for name, (dtype, shape) in tensors.items()
    }
    return Manifest(info=info, objects=objects, tensors=entries, values=values)


def _entry(dtype: str, shape: tuple[int, ...], blocks: list[tuple[Box, int, int, int]]) -> TensorEntry:
    dims = (len(blocks), len(shape))
    return TensorEntry(
        dtype=dtype,
        shape=shape,
        offsets_BN=np.array([box[0] for box, *_ in blocks], dtype=np.int64).reshape(dims),
        sizes_BN=np.array([box[1] for box, *_ in blocks], dtype=np.int64).reshape(dims),
        object_B=np.array([block[1] for block in blocks], dtype=np.int64),
        start_B=np.array([block[2] for block in blocks], dtype=np.int64),
        hash_B=np.array([block[3] for block in blocks], dtype=np.uint64),
    )
