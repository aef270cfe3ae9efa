"""The reference backend on a CPU beside a dense FFN of equal active size, at the demo's shape.

    python benchmarks/cpu_layer.py

Prints milliseconds, forward and backward, and the ratio. Both run in this process, in turns, so that whatever else the
machine does falls on both.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from foundry_moe.config import MoEConfig
from foundry_moe.layers.context import BatchContext
from foundry_moe.layers.moe import MoELayer

TOKENS, WIDTH, EXPERT_WIDTH, EXPERTS, TOP_K = 2048, 128, 256, 8, 2
ROUNDS = 30


class DenseFFN(nn.Module):
    """SwiGLU as wide as the experts that a token passes through."""

    def __init__(self) -> None:
        super().__init__()
        hidden = EXPERT_WIDTH * TOP_K
        self.gate, self.up = nn.Linear(WIDTH, hidden, bias=False), nn.Linear(WIDTH, hidden, bias=False)
        self.down = nn.Linear(hidden, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def step(module: nn.Module) -> Callable[[], None]:
    """One forward and backward pass on random tokens."""
    x_TD = torch.randn(TOKENS, WIDTH, requires_grad=True)

    def run() -> None:
        module(x_TD).square().mean().backward()

    return run


def median_ms(steps: list[Callable[[], None]]) -> list[float]:
    """Median time of each step, measured in turns."""
    times: list[list[float]] = [[] for _ in steps]
    for round_number in range(ROUNDS + 3):
        for index, run in enumerate(steps):
            start = time.perf_counter()
            run()
            if round_number >= 3:
                times[index].append(1e3 * (time.perf_counter() - start))
    return [statistics.median(t) for t in times]


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = MoEConfig(
        num_experts=EXPERTS, top_k=TOP_K, expert_hidden_size=EXPERT_WIDTH, activation="swiglu", backend="reference"
    )
    moe = MoELayer(WIDTH, config, layer_index=0, num_layers=4, context=BatchContext())
    moe.reset_parameters()
    dense_ms, moe_ms = median_ms([step(DenseFFN()), step(moe)])
    print(
        f"{TOKENS} tokens, width {WIDTH}, {EXPERTS} experts of {EXPERT_WIDTH}, top {TOP_K}; torch {torch.__version__}"
    )
    print(f"dense FFN of equal active size {dense_ms:7.2f} ms")
    print(f"dMoE layer, reference backend  {moe_ms:7.2f} ms")
    print(f"ratio {moe_ms / dense_ms:.2f} (at most 3)")


if __name__ == "__main__":
    main()
