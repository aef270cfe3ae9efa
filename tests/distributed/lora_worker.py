"""Checkpoints of a model with LoRA adapters on one mesh after another: `elastic_mesh_worker` with another model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from foundry_moe.config import MeshConfig
from tests.distributed import elastic_mesh_worker
from tests.helpers import small_training

CASE = small_training.Case(name="adapters", moe={"num_experts": 8, "top_k": 2, "lora": {"r": 3}})


def build(mesh: tuple[int, int, int], seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model and its optimizer after one step; frozen weights are bf16."""
    replicate, shard, expert = mesh
    device = torch.device("cpu")
    model = small_training.build_model(CASE, torch.float32, device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(0.01 * seed)
            if not parameter.requires_grad:
                module, _, last = name.rpartition(".")
                frozen = nn.Parameter(parameter.bfloat16(), requires_grad=False)
                setattr(model.get_submodule(module), last, frozen)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    config = MeshConfig(replicate=replicate, shard=shard, expert=expert)
    small_training.place(model, config, optimizer, MixedPrecisionPolicy(param_dtype=torch.float32), device, None)
    small_training.accumulate_gradients(CASE, model, 0, torch.float32, distributed=True)
    optimizer.step()
    return model, optimizer


def save_each(root: str, meshes: list[tuple[int, int, int]]) -> dict[str, dict[str, str]]:
    elastic_mesh_worker.build = build
    return elastic_mesh_worker.save_each(root, meshes)


def load_each(root: str, folders: list[str], meshes: list[tuple[int, int, int]]) -> list[dict[str, Any]]:
    elastic_mesh_worker.build = build
    return elastic_mesh_worker.load_each(root, folders, meshes)
