"""Runs LLM Foundry's trainer with `elastic_checkpoint` on each rank of a launch; runs may be broken off and resumed."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from composer.core import Callback, State
from composer.loggers import Logger
from omegaconf import OmegaConf
from torch.distributed.tensor import DTensor

from foundry_moe.checkpoint.codec import tensor_bytes


class BrokenOffError(Exception):
    """The run was ended on purpose."""


class Witness(Callback):
    """Writes down each batch's loss and samples of all ranks, and the state that a run began from; may end it."""

    last: Witness

    def __init__(self, break_at: int | None = None) -> None:
        self.break_at = break_at
        self.losses: dict[int, float] = {}
        self.samples: dict[int, list[str]] = {}
        self.began: dict[str, str] = {}
        self.began_at = -1
        self.ranks_agree = True
        Witness.last = self

    def fit_start(self, state: State, logger: Logger) -> None:
        self.began_at = state.timestamp.batch.value
        if self.began_at:
            self.began = digests(state)
            everyone: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, self.began)
            self.ranks_agree = all(other == self.began for other in everyone)

    def before_forward(self, state: State, logger: Logger) -> None:
        mine = [xxhash.xxh3_64_hexdigest(tensor_bytes(row.cpu())) for row in state.batch["input_ids"]]
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, mine)
        batch = self.samples.setdefault(state.timestamp.batch.value, [])
        batch.extend(sample for part in every for sample in part)

    def batch_end(self, state: State, logger: Logger) -> None:
        self.losses[state.timestamp.batch.value] = float(state.total_loss_dict["loss/train/total"])
        if self.break_at is not None and state.timestamp.batch.value > self.break_at:
            raise BrokenOffError


def digests(state: State) -> dict[str, str]:
    """A hash of each whole tensor of model and optimizer, equal on any mesh."""
    from foundry_moe.callbacks.elastic_state import collect

    everything = collect(state)
    found = {}
    parts = {"model": everything["model"], **everything["optim"]["state"]}
    for section, tensors in parts.items():
        for name, tensor in tensors.items():
            if isinstance(tensor, torch.Tensor):
                whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
                found[f"{section}|{name}"] = xxhash.xxh3_64_hexdigest(tensor_bytes(whole.cpu()))
    return found


def run_one(path: str, overrides: dict[str, Any]) -> dict[str, Any]:
    """Trains from a YAML until its end, or until after batch `break_at`."""
    os.environ["FSDP_VERSION"] = "2"
    os.environ.setdefault("NODE_RANK", "0")  # Composer's own loading reads it
    from llmfoundry import registry
    from llmfoundry.command_utils import train

    overrides = dict(overrides)
    may_fail = overrides.pop("may_fail", False)
    if "witness" not in registry.callbacks.get_all():
        registry.callbacks.register("witness", func=Witness)
    config = OmegaConf.load(path)
    overrides["callbacks.witness"] = {"break_at": overrides.pop("break_at", None)}
    for key, value in overrides.items():
        OmegaConf.update(config, key, value, merge=False, force_add=True)
    ended: dict[str, str] = {}
    metrics: dict[str, Any] = {}
    error = None
    try:
        trainer = train(config)
        ended = digests(trainer.state)
        history = trainer.logger.destinations[0].data
        metrics = {key: [float(v) for _, v in rows] for key, rows in history.items() if key.startswith("checkpoint/")}
    except BrokenOffError:
        pass
    except Exception as failure:
        error = f"{type(failure).__name__}: {failure}"
        if not may_fail:
            raise
    witness = Witness.last
    return {
        "losses": witness.losses,
        "samples": witness.samples,
        "began": witness.began,
        "began_at": witness.began_at,
        "ranks_agree": witness.ranks_agree,
        "ended": ended,
        "metrics": metrics,
        "error": error,
    }


def run_all(path: str, runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Several runs, one after another, in one launch."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    return [run_one(path, overrides) for overrides in runs]
