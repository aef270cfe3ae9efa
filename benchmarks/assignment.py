"""BASE's assignment of OLMoE's tokens on a GPU, on the kernels and in plain torch, and how good it is.

    python benchmarks/assignment.py

Scores are those of a Gaussian router (`router`), or of 2,000 token types by Zipf's law, so that many tokens are equal
(`text`). Given up is the value beside the auction of 64 rounds on the kernels, in deviations of the scores a token.

Shapes: T tokens, D router's rank, E experts.
"""

from __future__ import annotations

from unittest import mock

import torch
from timing import header, median_ms
from torch import Tensor

from foundry_moe.ops import assignment
from foundry_moe.ops.assignment import assign

TOKENS, EXPERTS = 16_384, 64


def scores() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    w_ED = torch.randn(EXPERTS, 32, generator=generator)
    types = torch.multinomial(1 / torch.arange(1.0, 2001.0), TOKENS, replacement=True, generator=generator)
    return {
        "router": torch.randn(TOKENS, 32, generator=generator) @ w_ED.T,
        "text": (torch.randn(2000, 32, generator=generator) @ w_ED.T)[types],
    }


def measure(scores_TE: Tensor, rounds: int) -> tuple[float, float]:
    """Milliseconds, and the value of the assignment, in deviations of the scores a token."""
    expert_T = assign(scores_TE, rounds=rounds)
    deviation = (scores_TE - scores_TE.mean(1, keepdim=True)).square().mean().sqrt()
    value = scores_TE.gather(1, expert_T[:, None]).mean() / deviation
    return median_ms(lambda: assign(scores_TE, rounds=rounds)), value.item()


def main() -> None:
    print(header())
    print("| scores | rounds | kernels, ms | plain torch, ms | ratio | given up: kernels | plain torch |")
    print("|---|---|---|---|---|---|---|")
    for kind, scores_TE in scores().items():
        scores_TE = scores_TE.cuda()
        best = measure(scores_TE, 64)[1]
        for rounds in (16, 64):
            ms, value = measure(scores_TE, rounds)
            with mock.patch.object(assignment, "kernels", assignment.Plain):
                torch_ms, torch_value = measure(scores_TE, rounds)
            print(
                f"| {kind} | {rounds} | {ms:.2f} | {torch_ms:.2f} | {torch_ms / ms:.1f} | {best - value:.5f} | "
                f"{best - torch_value:.5f} |"
            )


if __name__ == "__main__":
    main()
