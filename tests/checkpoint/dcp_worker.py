"""Saves and loads through torch.distributed.checkpoint's default planners on every rank of a launch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from foundry_moe.checkpoint import Reader, Writer, open_store
from foundry_moe.checkpoint.engine import CheckpointEngine

SHAPES = {"experts": (4, 96, 40), "dense": (50, 33), "bias": (130,), "alike": (1000,)}
HERE: dict[str, list[Placement]] = {  # how they are saved, and below how they are loaded
    "experts": [Shard(1), Shard(0)],
    "dense": [Replicate(), Shard(0)],
    "bias": [Shard(0), Replicate()],
}
THERE: dict[str, list[Placement]] = {
    "experts": [Replicate(), Shard(2)],
    "dense": [Shard(1), Shard(0)],
    "bias": [Replicate(), Replicate()],
}


def truth(step: int) -> dict[str, torch.Tensor]:
    return {name: torch.arange(torch.Size(shape).numel()).reshape(shape) + 1e5 * step for name, shape in SHAPES.items()}


def make_state(step: int, placements: dict[str, list[Placement]], blank: bool = False) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2))
    whole = truth(step)
    if blank:
        whole = {name: torch.full_like(tensor, -1) for name, tensor in whole.items()}
    tensors = {name: distribute_tensor(whole[name], mesh, placement) for name, placement in placements.items()}
    own = {f"rank {dist.get_rank()}": {"seed": -1 if blank else 100 * step + dist.get_rank()}}
    counter = torch.tensor(-1 if blank else step)
    return {"model": {**tensors, "alike": whole["alike"]}, "values": {**own, "counter": counter, "step": step}}


def problems(state: dict[str, Any], step: int) -> list[str]:
    """What of a loaded state is not that of a step, on this rank."""
    expected = make_state(step, THERE)
    wrong = []
    for name, tensor in expected["model"].items():
        here = state["model"][name]
        pair = [part.to_local() if isinstance(part, DTensor) else part for part in (here, tensor)]
        if not torch.equal(*pair):
            wrong.append(name)
    if state["values"] != expected["values"]:
        wrong.append(f"{state['values']} is not {expected['values']}")
    return wrong


def everywhere(mine: Any) -> list[Any]:
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return every


def load(folder: str, **keys: Any) -> dict[str, Any]:
    """One load into other placements, and what it cost."""
    state, reader = make_state(0, THERE, blank=True), Reader(folder)
    dcp.load(state, storage_reader=reader, **keys)
    assert reader.step is not None
    return {
        "step": reader.step,
        "problems": [one for mine in everywhere(problems(state, reader.step)) for one in mine],
        "fetched": sum(everywhere(reader.traffic.bytes_fetched)),
    }


def save_and_load(folder: str) -> dict[str, Any]:
    """All that needs several ranks, in one launch; rank 0's answers."""
    found: dict[str, Any] = {}
    writer = Writer(folder, keep=2)
    for step in (1, 2, 3):
        dcp.save(make_state(step, HERE), storage_writer=writer, checkpoint_id=str(step))
    future = dcp.async_save(make_state(4, HERE), storage_writer=writer, checkpoint_id="4")
    future.result()
    found["steps"] = Reader(folder).steps()
    found["bytes"] = writer.commit.summary["bytes"] if writer.commit is not None else None
    found["newest"] = load(folder)
    found["named"] = load(folder, checkpoint_id="3")
    engine = CheckpointEngine(open_store(folder), group=dist.group.WORLD)
    # each rank has keys of its own under `values`, which the engine takes from the checkpoint
    loaded = engine.load({"model": make_state(0, THERE, blank=True)["model"]})
    assert loaded is not None
    values = loaded.state["values"]
    found["engine"] = loaded.step, [values[f"rank {rank}"]["seed"] for rank in range(4)], int(values["counter"])
    refused = Writer(folder)
    try:
        strange = {"model": make_state(5, HERE)["model"], "more": {1: slice(2)} if dist.get_rank() == 2 else {}}
        dcp.save(strange, storage_writer=refused, checkpoint_id="5")
    except CheckpointException as error:
        found["refused"] = str(error)
    dist.barrier()
    if dist.get_rank() == 0:  # a byte in the middle of a block of the newest
        damaged = sorted(Path(folder).glob("steps/000000000004/*/data/*.bin"))[2]
        raw = bytearray(damaged.read_bytes())
        raw[len(raw) // 2] ^= 1
        damaged.write_bytes(raw)
    dist.barrier()
    found["damaged"] = load(folder)
    return found
