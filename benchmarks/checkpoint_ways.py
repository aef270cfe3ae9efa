"""What each way between the ranks of one host costs a resume: reading again, or gloo; and PyTorch's planner.

    python benchmarks/checkpoint_ways.py [--mib 512] [--repeats 3] [--moto]

Four ranks on (replicate 2, shard 2) load a state of which two need each part. Without `--moto` the store is a local
path, on which both ways are possible. Prints a table in Markdown: medians of the slowest rank's wall time and of
all ranks' core-seconds, the first load left out.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

ROOT = Path(__file__).parents[1]
TENSORS = 16


def make_state(mib: int, value: float) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2))
    rows = mib * 2**20 // TENSORS // 4 // 1024
    local = [torch.full((rows // 2, 1024), value + index) for index in range(TENSORS)]
    placements = (Replicate(), Shard(0))
    return {"model": {f"w{i}": DTensor.from_local(t, mesh, placements, run_check=False) for i, t in enumerate(local)}}


def measure(folder: str, endpoint: str | None, mib: int, repeats: int) -> dict[str, tuple[float, float]]:
    """Seconds and core-seconds of each way, on every rank."""
    from foundry_moe.checkpoint import Reader, StoreOptions
    from foundry_moe.checkpoint.engine import CheckpointEngine
    from foundry_moe.checkpoint.stores import open_store
    from tests.checkpoint.exchange_worker import reached

    options = StoreOptions(endpoint_url=endpoint)
    group = dist.new_group(backend="gloo")
    engine = CheckpointEngine(open_store(folder, options), group=group)
    engine.save(make_state(mib, 1.0), 1)
    report = engine.wait()
    assert report is not None and report.error is None, report
    ways = ("sent",) if endpoint else ("neighbours", "sent")
    found: dict[str, list[tuple[float, float]]] = {}
    reader = Reader(folder, group=group, options=options)
    for _ in range(repeats + 1):
        for way, by_dcp in [(way, False) for way in ways] + [(ways[0], True)]:
            state = make_state(mib, 0.0)
            with reached(way):
                dist.barrier()
                began, cores = time.perf_counter(), sum(os.times()[:2])
                if by_dcp:
                    dcp.load(state, storage_reader=reader)
                else:
                    engine.load(state)
                spent = torch.tensor([time.perf_counter() - began, sum(os.times()[:2]) - cores], dtype=torch.float64)
            slowest = spent.clone()
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            dist.all_reduce(spent)
            assert all(float(t.to_local()[0, 0]) == 1.0 + i for i, t in enumerate(state["model"].values()))
            name = f"{way}, PyTorch's planner" if by_dcp else way
            found.setdefault(name, []).append((slowest[0].item(), spent[1].item()))
    return {
        name: tuple(statistics.median(pair[place] for pair in pairs[1:]) for place in (0, 1))  # type: ignore[misc]
        for name, pairs in found.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--moto", action="store_true", help="an S3 server here, and not a local path")
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    from foundry_moe.launch.processes import run_processes
    from tests.chaos.engine_kills import Moto

    with contextlib.ExitStack() as stack:
        folder, endpoint = f"{stack.enter_context(tempfile.TemporaryDirectory())}/run", None
        if arguments.moto:
            endpoint, folder = stack.enter_context(Moto()).url, "s3://bucket/run"
        found = run_processes(
            measure,
            *(folder, endpoint, arguments.mib, arguments.repeats),
            world_size=4,
            preload=("foundry_moe.checkpoint.engine", "foundry_moe.checkpoint.dcp_reader"),
            timeout_s=1800,
        )
    print("| way | seconds | core-seconds |\n|---|---|---|")
    for name, (seconds, cores) in found.items():
        print(f"| {name} | {seconds:.2f} | {cores:.2f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
