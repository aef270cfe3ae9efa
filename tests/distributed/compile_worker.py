"""What single ranks do in the test of recompilations: a run with compiled blocks whose gate is turned over."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from composer.core import Callback, State
from composer.loggers import Logger
from torch import Tensor
from torch.distributed.tensor import DTensor

from foundry_moe.algorithms import dmoe_mesh
from foundry_moe.layers.lookup import moe_layers
from foundry_moe.parallel.transformer_blocks import compile_blocks
from tests.distributed import trainer_worker

COLLAPSED, SCATTERED = 3, 5


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


class TurnOver(Callback):
    """From one batch on every token goes to the first experts, from another on they are scattered; notes graphs."""

    noted: list[tuple[str, int]]

    def __init__(self) -> None:
        from benchmarks.compilations import on_graph_compilation

        self.now = ("batch", 0)
        TurnOver.noted = []
        on_graph_compilation(lambda _: TurnOver.noted.append(self.now))

    @torch.no_grad()
    def batch_start(self, state: State, logger: Logger) -> None:
        batch = int(state.timestamp.batch)
        self.now = ("batch", batch)
        for layer in moe_layers(state.model) if batch in (COLLAPSED, SCATTERED) else ():
            for parameter in layer.gate.parameters():
                _local(parameter).zero_()  # equal scores: the first experts are chosen
                if batch == SCATTERED:
                    _local(parameter).normal_()

    def eval_start(self, state: State, logger: Logger) -> None:
        self.now = ("eval", int(state.timestamp.batch))


def compiled_graphs(path: str, runs: list[dict[str, Any]]) -> list[dict[tuple[str, int], int]]:
    """Of each run: how many graphs were compiled, by when."""
    from llmfoundry.registry import callbacks

    callbacks.register("turn_over", func=TurnOver)
    dmoe_mesh.compile_blocks = partial(compile_blocks, backend="aot_eager")  # no code generator: graphs are the point
    results = []
    for overrides in runs:
        torch._dynamo.reset()
        trainer_worker.train_run(path, {**overrides, "callbacks.turn_over": {}})
        results.append({when: TurnOver.noted.count(when) for when in TurnOver.noted})
    return results
