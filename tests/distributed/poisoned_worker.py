"""`elastic_worker`'s runs with a callback that spoils a batch: its weights, gradients or data, on one rank."""

from __future__ import annotations

import os
from typing import Any

import torch
from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist

from tests.distributed import elastic_worker


class Poison(Callback):
    """In batch `batch`, counted from 1, on `rank`.

    kind: `weights` (before it, those of the last layer), `gradients` (before clipping, of the first layer), `data`
        (half of the samples).
    """

    def __init__(self, kind: str, batch: int, rank: int = 1) -> None:
        self.kind, self.batch, self.rank = kind, batch, rank
        self.handles: list[Any] = []

    def _strikes(self, kind: str, state: State) -> bool:
        here = dist.get_global_rank() == self.rank % dist.get_world_size()
        return here and kind == self.kind and state.timestamp.batch.value + 1 == self.batch

    def after_dataloader(self, state: State, logger: Logger) -> None:
        if self._strikes("weights", state):
            self._spoil_weights(state)
        if self._strikes("data", state):
            state.batch = {name: value[: len(value) // 2] for name, value in state.batch.items()}

    def before_backward(self, state: State, logger: Logger) -> None:
        if self._strikes("gradients", state):
            for name, parameter in state.model.named_parameters():
                if "blocks.0" in name and "norm_1" in name:
                    self.handles.append(parameter.register_post_accumulate_grad_hook(self._overflow))

    @staticmethod
    def _overflow(parameter: torch.Tensor) -> None:
        with torch.no_grad():
            gradient = parameter.grad
            (gradient.to_local() if hasattr(gradient, "to_local") else gradient).fill_(float("inf"))

    def batch_end(self, state: State, logger: Logger) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles = []

    @torch.no_grad()
    def _spoil_weights(self, state: State) -> None:
        for name, parameter in state.model.named_parameters():
            if "blocks.1" in name and "norm_2" in name:
                (parameter.to_local() if hasattr(parameter, "to_local") else parameter).fill_(float("nan"))


def run_all(path: str, runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`elastic_worker.run_all`, each run with `poison`: the callback's keys."""
    from llmfoundry import registry

    if "poison" not in registry.callbacks.get_all():
        registry.callbacks.register("poison", func=Poison)
    os.environ["FSDP_VERSION"] = "2"
    return elastic_worker.run_all(path, [{"callbacks.poison": run.pop("poison"), **run} for run in runs])
