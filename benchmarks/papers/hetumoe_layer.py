"""HetuMoE's layer (Nie et al. 2022, arXiv 2203.14685) beside GShard's einsums. On a GPU:

    python -m benchmarks.papers.hetumoe_layer [--batches 8 16 32 64 128]

The paper: 16 experts, hidden size 2048, sequences of 1024 tokens, Switch and GShard gates, 8 TITAN RTX, fp32: up to 8.1
times DeepSpeed-MoE (Switch, batch 32), at least 15% over the best system. Here all experts are on one GPU, in bf16, so
that no all-to-all is part of any layer; experts are 2048 wide as the tokens are, with GELU; forward and backward with
the balance loss, launches hidden. Loads are those of a random gate on random tokens, near even. The ways:

    ours            dropless
    capacity 1      capacity factor 1, which drops; on the same kernels
    einsum          GShard's masks, capacity factor 1, which drops, in one group, as DeepSpeed-MoE has them
    einsum groups   the same in groups of one sequence

The peers' own kernels are not measured: these are their methods (`einsum_dispatch.py`).

Shapes: T tokens, D model width.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from timing import DEVICE, DTYPE, header, print_table, queued_ms
from torch import Tensor

from benchmarks.papers.einsum_dispatch import einsum_layer
from foundry_moe.config import MoEConfig
from foundry_moe.layers.moe import MoELayer

GATES: dict[str, dict[str, Any]] = {
    "switch": {"top_k": 1, "gate": {"name": "switch", "jitter": 0.0}},
    "gshard": {"top_k": 2, "gate": {"name": "gshard", "random_second": False}},
}
Shape = tuple[int, int, int]  # model width, experts' width, experts
SHAPE, SEQUENCE = (2048, 2048, 16), 1024
WAYS = ("ours", "capacity 1", "einsum", "einsum groups")
BALANCE = 0.01
COLUMNS = (
    "gate",
    "batch",
    *(f"{way} ms" for way in WAYS),
    "einsum over ours",
    "the paper, over DeepSpeed-MoE",
)
PAPER = {("switch", 32): "8.1"}


def build(gate: str, shape: Shape, capacity: Any = None) -> MoELayer:
    """A layer of our own; equal arguments but for the capacity draw equal weights."""
    width, hidden, experts = shape
    config = MoEConfig(
        num_experts=experts,
        expert_hidden_size=hidden,
        activation="gelu",
        loss={"balance": BALANCE},
        capacity=capacity,
        **GATES[gate],
    )
    return MoELayer(width, config, device=DEVICE, dtype=DTYPE)


def by_einsum(layer: MoELayer, x_TD: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """y_TD and the balance loss of a layer's weights, by GShard's way."""
    experts = layer.experts
    return einsum_layer(
        x_TD, layer.gate.weight_ED, experts.w1_EFD, experts.w2_EDF, top_k=layer.config.top_k, groups=groups
    )  # fmt: skip


def step(layer: MoELayer, x_TD: Tensor, dy_TD: Tensor, groups: int = 0) -> None:
    """Forward and backward, by GShard's way where there are groups; the gradients stay."""
    for leaf in (x_TD, *layer.parameters()):
        leaf.grad = None
    if groups:
        y_TD, balance = by_einsum(layer, x_TD, groups)
        torch.autograd.backward([y_TD, BALANCE * balance], [dy_TD, torch.ones_like(balance)])
    else:
        layer(x_TD).backward(dy_TD)


def steps_of(gate: str, shape: Shape, x_TD: Tensor, dy_TD: Tensor, sequences: int) -> dict[str, Callable[[], None]]:
    """A step of each way."""
    layer = build(gate, shape)
    return {
        "ours": partial(step, layer, x_TD, dy_TD),
        "capacity 1": partial(step, build(gate, shape, 1.0), x_TD, dy_TD),
        "einsum": partial(step, layer, x_TD, dy_TD, 1),
        "einsum groups": partial(step, layer, x_TD, dy_TD, sequences),
    }


def rows_of(batches: list[int], shape: Shape = SHAPE, sequence: int = SEQUENCE, rounds: int = 7) -> list[list[str]]:
    """The table; a way that needs more memory than there is has none of its time."""
    rows = []
    for gate in GATES:
        for batch in batches:
            x_TD = torch.randn(batch * sequence, shape[0], device=DEVICE, dtype=DTYPE, requires_grad=True)
            dy_TD = torch.randn_like(x_TD)
            times: dict[str, float] = {}
            for way, run in steps_of(gate, shape, x_TD, dy_TD, batch).items():
                with contextlib.suppress(torch.OutOfMemoryError):
                    times[way] = queued_ms(run, DEVICE, rounds)
                if DEVICE.type == "cuda":
                    torch.cuda.empty_cache()
            shown = [f"{times[way]:.3f}" if way in times else "out of memory" for way in WAYS]
            over = f"{times['einsum'] / times['ours']:.2f}" if "einsum" in times else ""
            rows.append([gate, str(batch), *shown, over, PAPER.get((gate, batch), "")])
    return rows


def main() -> None:
    """Runs from the command line; see the text at the top."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 16, 32, 64, 128])
    arguments = parser.parse_args()
    torch.manual_seed(0)
    print(header(), flush=True)
    print_table(COLUMNS, rows_of(arguments.batches))


if __name__ == "__main__":
    main()
