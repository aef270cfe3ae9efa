"""Saving through torch.distributed.checkpoint: a planner that needs no plans from other ranks, and a StorageWriter.

DCP keeps the protocol: plan, scatter, write, gather, finish, each rank's failure told to all. What travels is small:
a digest of the layout goes to the coordinator, which hands out the attempt's name, and hashes come back. It must not
know of Composer, nor when to save.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from foundry_moe.checkpoint import fault_injection
from foundry_moe.checkpoint.codec import DTYPE_NAMES
from foundry_moe.checkpoint.collective_errors import portable_errors
from foundry_moe.checkpoint.errors import CheckpointError
from foundry_moe.checkpoint.finite import is_finite
from foundry_moe.checkpoint.layout import Block, plan_writes
from foundry_moe.checkpoint.ledger import Ledger, new_attempt
from foundry_moe.checkpoint.manifest import Commit, CommitKey, Manifest, TensorEntry, block_hash, file_hash
from foundry_moe.checkpoint.snapshot import Snapshot, Snapshotter, place

Placed = tuple[list[Block], list[int], int]


@dataclass(frozen=True, kw_only=True)
class CommitRequest:
    """What the coordinator writes beside the data: where the commit goes, and what tools show of it."""

    where: CommitKey
    nonce: str
    info: Mapping[str, Any]
    summary: Mapping[str, Any]
    forked_from: int | None = None


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


class ElasticSavePlanner(SavePlanner):
    """Plans from the layout alone. Give it a Snapshot, or let it take one of the state dict."""

    def __init__(self, snapshot: Snapshot | None = None, *, rank: int = 0, world_size: int = 1) -> None:
        self.snapshot = snapshot
        self._rank, self._world_size = rank, world_size

    @portable_errors
    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        if self.snapshot is None:
            self.snapshot = Snapshotter(self._rank, self._world_size).take(state_dict)

    def create_local_plan(self) -> SavePlan:
        assert self.snapshot is not None
        return SavePlan(items=[], planner_data=self.snapshot.digest)

    @portable_errors
    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Checks that all ranks plan from the same layout.

        Raises:
            CheckpointError: they do not; the ranks are named.
        """
        assert self.snapshot is not None
        strange = [rank for rank, plan in enumerate(all_plans) if plan.planner_data != self.snapshot.digest]
        if strange:
            raise CheckpointError(
                f"ranks {strange[:8]} hold other tensors, or otherwise laid out, than rank 0: every rank must give "
                "the same state dict"
            )
        return all_plans, Metadata(state_dict_metadata={})

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """The plan is the snapshot's: PyTorch's form of it, an object for each block, would keep the interpreter from
        launching the next step's kernels for 15 to 130 ms."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        raise AssertionError("the writer takes staged bytes from the snapshot")


class ElasticWriter(StorageWriter):
    """Writes one attempt at a checkpoint, and commits it."""

    def __init__(
        self,
        ledger: Ledger,
        request: CommitRequest,
        plans: PlanCache | None = None,
        check_owner: Callable[[], None] = lambda: None,
    ) -> None:
        """`check_owner` raises if the folder is another process's by now; the coordinator calls it, before anything is
        written and again before the record."""
        self.ledger, self.request, self.check_owner = ledger, request, check_owner
        self.attempt: str | None = None  # known to all ranks once the plan is scattered
        self.commit: Commit | None = None  # on the coordinator, once the commit is recorded
        self.recording = False  # on the coordinator: from here on the commit may exist
        self.seconds: dict[str, float] = {}
        self._plans = plans or PlanCache()
        self._snapshot: Snapshot | None = None

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass  # the snapshot knows its rank; torch 2.7 would not tell

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        fault_injection.point("save.planned")
        return plan

    @portable_errors
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self.check_owner()
        attempt = new_attempt(self.request.where.step)
        return [SavePlan(items=[], storage_data=attempt, planner_data=plan.planner_data) for plan in plans]

    @portable_errors
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        assert isinstance(planner, ElasticSavePlanner) and planner.snapshot is not None
        self.attempt, self._snapshot = plan.storage_data, planner.snapshot
        began = time.perf_counter()
        staged = self._snapshot.staged.numpy().data
        placed = zip(self._snapshot.blocks, self._snapshot.starts, strict=True)
        hashes = np.array([block_hash(staged[at : at + block.size_bytes]) for block, at in placed], dtype=np.uint64)
        self.seconds["hash"] = time.perf_counter() - began
        if len(staged):
            self.ledger.store.put_large(
                f"{self.attempt}/{object_key(self._snapshot.rank)}",
                staged,
                on_part=lambda: fault_injection.point("save.part_written"),
            )
        fault_injection.point("save.written")
        self.seconds["write"] = time.perf_counter() - began
        report = WriteResult(
            index=MetadataIndex(str(self._snapshot.rank)),
            size_in_bytes=len(staged),
            storage_data=(hashes.tobytes(), is_finite(self._snapshot)),
        )
        future: Future[list[WriteResult]] = Future()
        future.set_result([report])
        return future

    @portable_errors
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        assert self._snapshot is not None and self.attempt is not None
        began = time.perf_counter()
        manifest = build_manifest(
            self._snapshot,
            self._plans.get(self._snapshot),
            {rank: (reports[0].size_in_bytes, reports[0].storage_data[0]) for rank, reports in enumerate(results)},
            {**self.request.info, "attempt": self.attempt},
        )
        problems = self.ledger.size_problems(self.attempt, manifest.objects)
        if problems:
            raise CheckpointError(
                f"step {self.request.where.step} was not committed: {'; '.join(problems)}; older checkpoints are kept"
            )
        fault_injection.point("commit.sizes_checked")
        raw = manifest.to_bytes()
        self.ledger.store.put(f"{self.attempt}/MANIFEST", raw)
        fault_injection.point("commit.manifest_written")
        commit = Commit(
            where=self.request.where,
            attempt=self.attempt,
            nonce=self.request.nonce,
            manifest_bytes=len(raw),
            manifest_hash=file_hash(raw),
            forked_from=self.request.forked_from,
            summary={
                **self.request.summary,
                "bytes": manifest.size_bytes,
                "objects": len(manifest.objects),
                "tensors": len(manifest.tensors),
                "finite": all(reports[0].storage_data[1] for reports in results),
            },
        )
        self.check_owner()
        self.recording = True
        self.ledger.record(commit)
        fault_injection.point("commit.recorded")
        self.ledger.confirm(commit, manifest.objects)
        fault_injection.point("commit.confirmed")
        self.commit = commit
        self.seconds["commit"] = time.perf_counter() - began

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False  # a folder alone is not enough: see CommitRequest


def object_key(rank: int) -> str:
    """The object that a rank writes, below its attempt's folder."""
    return f"data/{rank:06d}.bin"


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
    rows: list[list[tuple[int, tuple, int, int, int]]] = [[] for _ in snapshot.names]
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
            rows[block.item].append((block.index, block.box, len(objects), start, digest))
        objects.append((object_key(rank), size_bytes))
    tensors = {}
    for name, dtype, layout, mine in zip(snapshot.names, snapshot.dtypes, snapshot.layouts, rows, strict=True):
        mine.sort()
        shape = (len(mine), len(layout.shape))
        tensors[name] = TensorEntry(
            dtype=DTYPE_NAMES[dtype],
            shape=layout.shape,
            offsets_BN=np.array([box[0] for _, box, *_ in mine], dtype=np.int64).reshape(shape),
            sizes_BN=np.array([box[1] for _, box, *_ in mine], dtype=np.int64).reshape(shape),
            object_B=np.array([row[2] for row in mine], dtype=np.int64),
            start_B=np.array([row[3] for row in mine], dtype=np.int64),
            hash_B=np.array([row[4] for row in mine], dtype=np.uint64),
        )
    return Manifest(info=info, objects=objects, tensors=tensors, values=snapshot.values)
