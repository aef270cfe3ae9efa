"""Token dispatch over the ranks of an expert group, dropless, whatever way rows travel.

A token is sent once to each rank that has one of its experts. That rank sums the weighted outputs of its experts, and
one result comes back: with 64 experts on 4 ranks and top-8, a rank sends 2.7 rows a token instead of 6. Tokens may be
sent in chunks: then experts compute one chunk while the next one and the results of the one before travel.

All ranks learn how many rows each gets, from the message that tells each its own. Where one would get more than its
limit, all divide their tokens into rounds, which are calls of their own, one after the other.

Shapes: T tokens of this rank, K choices a token, E experts in all, P ranks of the expert group, e = E / P local
experts, H chunks, D model width.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from foundry_moe.layers.gates.gate import Choices
from foundry_moe.layers.token_dispatcher import Chunk, Rounds
from foundry_moe.ops.dispatch_plan import DispatchPlan, cut_tokens
from foundry_moe.parallel.messages import Messages, Way, combine


def as_sent(x_TD: Tensor, weights_TK: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens and combine weights in the types that they travel in.

    Under autocast tokens are cast as experts would: half the bytes. Experts' numbers travel as weights do, exact
    below 2^24.
    """
    if torch.is_autocast_enabled(x_TD.device.type):
        x_TD = x_TD.to(torch.get_autocast_dtype(x_TD.device.type))
    if weights_TK.dtype not in (torch.float32, torch.float64):
        weights_TK = weights_TK.float()
    return x_TD, weights_TK


class Sent(NamedTuple):
    """Of a call: choices and tokens, under way, and results, which are still to be sent."""

    choices: Messages
    tokens: Messages
    results: Messages


class Call(Protocol):
    """A call whose ranks tell each other how many rows they send."""

    def wait_for_counts(self) -> Tensor:
        """counts_PPH2, int64 on the host: rows and choices among them, [from][to][chunk]."""
        ...

    def send(self, counts_PPH2: Tensor) -> Sent:
        """Sends, if that has not begun yet."""
        ...

    def drop(self) -> None:
        """Sends nothing: what may have been sent already is not received."""
        ...


class ExpertDispatcher(ABC):
    """For an MoE layer whose experts are divided over the ranks of a group, in rank order.

    One host synchronisation a call: how many rows are sent and received. Ranks without tokens, and experts without
    any, take part with nothing.

    Args:
        ranks, rank: P, and which of them this is. nodes: of `DispatchPlan`.
        num_experts: E.
        buffer: a rank gets so many times the mean of all ranks' choices at once; more go in rounds.
    """

    def __init__(self, *, ranks: int, rank: int, nodes: int, num_experts: int, buffer: float = math.inf) -> None:
        assert num_experts % ranks == 0
        self.ranks, self.rank, self.nodes = ranks, rank, nodes
        self.local_experts = num_experts // ranks
        self.buffer = buffer

    # sizes are read on the host, and messages fill memory in place: a compiled block's graph breaks here
    @torch.compiler.disable
    def dispatch(self, x_TD: Tensor, choices: Choices) -> tuple[Chunk, ...]:
        """Sends tokens, and before them their choices, so that rows of local experts are planned while these travel."""
        x_TD, weights_TK = as_sent(x_TD, choices.weights_TK)
        return self._dispatch(x_TD, weights_TK, choices.experts_TK.contiguous(), self.buffer)

    @torch.compiler.disable
    def combine(self, outputs: tuple[Chunk, ...]) -> Tensor:
        """y_TD: each rank's sum for a token, summed."""
        return combine(outputs)

    def _dispatch(self, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, buffer: float) -> tuple[Chunk, ...]:
        kept = torch.is_grad_enabled()
        with torch.no_grad():
            plan = DispatchPlan(
                experts_TK,
                weights_TK,
                local_experts=self.local_experts,
                ranks=self.ranks,
                nodes=self.nodes,
            )
            call = self._begin(plan, x_TD, kept)
            counts_PPH2 = call.wait_for_counts()
            parts = self._rounds(counts_PPH2, experts_TK, buffer)
            if len(parts) > 1:
                call.drop()
                send = partial(self._send_round, experts_TK)
                rounds = Rounds(parts=parts, weights_TK=weights_TK, send=send, combine=combine)
                return (Chunk((x_TD, weights_TK[:0]), rounds),)
            sent = call.send(counts_PPH2)
        received_H = counts_PPH2[:, self.rank, :, 1].sum(0).tolist()
        way = Way(**sent._asdict(), received_choices=received_H, local_experts=self.local_experts)
        return way.chunks(weights_TK, x_TD)

    def _send_round(self, experts_TK: Tensor, tokens: slice, x_TD: Tensor, weights_TK: Tensor) -> tuple[Chunk, ...]:
        """Some tokens of a call. `x_TD`, `weights_TK`: of these; `experts_TK`: of all."""
        return self._dispatch(x_TD, weights_TK, experts_TK[tokens], math.inf)

    def _rounds(self, counts_PPH2: Tensor, experts_TK: Tensor, buffer: float) -> tuple[slice, ...]:
        """The tokens of each round, unless one will do; as many rounds on each rank.

        Of a rank's limit each sender may fill the share that it has of all that go there. So a round brings a rank
        as much as its limit, and K from each sender more at most, wherever in the batch the crowd is.
        """
        if buffer >= self.ranks:
            return ()
        received_P = counts_PPH2[..., 1].sum((0, 2))
        limit = buffer * int(received_P.sum()) / self.ranks
        if received_P.max() <= limit:
            return ()
        mine_P, top_k = counts_PPH2[self.rank, :, :, 1].sum(1).tolist(), experts_TK.shape[1]
        shares = {
            rank: max(math.ceil(limit * mine_P[rank] / received), top_k)
            for rank, received in enumerate(received_P.tolist())
            if received > limit
        }
        parts = cut_tokens(experts_TK, self.local_experts, shares)
        rounds, tokens = self._largest(len(parts), experts_TK.device), len(experts_TK)
        return (*parts, *[slice(tokens, tokens)] * (rounds - len(parts)))

    @abstractmethod
    def _begin(self, plan: DispatchPlan, x_TD: Tensor, kept: bool) -> Call:
        """Tells the ranks how many rows this one sends. `kept`: there will be a backward pass."""

    @abstractmethod
    def _largest(self, number: int, device: torch.device) -> int:
        """Of the ranks' numbers."""
