"""What passes through rank 0 when a large job saves and loads: the engine's messages, and those of DCP's planners.

    python -m benchmarks.checkpoint_planners [--mesh 8 8 8] [--layers 40]

No data is written and no message sent: the model is on `meta`, the process group is PyTorch's fake one, and each rank's
plan is made from its layouts, as DefaultSavePlanner and DefaultLoadPlanner make it. What DCP gathers on rank 0, and
scatters or broadcasts from it, is pickled and unpickled (a broadcast counts as one message); rank 0's own work is
timed. DCP's planners repeat all of it on
each save (`Writer` refuses cached plans), the engine plans once.
"""

from __future__ import annotations

import argparse
import dataclasses
import pickle
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult

from benchmarks.checkpoint_scale import build
from foundry_moe.checkpoint import dcp_reader, dcp_writer
from foundry_moe.checkpoint.layout import cut, plan_writes
from foundry_moe.checkpoint.manifest import Manifest
from foundry_moe.checkpoint.range_reads import plan_reads
from foundry_moe.checkpoint.training_state import Flat, flatten, place

Row = tuple[str, float, float]  # what, MB through rank 0, seconds of rank 0


def timed(step: Callable[[], Any]) -> tuple[Any, float]:
    began = time.perf_counter()
    return step(), time.perf_counter() - began


def through_rank_0(parts: list[Any]) -> tuple[float, float]:
    """MB of some messages, and the seconds to unpickle them one after the other."""
    raw = [pickle.dumps(part) for part in parts]
    return sum(map(len, raw)) / 1e6, timed(lambda: [pickle.loads(part) for part in raw])[1]


def save_plans(flat: Flat, paths: dict[str, Any], world: int) -> list[SavePlan]:
    """The local plan of every rank."""
    properties = {dtype: TensorProperties(dtype=dtype) for dtype in {tensor.dtype for tensor in flat.tensors.values()}}
    plans = []
    for rank in range(world):
        items = []
        for name, tensor in flat.tensors.items():
            for offsets, sizes in flat.layouts[name].boxes_of(rank):
                chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
                data = TensorWriteData(chunk=chunk, properties=properties[tensor.dtype], size=tensor.size())
                index = MetadataIndex(name, chunk.offsets)
                items.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))
        plans.append(SavePlan(items, planner_data=paths))
    return plans


def written(plan: SavePlan, rng: np.random.Generator) -> list[WriteResult]:
    """What `Writer.write_data` reports of a plan, with hashes as incompressible as real ones."""
    rows: list[dcp_writer.Row] = []
    for item in plan.items:
        assert item.tensor_data is not None
        chunk, itemsize = item.tensor_data.chunk, item.tensor_data.properties.dtype.itemsize
        boxes = cut((tuple(chunk.offsets), tuple(chunk.sizes)), itemsize)
        hashes = rng.integers(0, 2**63, len(boxes)).tolist()
        rows += [(item.index.fqn, box, 64 * number, hashes[number]) for number, box in enumerate(boxes)]
    stored = dcp_writer._Written(object_bytes=1, rows=rows, leaves={})
    return [WriteResult(index=MetadataIndex("all"), size_in_bytes=0, storage_data=stored)]


