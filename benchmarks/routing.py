"""Top-k, planning, permute and un-permute beside torch's and beside copy bandwidth: `python benchmarks/routing.py`.

Shapes: T tokens, K choices, R rows, D model width, E experts.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from foundry_moe_kernels import permutation, routing
from foundry_moe_kernels.topk import topk
from timing import copy_tb_per_s, geometric_mean, header, median_ms


def graph_ms(run) -> float:  # type: ignore[no-untyped-def]
    """Milliseconds of one call among 20 replayed as one graph: kernels alone, without the host's launches."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(20):
            run()
    return median_ms(graph.replay) / 20


def main() -> None:
    torch.manual_seed(0)
    print(header())
    copy = copy_tb_per_s()
    print("| top-k + softmax | torch us | ours us | speed |\n|---|---|---|---|")
    ratios = []
    for experts in (64, 128, 256):
        for k in (1, 2, 4, 8):
            logits = torch.randn(65536, experts, device="cuda")

            def theirs(logits=logits, k=k):  # type: ignore[no-untyped-def]
                values, chosen = torch.topk(logits, k)
                return torch.softmax(values, -1), chosen

            base, ours = graph_ms(theirs), graph_ms(lambda: topk(logits, k, softmax="chosen"))  # noqa: B023
            ratios.append(base / ours)
            print(
                f"| T 65536 E {experts} k {k} | {base * 1e3:.0f} | {ours * 1e3:.0f} | {base / ours:.2f} |", flush=True
            )
    print(f"top-k geometric mean {geometric_mean(ratios):.2f}, min {min(ratios):.2f}\n")
    print("| | ms | TB/s | of copy | torch ms |\n|---|---|---|---|---|")
    for name, tokens, d, k, experts in (
        ("OLMoE", 16384, 2048, 8, 64), ("Mixtral", 65536, 4096, 2, 8), ("XS top-1", 262144, 512, 1, 64),
    ):  # fmt: skip
        x = torch.randn(tokens, d, device="cuda", dtype=torch.bfloat16)
        experts_TK = torch.rand(tokens, experts, device="cuda").topk(k).indices
        _, _, offsets_E, source_R, row_TK = routing.plan(experts_TK, experts)
        weights = torch.rand(tokens, k, device="cuda")
        y = permutation.permute(x, row_TK, offsets_E)
        token_R = (source_R // k).long()
        moved = 2 * d * (tokens + tokens * k)
        cases = {
            "permute": (lambda: permutation.permute(x, row_TK, offsets_E, zero_tail=False), lambda: x[token_R], moved),
            "un-permute": (
                lambda: permutation.combine(y, weights, row_TK),
                lambda: torch.zeros_like(x).index_add_(0, token_R, (y * weights.flatten()[source_R.long(), None].bfloat16())),
                moved,
            ),
            "un-permute backward": (
                lambda: permutation.combine_backward(x, y, weights, row_TK, offsets_E), None, moved + 2 * d * tokens * k,
            ),
        }  # fmt: skip
        for label, (run, base_run, size) in cases.items():
            ms = graph_ms(run)
            base = f"{graph_ms(base_run):.3f}" if base_run else ""
            print(
                f"| {name} {label} | {ms:.3f} | {size / ms / 1e9:.2f} | {size / ms / 1e9 / copy:.2f} | {base} |",
                flush=True,
            )
        plan_ms = graph_ms(lambda: routing.plan(experts_TK, experts))  # noqa: B023
        sort_ms = graph_ms(lambda: torch.sort(experts_TK.flatten(), stable=True))  # noqa: B023
        print(f"| {name} plan | {plan_ms:.3f} | | | {sort_ms:.3f} (its sort alone) |", flush=True)


if __name__ == "__main__":
    main()
