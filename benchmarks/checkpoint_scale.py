"""The plan of a large job on one CPU: a dMoE of 100 billion parameters on a fake group of 3,072 ranks.

    python benchmarks/checkpoint_scale.py [--mesh 48 8 8] [--node-gbps 2.0] [--link-gbps 1.0]

Nothing is written: the model is on `meta`, the process group is PyTorch's fake one. Printed are every rank's part,
objects, requests, the coordinator's planning time and memory, the manifest, and an estimate of save and resume from
bandwidths that are given, not measured.
"""

from __future__ import annotations

import argparse
import sys
import time
import tracemalloc
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from foundry_moe.checkpoint.layout import Block, Layout, plan_writes
from foundry_moe.checkpoint.manifest import Manifest, build_manifest
from foundry_moe.checkpoint.range_reads import coalesce, plan_reads
from foundry_moe.checkpoint.store import PART_BYTES
from foundry_moe.checkpoint.training_state import flatten, place


class Layer(nn.Module):
    """One transformer layer's weights: attention, norms, gate, experts as w[E, F, D]."""

    def __init__(self, width: int, experts: int, hidden: int) -> None:
        super().__init__()
        self.wqkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm_1, self.norm_2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.gate = nn.Linear(width, experts, bias=False)
        self.experts = nn.Module()
        for name in ("w1_EFD", "v1_EFD", "w2_EFD"):
            self.experts.register_parameter(name, nn.Parameter(torch.empty(experts, hidden, width)))


def build(mesh: tuple[int, int, int], layers: int, width: int, experts: int, hidden: int, vocab: int) -> dict[str, Any]:
    """Model and AdamW state of rank 0, as sharded meta tensors, in the shape that the callback saves."""
    replicate, shard, expert = mesh
    whole = init_device_mesh("cpu", mesh, mesh_dim_names=("replicate", "shard", "expert"))
    flat = init_device_mesh("cpu", (replicate, shard * expert), mesh_dim_names=("replicate", "shard"))
    with torch.device("meta"):
        model = nn.Module()
        model.wte = nn.Embedding(vocab, width)
        model.blocks = nn.ModuleList(Layer(width, experts, hidden) for _ in range(layers))
    for block in model.blocks:
        for name, parameter in list(block.experts.named_parameters()):
            split = distribute_tensor(parameter.data, whole["expert"], [Shard(0)], src_data_rank=None)
            setattr(block.experts, name, nn.Parameter(split))
        fully_shard(block.experts, mesh=whole["replicate", "shard"], shard_placement_fn=lambda parameter: Shard(1))
    fully_shard(model, mesh=flat)
    weights = dict(model.named_parameters())
    optim = {name: {"exp_avg": tensor, "exp_avg_sq": tensor} for name, tensor in weights.items()}
    return {"model": weights, "optim": {"state": optim}}


def covers(blocks: list[Block], layout: Layout) -> bool:
    """Whether blocks are pairwise disjoint and fill the tensor: each cell of their common grid is hit once."""
    edges = []
    starts = np.array([block.box[0] for block in blocks]).reshape(len(blocks), -1)
    ends = starts + np.array([block.box[1] for block in blocks]).reshape(len(blocks), -1)
    for dim in range(starts.shape[1]):
        edges.append(np.unique(np.concatenate([starts[:, dim], ends[:, dim]])))
        if edges[-1][0] != 0 or edges[-1][-1] != layout.shape[dim]:
            return False
    hits = np.zeros([len(edge) - 1 for edge in edges], dtype=np.int32)
    for start, end in zip(starts, ends, strict=True):
        cells = tuple(slice(*np.searchsorted(edge, (a, b))) for edge, a, b in zip(edges, start, end, strict=True))
        hits[cells] += 1
    return bool((hits == 1).all())


