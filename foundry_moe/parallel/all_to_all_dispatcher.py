"""The token dispatcher of expert parallelism, dropless: a token is sent once to each rank that has one of its experts.

That rank sums the weighted outputs of its experts, and one result comes back: with 64 experts on 4 ranks and top-8,
a rank sends 2.7 rows a token instead of 6. Moves tokens only: it must not know how experts compute, nor how
parameters are sharded. Tokens may be sent in chunks: then experts compute one chunk while the next one and the results
of the one before travel.

Shapes: T tokens of this rank, K choices a token, E experts in all, P ranks of the expert group, e = E / P local
experts, C = min(P, K) ranks a token goes to at most, H chunks, S rows sent, Q rows received of a chunk, D model width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from foundry_moe.layers.gates.gate import Choices
from foundry_moe.layers.token_dispatcher import Chunk
from foundry_moe.ops.dispatch_plan import DispatchPlan, gather_rows, sum_rows
from foundry_moe.parallel.all_to_all import AllToAll, Handle, Splits
from foundry_moe.parallel.messages import Way, combine


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


@dataclass(frozen=True, kw_only=True)
class _SendPlan:
    """Where the rows of one call go: row_TC [T, C], -1 = none. Rows are sorted by chunk, then by rank."""

    all_to_all: AllToAll
    splits: tuple[Splits, ...]
    row_TC: Tensor

    @property
    def sent(self) -> int:
        return sum(splits.sent for splits in self.splits)

    def rows_of(self, rows_SD: Tensor, chunk: int) -> Tensor:
        end = list(accumulate(splits.sent for splits in self.splits))[chunk]
        return rows_SD[end - self.splits[chunk].sent : end]


class _AllToAllMessages:
    """Rows are gathered by rank, exchanged by an all-to-all for each chunk, and come back the same way."""

    def __init__(self, plan: _SendPlan) -> None:
        self.plan = plan
        self.chunks = len(plan.splits)
        self._handles: list[Handle | None] = [None] * self.chunks
        self._returned_SD: Tensor | None = None

    def send(self, x_TD: Tensor, *, backward: bool = False) -> None:
        rows_SD = gather_rows(x_TD, self.plan.row_TC, self.plan.sent)
        for chunk in reversed(range(self.chunks)) if backward else range(self.chunks):
            self.send_rows(rows_SD, chunk)

    def send_rows(self, rows_SD: Tensor, chunk: int) -> None:
        """Starts to send one chunk of rows that were gathered already."""
        rows_D = self.plan.rows_of(rows_SD, chunk)
        self._handles[chunk] = self.plan.all_to_all.send(rows_D, self.plan.splits[chunk])

    def send_back(self, rows_QD: Tensor, chunk: int) -> None:
        if self._returned_SD is None:
            self._returned_SD = rows_QD.new_empty(self.plan.sent, *rows_QD.shape[1:])
        into = self.plan.rows_of(self._returned_SD, chunk)
        self._handles[chunk] = self.plan.all_to_all.send_back(rows_QD, self.plan.splits[chunk], into)

    def wait(self, chunk: int) -> Tensor:
        handle, self._handles[chunk] = self._handles[chunk], None
        assert handle is not None, "no message is under way"
        return handle.wait()

    def wait_and_sum(self) -> Tensor:
        for chunk in range(self.chunks):
            self.wait(chunk)
        assert self._returned_SD is not None
        rows_SD, self._returned_SD = self._returned_SD, None
        return sum_rows(rows_SD, self.plan.row_TC)


class AllToAllDispatcher:
    """For an MoE layer whose experts are divided over the ranks of a group, in rank order.

    One host synchronisation a call: how many rows are sent and received; tokens are copied to their rows meanwhile.
    Ranks without tokens, and experts without any, take part with nothing.

    Args:
        num_experts: E.
        chunks: H, in how many parts tokens travel.
        buffer: experts compute so many times the rows of an even load at once (see `layers/rounds.py`).
    """

    def __init__(self, all_to_all: AllToAll, *, num_experts: int, chunks: int = 1, buffer: float = math.inf) -> None:
        assert num_experts % all_to_all.size == 0
        self.all_to_all = all_to_all
        self.local_experts = num_experts // all_to_all.size
        self.chunks = chunks
        self.buffer = buffer

    # sizes are read on the host and collectives fill buffers in place: a compiled block's graph breaks here
    @torch.compiler.disable
    def dispatch(self, x_TD: Tensor, choices: Choices) -> tuple[Chunk, ...]:
        """Sends tokens, and before them their choices, so that rows of local experts are planned while these travel."""
        x_TD, weights_TK = as_sent(x_TD, choices.weights_TK)
        with torch.no_grad():
            dispatch_plan = DispatchPlan(
                choices.experts_TK,
                weights_TK,
                local_experts=self.local_experts,
                ranks=self.all_to_all.size,
                nodes=self.all_to_all.nodes,
                chunks=self.chunks,
            )
            counts = self.all_to_all.exchange_counts(dispatch_plan.counts_2PH2)
            row_TC, packed = dispatch_plan.assign_rows()
            # as many rows as there could be: how many there are, the host learns while the device copies
            rows_SD = gather_rows(x_TD, row_TC)
            splits = self.all_to_all.wait_for_splits(counts)
        plan = _SendPlan(all_to_all=self.all_to_all, splits=splits, row_TC=row_TC)
        sent_choices, tokens = _AllToAllMessages(plan), _AllToAllMessages(plan)
        for chunk in range(self.chunks):
            sent_choices.send_rows(packed, chunk)
            tokens.send_rows(rows_SD, chunk)
        way = Way(
            choices=sent_choices,
            tokens=tokens,
            results=_AllToAllMessages(plan),
            received_choices=[part.received_choices for part in splits],
            local_experts=self.local_experts,
            num_tokens=row_TC.shape[0],
            ranks=self.all_to_all.size,
            buffer=self.buffer,
        )
        return way.chunks(weights_TK, x_TD)

    def combine(self, outputs: tuple[Chunk, ...]) -> Tensor:
        """y_TD: each rank's sum for a token, summed."""
        return combine(outputs)
