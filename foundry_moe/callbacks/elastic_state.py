"""Composer's training state as a state dict that fits any mesh, and back.

The model and the optimizer are taken apart by parameter name, as DTensors in place; all else goes through the
`state_dict` and `load_state_dict` of Composer's own objects. Left out on purpose: the tokenizer, which Composer puts
in byte by byte, and random states by rank (see `reseed`).
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import xxhash
from composer.core import State
from composer.loggers import Logger
from composer.utils import dist
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

BY_NAME = ("schedulers", "algorithms", "callbacks", "scaler", "timestamp")


def collect(state: State, *, weights_only: bool = False) -> dict[str, Any]:
    """Everything that a run needs to go on, or the model alone. The tensors are the live ones, not copies.

    An optimizer that has not stepped yet gets its state initialised, as PyTorch does it.
    """
    if weights_only:
        return {"model": get_model_state_dict(state.model)}
    return {
        "model": get_model_state_dict(state.model),
        "optim": get_optimizer_state_dict(state.model, state.optimizers) if state.optimizers else {},
        "composer": {
            **{name: _named(getattr(state, name)) for name in BY_NAME},
            "rank_zero_seed": state.rank_zero_seed,
            "dataset_state": state._dataset_state_dict() if state.train_dataloader is not None else None,
        },
    }


def _named(objects: Any) -> dict[str, Any]:
    """State dicts by class name, as Composer keeps them."""
    several = objects if isinstance(objects, list | tuple) else [objects] if objects is not None else []
    return {type(item).__qualname__: item.state_dict() for item in several}


def restore(state: State, loaded: dict[str, Any], logger: Logger) -> None:
    """Puts a loaded state in place. The model's tensors were filled already: `loaded` refers to the live ones."""
    if "composer" not in loaded:
        return  # weights alone: a new run begins from them
    if state.optimizers:
        for optimizer in state.optimizers:
            set_optimizer_state_dict(state.model, optimizer, loaded["optim"])
    rest = {key: value for key, value in loaded["composer"].items() if value is not None}
    here = {name: _named(getattr(state, name)) for name in BY_NAME}
    for name in BY_NAME:  # what this run has and the checkpoint lacks starts anew, without Composer's warning
        rest[name] = {**here[name], **rest.get(name, {})}
    state.load_state_dict(rest, logger)


def reseed(seed: int, batch: int, rank: int) -> None:
    """Sets all random generators from (seed, batch, data-parallel rank), whatever was drawn before."""
    value = xxhash.xxh3_64_intdigest(f"{seed} {batch} {rank}".encode()) % 2**32
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)


def describe_mesh(model: torch.nn.Module) -> dict[str, int]:
    """The mesh that holds the model, by dimension name: that of the parameter with the most dimensions."""
    meshes = [p.device_mesh for p in model.parameters() if isinstance(p, DTensor)]
    if not meshes:
        return {"world": dist.get_world_size()}
    mesh = max(meshes, key=lambda m: m.ndim)
    names = mesh.mesh_dim_names or tuple(f"dim{i}" for i in range(mesh.ndim))
    return dict(zip(names, mesh.mesh.shape, strict=True))
