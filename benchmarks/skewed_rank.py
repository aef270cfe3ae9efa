"""The choices of a skewed gate, and one rank of many on one device: what all ranks' tokens send there.

All ranks do as this one: each sends it what it sends itself. Messages are copies, of as many bytes as it would receive,
so that memory is that of the rank in a whole group. What experts elsewhere would compute comes back as zeros.

Shapes: T tokens of a rank, K choices, E experts, P ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from foundry_moe.parallel.all_to_all import AllToAllDispatcher, Exchange


def choices_of(
    tokens: int, experts: int, top_k: int, ranks: int, skew: float, device: torch.device | str = "cpu"
) -> Tensor:
    """Different experts for each token; the first rank's get `skew` times an even share of the choices."""
    local = experts // ranks
    score_TE = torch.rand(tokens, experts, device=device)
    crowded_T = torch.rand(tokens, device=device) < (skew - 1) / (ranks - 1)
    score_TE[:, :local] += crowded_T[:, None].float()  # such a token chooses among the first rank's experts alone
    return score_TE.topk(top_k).indices


class MirroredDispatcher(AllToAllDispatcher):
    """Of the first of P ranks that all send the same numbers of rows."""

    def __init__(self, ranks: int, *, num_experts: int, buffer: float = math.inf) -> None:
        self.groups, self.ranks, self.ranks_per_node, self.nodes, self.rank = (), ranks, ranks, 1, 0
        self.local_experts, self.buffer = num_experts // ranks, buffer
        self.once = lambda key, compute: compute()

    def gather_counts(self, counts_P2: Tensor) -> Callable[[], Tensor]:
        counts_PP2 = counts_P2.expand(self.ranks, *counts_P2.shape)
        return lambda: counts_PP2.cpu()

    def largest(self, number: int, device: torch.device) -> int:
        return number

    def start(self, rows: Tensor, exchange: Exchange, *, back: bool) -> Callable[[], Tensor]:
        mine = exchange.stages[0][0][0]
        if back:
            received = rows.new_zeros(exchange.sent, *rows.shape[1:])
            received[:mine] = rows[:mine]
        else:
            received = rows[:mine].repeat(self.ranks, 1)

        def wait(outlives_the_message: Tensor = rows) -> Tensor:
            return received

        return wait
