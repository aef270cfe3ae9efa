"""Top-k, planning, permute and un-permute beside torch's and beside copy bandwidth: `python benchmarks/routing.py`.

Shapes: T tokens, K choices, R rows, D model width, E experts.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from foundry_moe_kernels import permute, permute_plan
from foundry_moe_kernels.softmax_topk import Rule, softmax_topk
from timing import copy_tb_per_s, geometric_mean, header, median_ms


def graph_ms(run: Callable[[], object]) -> float:
    """Milliseconds of one call among 20 replayed as one graph: kernels alone, without the host's launches."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(20):
            run()
    return median_ms(graph.replay) / 20


def report_topk() -> None:
    print("| top-k + softmax | torch us | ours us | speed |\n|---|---|---|---|")
    ratios = []
    for experts, k in itertools.product((64, 128, 256), (1, 2, 4, 8)):
        logits = torch.randn(65536, experts, device="cuda")
        theirs = graph_ms(lambda: torch.softmax(torch.topk(logits, k)[0], -1))  # noqa: B023
        rule = Rule(k, normalize=True, statistics=False)
        ours = graph_ms(lambda: softmax_topk(logits, rule, None, None))  # noqa: B023
        ratios.append(theirs / ours)
        print(
            f"| T 65536 E {experts} k {k} | {theirs * 1e3:.0f} | {ours * 1e3:.0f} | {theirs / ours:.2f} |", flush=True
        )
    print(f"top-k geometric mean {geometric_mean(ratios):.2f}, min {min(ratios):.2f}\n")


def report_permutation(name: str, tokens: int, d: int, k: int, experts: int, copy: float) -> None:
    """Bytes that must move: each token read or written once, each row once (twice where outputs are read too)."""
    x = torch.randn(tokens, d, device="cuda", dtype=torch.bfloat16)
    experts_TK = torch.rand(tokens, experts, device="cuda").topk(k).indices
    _, _, offsets_E, source_R, row_TK = permute_plan.plan_permute(experts_TK, experts)
    weights = torch.rand(tokens, k, device="cuda")
    weight_R1 = weights.flatten()[source_R.long(), None].bfloat16()
    y = permute.permute(x, row_TK, offsets_E)
    token_R = (source_R // k).long()
    moved = 2 * d * (tokens + tokens * k)
    lines = [
        ("permute", moved, lambda: permute.permute(x, row_TK, None), lambda: x[token_R]),
        (
            "un-permute",
            moved,
            lambda: permute.unpermute(y, weights, row_TK),
            lambda: torch.zeros_like(x).index_add_(0, token_R, y * weight_R1),
        ),
        (
            "un-permute backward",
            moved + 2 * d * tokens * k,
            lambda: permute.unpermute_backward(x, y, weights, row_TK, offsets_E),
            None,
        ),
    ]
    for label, size, run, base in lines:
        ms = graph_ms(run)
        theirs = f"{graph_ms(base):.3f}" if base else ""
        rate = size / ms / 1e9
        print(f"| {name} {label} | {ms:.3f} | {rate:.2f} | {rate / copy:.2f} | {theirs} |", flush=True)
    plan_ms = graph_ms(lambda: permute_plan.plan_permute(experts_TK, experts))
    sort_ms = graph_ms(lambda: torch.sort(experts_TK.flatten(), stable=True))
    print(f"| {name} plan | {plan_ms:.3f} | | | {sort_ms:.3f} (its sort alone) |", flush=True)


def main() -> None:
    torch.manual_seed(0)
    print(header())
    report_topk()
    copy = copy_tb_per_s()
    print("| | ms | TB/s | of copy | torch ms |\n|---|---|---|---|---|")
    report_permutation("OLMoE", 16384, 2048, 8, 64, copy)
    report_permutation("Mixtral", 65536, 4096, 2, 8, copy)
    report_permutation("XS top-1", 262144, 512, 1, 64, copy)


if __name__ == "__main__":
    main()