def planners(flat: Flat, paths: dict[str, Any], world: int) -> tuple[list[Row], Manifest]:
    """A save and a load through DCP's default planners."""
    rows: list[Row] = []
    plans = save_plans(flat, paths, world)
    size, seconds = through_rank_0(plans)
    rows.append(("save: gather plans", size, seconds))
    planner = DefaultSavePlanner()
    planner.set_up_planner({}, is_coordinator=True)
    (plans, metadata), seconds = timed(lambda: planner.create_global_plan(plans))
    assigned = [dataclasses.replace(plan, storage_data=(rank, "a" * 40)) for rank, plan in enumerate(plans)]
    size, pickling = timed(lambda: sum(len(pickle.dumps(plan)) for plan in assigned))
    rows.append(("save: global plan, scatter", size / 1e6, seconds + pickling))
    rng = np.random.default_rng(0)
    results = [written(plan, rng) for plan in plans]
    size, seconds = through_rank_0(results)
    rows.append(("save: gather results", size, seconds))
    info = {"step": 0, "attempt": "steps/000000000000/20260101T000000-00000000", "world_size": world}
    manifest, seconds = timed(lambda: dcp_writer._manifest(metadata, results, info))
    raw, pickling = timed(lambda: pickle.dumps(metadata))
    rows.append(("save: manifest, broadcast metadata", len(raw) / 1e6, seconds + pickling))

    asked = []
    for rank in range(world):
        items = []
        for name in flat.tensors:
            for offsets, sizes in flat.layouts[name].boxes_of(rank):
                zeros = torch.Size([0] * len(sizes))
                items.append(
                    ReadItem(
                        type=LoadItemType.TENSOR,
                        dest_index=MetadataIndex(name, torch.Size(offsets), 0),
                        dest_offsets=zeros,
                        storage_index=MetadataIndex(name, zeros, 0),
                        storage_offsets=torch.Size(offsets),
                        lengths=torch.Size(sizes),
                    )
                )
        asked.append(LoadPlan(items))
    size, seconds = through_rank_0(asked)
    rows.append(("load: gather and scatter plans", 2 * size, 2 * seconds))
    needs = [{name: flat.layouts[name].boxes_of(rank) for name in flat.tensors} for rank in range(world)]
    size, seconds = through_rank_0(needs)
    chunks, making = timed(lambda: dcp_reader._chunks(needs))
    raw, pickling = timed(lambda: pickle.dumps(chunks))
    rows.append(("load: needs of all ranks", size + len(raw) / 1e6, seconds + making + pickling))
    here = pickle.loads(raw)
    rows.append(("load: a rank's reads", 0.0, timed(lambda: plan_reads(manifest, here, 0))[1]))
    return rows, manifest


def engine(flat: Flat, world: int, manifest: Manifest) -> list[Row]:
    """A save and a load of the engine."""
    digest, seconds = timed(flat.digest)
    size, unpickling = through_rank_0([digest] * world)
    rows: list[Row] = [("save: digests, attempt", 2 * size, seconds + unpickling)]
    plans, seconds = timed(lambda: {rank: place(blocks) for rank, blocks in plan_writes(flat.planned).items()})
    rows.append(("save: plan of all ranks (first save)", 0.0, seconds))
    rng = np.random.default_rng(0)
    reports = [(rng.bytes(8 * len(plan.blocks)), True) for plan in plans.values()]
    size, unpickling = through_rank_0(reports)
    rows.append(("save: gather hashes", size, unpickling))
    found = pickle.dumps(manifest)
    rows.append(("load: broadcast manifest", len(found) / 1e6, timed(lambda: pickle.loads(found))[1]))
    rows.append(("load: a rank's reads", 0.0, timed(lambda: plan_reads(manifest, flat.layouts, 0))[1]))
    return rows


def main() -> int:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", type=int, nargs=3, default=(8, 8, 8), metavar=("REPLICATE", "SHARD", "EXPERT"))
    parser.add_argument("--layers", type=int, default=40)
    arguments = parser.parse_args()
    world = int(np.prod(arguments.mesh))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        state = build(
            tuple(arguments.mesh), layers=arguments.layers, width=5120, experts=64, hidden=2560, vocab=100_352
        )
        flat = flatten(state, world)
        paths = flatten_state_dict(state)[1]
    finally:
        dist.destroy_process_group()
    theirs, manifest = planners(flat, paths, world)
    print(f"{world} ranks, {len(flat.tensors)} tensors")
    for title, rows in (("DCP's default planners", theirs), ("engine", engine(flat, world, manifest))):
        print(f"\n{title:40} {'MB':>10} {'s':>8}")
        for what, size, seconds in rows:
            print(f"{what:40} {size:10.1f} {seconds:8.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
