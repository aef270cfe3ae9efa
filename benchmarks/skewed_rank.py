"""The choices of a skewed router, and one rank of many on one device: what all ranks' tokens send there.

All ranks do as this one: each sends it what it sends itself. Messages are copies, of as many bytes as it would receive,
so that memory is that of the rank in a whole group. What experts elsewhere would compute comes back as zeros.

Shapes: T tokens of a rank, K choices, E experts, P ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foundry_moe.parallel.all_to_all import FlatAllToAll, Handle, HostCopy, Splits


def choices_of(
    tokens: int, experts: int, top_k: int, ranks: int, skew: float, device: torch.device | str = "cpu"
) -> Tensor:
    """Different experts for each token; the first rank's get `skew` times an even share of the choices."""
    local = experts // ranks
    score_TE = torch.rand(tokens, experts, device=device)
    crowded_T = torch.rand(tokens, device=device) < (skew - 1) / (ranks - 1)
    score_TE[:, :local] += crowded_T[:, None].float()  # such a token chooses among the first rank's experts alone
    return score_TE.topk(top_k).indices


def zipf_choices_of(
    tokens: int, experts: int, top_k: int, exponent: float, device: torch.device | str = "cpu"
) -> Tensor:
    """Different experts for each token: drawn by weights i ** -exponent, which stand in an order of their own."""
    weight_E = torch.arange(1, experts + 1, device=device) ** -exponent
    order_E = torch.randperm(experts, generator=torch.Generator().manual_seed(1)).to(device)  # the same on all ranks
    return torch.multinomial(weight_E[order_E].expand(tokens, -1), top_k)


class MirroredAllToAll(FlatAllToAll):
    """Of the first of P ranks that all send the same numbers of rows."""

    def __init__(self, ranks: int) -> None:
        self.size, self.rank = ranks, 0

    def exchange_counts(self, counts_PH2: Tensor) -> HostCopy:
        return HostCopy(counts_PH2.expand(self.size, *counts_PH2.shape).contiguous())

    def largest(self, number: int, device: torch.device) -> int:
        return number

    def send(self, rows_SD: Tensor, splits: Splits) -> Handle:
        mine = splits.stages[0][0][0]
        return Handle(rows_SD[:mine].repeat(self.size, 1), lambda: None, rows_SD)

    def send_back(self, rows_QD: Tensor, splits: Splits, into: Tensor | None = None) -> Handle:
        mine = splits.stages[0][0][0]
        into = rows_QD.new_empty(splits.sent, *rows_QD.shape[1:]) if into is None else into
        into[:mine], into[mine:] = rows_QD[:mine], 0
        return Handle(into, lambda: None, rows_QD)