def simulate(mesh: tuple[int, int, int], **shape: int) -> dict[str, Any]:
    """Plans a save and a resume of all ranks and checks them.

    Raises:
        AssertionError: an element would be written twice or not at all, or a rank's own plan differs from the
            coordinator's.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    world = mesh[0] * mesh[1] * mesh[2]
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        state = build(mesh, **shape)
    finally:
        dist.destroy_process_group()
    flat = flatten(state, world)
    began = time.perf_counter()
    own = {rank: plan_writes(flat.planned, rank=rank)[rank] for rank in (0, 1, world // 2, world - 1)}
    rank_seconds = (time.perf_counter() - began) / len(own)
    tracemalloc.start()
    began = time.perf_counter()
    plans = plan_writes(flat.planned)
    coordinator_seconds = time.perf_counter() - began
    coordinator_mib = tracemalloc.get_traced_memory()[1] / 2**20
    tracemalloc.stop()
    assert all(plans[rank] == blocks for rank, blocks in own.items())
    by_item: dict[int, list[Block]] = {}
    for blocks in plans.values():
        for block in blocks:
            by_item.setdefault(block.item, []).append(block)
    layouts = list(flat.layouts.values())
    assert all(covers(by_item[item], layout) for item, layout in enumerate(layouts))
    loads = {rank: sum(block.size_bytes for block in blocks) for rank, blocks in plans.items()}
    size = sum(loads.values())
    assert size == sum(tensor.numel() * tensor.element_size() for tensor in flat.tensors.values())

    placed = {rank: place(blocks) for rank, blocks in plans.items()}
    described = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in flat.tensors.items()}
    random = np.random.default_rng(0)  # as incompressible as real hashes
    hashes = {rank: random.integers(2**63, size=len(plan.blocks), dtype=np.uint64) for rank, plan in placed.items()}
    began = time.perf_counter()
    info = {"step": 0, "attempt": "steps/000000000000/20260101T000000-00000000", "world_size": len(placed)}
    names = list(flat.tensors)
    rows = {rank: (plan.size_bytes, plan.rows(names, hashes[rank])) for rank, plan in placed.items()}
    manifest = build_manifest(described, rows, flat.values, info)
    raw = manifest.to_bytes()
    manifest_seconds = time.perf_counter() - began
    began = time.perf_counter()
    back = Manifest.from_bytes(raw)
    reads = plan_reads(back, flat.layouts, 0)
    read_seconds = time.perf_counter() - began
    mine = [block for dealt in reads.values() for block in dealt[0]]
    fetched = sum(block.size_bytes for block in mine)
    needed = sum(block.size_bytes for dealt in reads.values() for blocks in dealt.values() for block in blocks)
    puts = sum(max(1, -(-plan.size_bytes // PART_BYTES)) for plan in placed.values()) + 2
    return {
        "ranks": world,
        "parameters": sum(tensor.numel() for tensor in state["model"].values()),
        "bytes": size,
        "tensors": len(flat.tensors),
        "blocks": sum(len(blocks) for blocks in plans.values()),
        "largest part": max(loads.values()),
        "smallest part": min(loads.values()),
        "objects": len(placed) + 2,
        "write requests": puts,
        "read requests": world * len(coalesce(back, mine)),
        "rank plans in s": rank_seconds,
        "coordinator plans in s": coordinator_seconds,
        "coordinator MiB": coordinator_mib,
        "manifest bytes": len(raw),
        "manifest made in s": manifest_seconds,
        "rank reads manifest and plans in s": read_seconds,
        "rank 0 fetches": fetched,
        "rank 0 needs": needed,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", type=int, nargs=3, default=(48, 8, 8), metavar=("REPLICATE", "SHARD", "EXPERT"))
    parser.add_argument("--node-gbps", type=float, default=2.0, help="GB/s between a node of 8 GPUs and the store")
    parser.add_argument("--link-gbps", type=float, default=1.0, help="GB/s of one rank's CPU link to other nodes")
    parser.add_argument("--d2h-gbps", type=float, default=25.0, help="GB/s of one GPU's copy to pinned memory")
    arguments = parser.parse_args()
    result = simulate(tuple(arguments.mesh), layers=40, width=5120, experts=64, hidden=2560, vocab=100_352)
    for name, value in result.items():
        print(f"{name:36} {value:,.2f}" if isinstance(value, float) else f"{name:36} {value:,}")
    part, needs = result["largest part"], result["rank 0 needs"]
    upload = 8 * part / (arguments.node_gbps * 1e9)
    print(f"\nsave: {part / 1e9 / arguments.d2h_gbps:.3f} s blocked, then {upload:.1f} s of upload in the background")
    fetch = 8 * result["rank 0 fetches"] / (arguments.node_gbps * 1e9)
    share = (needs - result["rank 0 fetches"]) / (arguments.link_gbps * 1e9)
    print(f"resume: {fetch:.1f} s fetching beside {share:.1f} s between ranks, {result['ranks']} ranks at once")
    return 0


if __name__ == "__main__":
    sys.exit(main())
