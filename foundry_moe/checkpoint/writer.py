"""Writing what one rank holds of a checkpoint, and the table of contents of what all wrote. No planner, no ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from foundry_moe.checkpoint import fault_injection
from foundry_moe.checkpoint.codec import DTYPE_NAMES
from foundry_moe.checkpoint.errors import CheckpointError
from foundry_moe.checkpoint.layout import Block, plan_writes
from foundry_moe.checkpoint.manifest import Manifest, TensorEntry, block_hash
from foundry_moe.checkpoint.snapshot import Snapshot, place
from foundry_moe.checkpoint.store import Store

Placed = tuple[list[Block], list[int], int]
Row = tuple[tuple, int, int, int]  # a block's box, its object's number, its first byte there, its hash


class PlanCache:
    """The coordinator's plan of all ranks, kept while the layout stays the same."""

    def __init__(self) -> None:
        self._digest: str | None = None
        self._plans: dict[int, Placed] = {}

    def get(self, snapshot: Snapshot) -> dict[int, Placed]:
        if self._digest != snapshot.digest:
            planned = [
                (layout, dtype.itemsize) for layout, dtype in zip(snapshot.layouts, snapshot.dtypes, strict=True)
            ]
            self._plans = {rank: (blocks, *place(blocks)) for rank, blocks in plan_writes(planned).items()}
            self._digest = snapshot.digest
        return self._plans


def object_key(rank: int) -> str:
    """The object that a rank writes, below its attempt's folder."""
    return f"data/{rank:06d}.bin"


def hash_blocks(staged: Tensor, blocks: Sequence[Block], starts: Sequence[int]) -> np.ndarray:
    """The blocks' hashes, uint64."""
    view = staged.numpy().data
    placed = zip(blocks, starts, strict=True)
    return np.array([block_hash(view[at : at + block.size_bytes]) for block, at in placed], dtype=np.uint64)


def write_object(store: Store, attempt: str, rank: int, staged: Tensor) -> None:
    """Writes a rank's bytes, if it has any."""
    if staged.numel():
        store.put_large(
            f"{attempt}/{object_key(rank)}",
            staged.numpy().data,
            on_part=lambda: fault_injection.point("save.part_written"),
        )
    fault_injection.point("save.written")


def entry_of(dtype: str, shape: tuple[int, ...], rows: Sequence[Row]) -> TensorEntry:
    """A tensor's line in the manifest."""
    dims = (len(rows), len(shape))
    return TensorEntry(
        dtype=dtype,
        shape=shape,
        offsets_BN=np.array([box[0] for box, *_ in rows], dtype=np.int64).reshape(dims),
        sizes_BN=np.array([box[1] for box, *_ in rows], dtype=np.int64).reshape(dims),
        object_B=np.array([row[1] for row in rows], dtype=np.int64),
        start_B=np.array([row[2] for row in rows], dtype=np.int64),
        hash_B=np.array([row[3] for row in rows], dtype=np.uint64),
    )


def build_manifest(
    snapshot: Snapshot,
    plans: Mapping[int, Placed],
    reports: Mapping[int, tuple[int, bytes]],
    info: Mapping[str, Any],
) -> Manifest:
    """The table of contents, from the plan of all ranks and what they report: (bytes written, hashes in plan order).

    Raises:
        CheckpointError: a rank wrote something else than the plan says.
    """
    objects: list[tuple[str, int]] = []
    rows: list[list[tuple[int, Row]]] = [[] for _ in snapshot.names]
    for rank in sorted(plans):
        blocks, starts, size_bytes = plans[rank]
        wrote, raw = reports[rank]
        hashes = np.frombuffer(raw, dtype=np.uint64).tolist()
        if wrote != size_bytes or len(hashes) != len(blocks):
            raise CheckpointError(
                f"rank {rank} wrote {wrote} bytes in {len(hashes)} blocks, the plan says {size_bytes} in {len(blocks)}"
            )
        if not size_bytes:
            continue
        for block, start, digest in zip(blocks, starts, hashes, strict=True):
            rows[block.item].append((block.index, (block.box, len(objects), start, digest)))
        objects.append((object_key(rank), size_bytes))
    tensors = {}
    for name, dtype, layout, mine in zip(snapshot.names, snapshot.dtypes, snapshot.layouts, rows, strict=True):
        mine.sort()
        tensors[name] = entry_of(DTYPE_NAMES[dtype], layout.shape, [row for _, row in mine])
    return Manifest(info=info, objects=objects, tensors=tensors, values=snapshot.values)
