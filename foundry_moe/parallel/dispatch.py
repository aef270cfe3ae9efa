"""Dropless expert parallelism: a token goes once to each rank that holds an expert of its, and one result comes back.

A token with several experts on one rank travels once, and that rank sums their weighted outputs: with 64 experts
on 4 ranks and top-8, 2.7 rows a token leave a rank instead of 6. Moves tokens only: it must not know how experts
compute, nor how parameters are sharded.

Shapes: T tokens of this rank, K choices a token, E experts in all, P ranks of the expert group, e = E / P local
experts, C = min(P, K) ranks a token goes to at most, S rows sent, Q rows received, D model width.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from foundry_moe.ops.routes import Routes, combine, permute, plan_routes
from foundry_moe.parallel.exchange import Exchange, give_back, send


class RoutedExperts(Protocol):
    """What this module asks of experts: y_QD from tokens, combine weights and routes to the local ones."""

    def __call__(self, x_QD: Tensor, weights_QK: Tensor, routes: Routes) -> Tensor: ...


def destinations(experts_TK: Tensor, local_experts: int, ranks: int) -> Tensor:
    """The ranks that each token goes to, each once: int64 [T, C], -1 = none.

    Args:
        experts_TK: -1 = no choice.
    """
    rank_TK = torch.div(experts_TK.long(), local_experts, rounding_mode="floor")  # -1 stays -1
    if ranks <= experts_TK.shape[1]:
        none_TK = torch.where(rank_TK < 0, ranks, rank_TK)
        wanted_TP = torch.zeros(rank_TK.shape[0], ranks + 1, dtype=torch.bool, device=rank_TK.device)
        wanted_TP.scatter_(1, none_TK, True)
        return torch.where(wanted_TP[:, :ranks], torch.arange(ranks, device=rank_TK.device), -1)
    same_TKK = (rank_TK[:, :, None] == rank_TK[:, None, :]).tril(diagonal=-1)
    return torch.where(same_TKK.any(-1), -1, rank_TK)


def _count_units(experts_TK: Tensor, local_experts: int, ranks: int) -> Tensor:
    """Choices of each rank's experts, int64 [P]."""
    rank_A = torch.div(experts_TK.long(), local_experts, rounding_mode="floor").reshape(-1)
    bins_A = torch.where(rank_A < 0, ranks, rank_A)
    counts = torch.zeros(ranks + 1, dtype=torch.int64, device=rank_A.device)
    return counts.scatter_add_(0, bins_A, torch.ones_like(bins_A))[:ranks]


class ExpertDispatch:
    """A `dispatch` for MoE layers whose experts are divided over the ranks of a group, in rank order.

    One host synchronisation a call: how many rows come and go. Ranks without tokens, and experts without any,
    take part with nothing.
    """

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        # sizes are read on the host and collectives fill buffers in place: a compiled block breaks here
        self._run = torch.compiler.disable(self._dispatch)

    def __call__(
        self,
        x_TD: Tensor,
        weights_TK: Tensor,
        experts_TK: Tensor,
        num_experts: int,
        experts: RoutedExperts,
        rows: int | None = None,
    ) -> Tensor:
        """y_TD. Arguments as in `foundry_moe.layers.moe.Dispatch`; `rows` is not needed, it learns more."""
        return self._run(x_TD, weights_TK, experts_TK, num_experts, experts)

    def _dispatch(
        self, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, num_experts: int, experts: RoutedExperts
    ) -> Tensor:
        ranks = self.exchange.size
        local_experts = num_experts // ranks
        assert local_experts * ranks == num_experts
        if torch.is_autocast_enabled(x_TD.device.type):
            x_TD = x_TD.to(torch.get_autocast_dtype(x_TD.device.type))  # as the experts would: half the bytes to send
        target_TC = destinations(experts_TK, local_experts, ranks)
        units_P = _count_units(experts_TK, local_experts, ranks)
        if self.exchange.slots is not None:
            slots_P = torch.tensor(self.exchange.slots, device=target_TC.device)
            target_TC = torch.where(target_TC < 0, -1, slots_P[target_TC.clamp(min=0)])
            units_P = torch.empty_like(units_P).index_copy_(0, slots_P, units_P)
        to_ranks = plan_routes(target_TC, ranks)
        splits = self.exchange.agree(torch.stack([to_ranks.tokens_per_expert_E.long(), units_P], dim=1))
        to_ranks = trim(to_ranks, splits.sent)

        x_QD = send(permute(x_TD, to_ranks), self.exchange, splits)
        choices = experts_TK.shape[1]
        # expert numbers below 2^24 are exact in fp32, so they travel with the weights as one message
        pairs_TK2 = torch.cat([weights_TK, experts_TK.to(weights_TK.dtype)], dim=1)
        pairs_QK2 = send(permute(pairs_TK2, to_ranks), self.exchange, splits)
        weights_QK, experts_QK = pairs_QK2.split(choices, dim=1)

        first = self.exchange.rank * local_experts
        local_QK = experts_QK.detach().int() - first
        mine_QK = (local_QK >= 0) & (local_QK < local_experts)
        to_experts = plan_routes(torch.where(mine_QK, local_QK, -1), local_experts)
        y_QD = experts(x_QD, weights_QK, trim(to_experts, splits.received_units))
        return combine(give_back(y_QD, self.exchange, splits), None, to_ranks)


def trim(routes: Routes, rows: int) -> Routes:
    """The same routes without the rows past the end, once the host knows how many are used."""
    return replace(routes, source_R=routes.source_R[:rows])
