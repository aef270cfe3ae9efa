"""A layer of experts with LoRA adapters beside the same layer trained in full, forward and backward.

    python benchmarks/lora.py [--cases OLMoE,Qwen3,Mixtral] [--rank 16] [--profile]

`formed` adds B A to all experts' weights in each forward pass, as peft does, and so computes dense gradients of them.
The floor is 0.80 of full fine-tuning.

Shapes: T tokens, K choices, D model width, F expert width, E experts, L rank.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))
from layer import CASES, Way, new, peak_bytes, profile, routed
from timing import header, in_turn_ms

from foundry_moe.ops import expert_mlp, plan_permute
from foundry_moe.ops.lora import Adapter, Adapters
from foundry_moe.ops.softmax_topk import softmax_topk

SCALE = 2.0


def ways_of(case: str, rank: int) -> list[Way]:
    tokens, d, f, experts, k, _ = CASES[case]
    x, logits, dy = routed(tokens, d, experts, "uniform")
    weights = new(experts, f, d, scale=d**-0.5), new(experts, f, d, scale=d**-0.5), new(experts, d, f, scale=f**-0.5)
    frozen = [weight.detach() for weight in weights]

    def factor(rows: int) -> Tensor:
        return (0.01 * torch.randn(experts, rows, rank, device="cuda")).requires_grad_()

    pairs = [Adapter(factor(d), factor(f)), Adapter(factor(d), factor(f)), Adapter(factor(f), factor(d))]
    factors = [one for pair in pairs for one in pair]

    def compute(w1: Tensor, v1: Tensor, w2: Tensor, adapters: Adapters | None = None) -> Tensor:
        chosen = softmax_topk(logits, k, normalize=True, statistics=False)
        plan = plan_permute(chosen.experts_TK, experts)
        return expert_mlp(
            x, chosen.weights_TK, plan, w1, v1, w2, activation="silu", backend="blocksparse", adapters=adapters
        )

    def formed() -> Tensor:
        sums = [w + SCALE * (pair.b_ENL @ pair.a_EKL.mT).to(w.dtype) for w, pair in zip(frozen, pairs, strict=True)]
        return compute(*sums)

    return [
        Way(name="full", function=partial(compute, *weights), leaves=[x, logits, *weights], dy=dy),
        Way(
            name="lora",
            function=partial(compute, *frozen, adapters=Adapters(*pairs, scale=SCALE)),
            leaves=[x, logits, *factors],
            dy=dy,
        ),
        Way(name="formed", function=formed, leaves=[x, logits, *factors], dy=dy),
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", default="OLMoE,Qwen3,Mixtral")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    print(header())
    print("| case | | ms | over full | peak MB |")
    print("|---" * 5 + "|")
    for case in arguments.cases.split(","):
        ways = ways_of(case, arguments.rank)
        peaks = [peak_bytes(way) for way in ways]
        times = in_turn_ms([way.step for way in ways], arguments.repeats)
        for way, ms, peak in zip(ways, times, peaks, strict=True):
            print(f"| {case} | {way.name} | {ms:.2f} | {ms / times[0]:.2f} | {peak / 1e6:.0f} |", flush=True)
        if arguments.profile:
            profile(ways[1])
        del ways
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
