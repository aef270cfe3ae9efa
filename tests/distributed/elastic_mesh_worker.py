"""Saves and loads a small FSDP2 model with sharded experts through the checkpoint engine, on one mesh after another."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from foundry_moe.checkpoint import open_store
from foundry_moe.checkpoint.codec import tensor_bytes
from foundry_moe.checkpoint.engine import CheckpointEngine

EXPERTS, WIDTH, HIDDEN = 8, 5, 840  # 840 can be sharded over 1 to 8 ranks, as FSDP2 requires for dimension 1
BLOCK_BYTES = 4096


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1_EFD = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH))
        self.w2_EFD = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH))

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return torch.einsum("td,efd,efg->tg", x_TD, self.w1_EFD, self.w2_EFD) / HIDDEN


class Model(nn.Module):
    """Experts, a buffer, a parameter smaller than the ranks, and dense weights of 11 rows."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 11)
        self.down = nn.Linear(11, WIDTH, bias=False)
        self.gain = nn.Parameter(torch.randn(3))
        self.experts = Experts()
        self.register_buffer("counts", torch.arange(100.0))


def build(mesh: tuple[int, int, int], seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model and its optimizer after one step, sharded over the mesh; one process keeps plain tensors."""
    torch.manual_seed(seed)
    model = Model()
    replicate, shard, expert = mesh
    if replicate * shard * expert > 1:
        names = ("replicate", "shard", "expert")
        whole = init_device_mesh("cpu", mesh, mesh_dim_names=names)
        flat = init_device_mesh("cpu", (replicate, shard * expert), mesh_dim_names=("replicate", "shard"))
        for name, parameter in list(model.experts.named_parameters()):
            split = distribute_tensor(parameter.data, whole["expert"], [Shard(0)], src_data_rank=None)
            setattr(model.experts, name, nn.Parameter(split))
        fully_shard(model.experts, mesh=whole["replicate", "shard"], shard_placement_fn=lambda parameter: Shard(1))
        fully_shard(model, mesh=flat)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for index, parameter in enumerate(model.parameters()):
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        gradient = torch.full_like(local, 0.1 * (index + 1))
        parameter.grad = (
            DTensor.from_local(
                gradient, parameter.device_mesh, parameter.placements, run_check=False, shape=parameter.shape,
                stride=parameter.stride(),
            )
            if isinstance(parameter, DTensor)
            else gradient
        )  # fmt: skip
    optimizer.step()
    return model, optimizer


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(model),
        "optim": get_optimizer_state_dict(model, optimizer),
        "values": {"step": 3, "names": ("a", "b")},
    }


def digests(state: dict[str, Any]) -> dict[str, str]:
    found = {}
    parts = {"model": state["model"], **state["optim"]["state"]}
    for section, tensors in parts.items():
        for name, tensor in tensors.items():
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            found[f"{section}|{name}"] = xxhash.xxh3_64_hexdigest(tensor_bytes(whole))
    return found


def make_engine(folder: str) -> CheckpointEngine:
    return CheckpointEngine(open_store(folder), group=dist.group.WORLD)


def save_each(root: str, meshes: list[tuple[int, int, int]]) -> dict[str, dict[str, str]]:
    """Saves the model on each mesh to a folder of its own; returns the digests of what was saved."""
    saved = {}
    for mesh in meshes:
        model, optimizer = build(mesh, seed=sum(mesh))
        state = state_of(model, optimizer)
        saved[folder_of(mesh)] = digests(state)
        engine = make_engine(f"{root}/{folder_of(mesh)}")
        engine.save(state, 3)
        report = engine.wait()
        assert report is not None and report.error is None, report
    return saved


def folder_of(mesh: tuple[int, int, int]) -> str:
    return "-".join(str(n) for n in mesh)


def load_each(root: str, folders: list[str], meshes: list[tuple[int, int, int]]) -> list[dict[str, Any]]:
    """Loads every folder on every mesh into a model with other values; returns digests and bytes.

    In every other load ranks send each other what one of them reads, in narrow ranges, as on several hosts.
    """
    results = []
    for turn, mesh in enumerate(meshes):
        for number, folder in enumerate(folders, turn):
            engine = make_engine(f"{root}/{folder}")
            if number % 2:
                engine.ledger.store.host, engine.ledger.store.range_bytes = None, 2**14
            model, optimizer = build(mesh, seed=99)
            state = state_of(model, optimizer)
            loaded = engine.load(state)
            assert loaded is not None and loaded.state["values"] == {"step": 3, "names": ("a", "b")}
            set_optimizer_state_dict(model, optimizer, loaded.state["optim"])
            fetched = torch.tensor([loaded.traffic.bytes_fetched, loaded.traffic.bytes_sent])
            dist.all_reduce(fetched)
            results.append(
                {
                    "mesh": mesh,
                    "folder": folder,
                    "digests": digests(state_of(model, optimizer)),
                    "fetched": int(fetched[0]),
                    "sent": int(fetched[1]),
                    "bytes": loaded.summary["bytes"],
                }
            )
    return results
