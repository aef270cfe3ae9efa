"""Whole training steps whose tokens travel directly and by NCCL in turn, step by step, in one run:

    composer -n 2 benchmarks/dispatch_in_turn.py yamls/bench/olmoe_1b_7b.yaml model.moe.mesh.expert=2 ... [--profile]

Both ways compute the same bits, so the loads are the same, and what the card's power allows is the same for both.
Prints one line of JSON: the median step of each way, and their ratio. `--profile` is of the last step; with an even
`max_duration` that is a direct one.
"""

from __future__ import annotations

import json
import statistics
from typing import Any

import torch
from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist
from train_step import measure, read_arguments

from foundry_moe.layers.lookup import named_moe_layers
from foundry_moe.parallel.all_to_all import FlatAllToAll
from foundry_moe.parallel.all_to_all_dispatcher import AllToAllDispatcher
from foundry_moe.parallel.direct_dispatcher import DirectDispatcher, DirectExchange

WAYS = ("flat", "direct")
SKIPPED = 6  # steps: both ways have met their first ones


class InTurn(Callback):
    """Gives every layer the next way's dispatcher before each step."""

    def __init__(self) -> None:
        self.step = 0
        self.dispatchers: dict[str, dict[str, Any]] = {}

    def fit_start(self, state: State, logger: Logger) -> None:
        layers = named_moe_layers(state.model)
        first = next(iter(layers.values())).dispatcher
        group = first.all_to_all.group if isinstance(first, AllToAllDispatcher) else first.exchange.group
        flat = FlatAllToAll(group)
        direct = DirectExchange(group, torch.device("cuda", torch.cuda.current_device()))
        for name, layer in layers.items():
            sizes = {"num_experts": layer.num_experts, "chunks": first.chunks, "buffer": first.buffer}
            self.dispatchers[name] = {
                "flat": AllToAllDispatcher(flat, **sizes),
                "direct": DirectDispatcher(direct, **sizes),
            }

    def batch_start(self, state: State, logger: Logger) -> None:
        for name, layer in named_moe_layers(state.model).items():
            layer.dispatcher = self.dispatchers[name][WAYS[self.step % 2]]
        self.step += 1


def main() -> None:
    """Runs from the command line; see the text at the top."""
    from llmfoundry.registry import callbacks

    config, profile = read_arguments(__doc__)
    callbacks.register("dispatchers_in_turn", func=InTurn)
    config.callbacks = {**config.get("callbacks", {}), "dispatchers_in_turn": {}}
    result = measure(config, profile)
    if dist.get_global_rank() == 0:
        spread = result["spread_ms"][: -1 if profile else None]
        ms = {way: statistics.median(spread[SKIPPED + i :: 2]) for i, way in enumerate(WAYS)}
        print(json.dumps({**ms, "flat over direct": round(ms["flat"] / ms["direct"], 4), **result}), flush=True)


if __name__ == "__main__":
    main()
