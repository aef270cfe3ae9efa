"""The token dispatcher whose rows travel by all-to-all: see `expert_dispatcher.py`.

Moves tokens only: it must not know how experts compute, nor how parameters are sharded.

Shapes: T tokens of this rank, P ranks of the expert group, C ranks a token goes to at most, H chunks, S rows sent,
Q rows received of a chunk, D model width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from foundry_moe.ops.dispatch_plan import DispatchPlan, gather_rows, sum_rows
from foundry_moe.parallel.all_to_all import AllToAll, Handle, Splits
from foundry_moe.parallel.expert_dispatcher import ExpertDispatcher, Sent


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


class _Call:
    """Tokens are copied to their rows while ranks learn from each other how many these are."""

    def __init__(self, all_to_all: AllToAll, plan: DispatchPlan, x_TD: Tensor) -> None:
        self._all_to_all = all_to_all
        self._counts = all_to_all.exchange_counts(plan.counts_P2[:, None])
        self._row_TC, self._packed = plan.assign_rows()
        # as many rows as there could be: how many there are, the host learns while the device copies
        self._rows_SD = gather_rows(x_TD, self._row_TC)

    def wait_for_counts(self) -> Tensor:
        return self._counts.wait()

    def send(self, counts_PPH2: Tensor) -> Sent:
        splits = self._all_to_all.splits(counts_PPH2)
        plan = _SendPlan(all_to_all=self._all_to_all, splits=splits, row_TC=self._row_TC)
        choices, tokens = _AllToAllMessages(plan), _AllToAllMessages(plan)
        for chunk in range(len(splits)):
            choices.send_rows(self._packed, chunk)
            tokens.send_rows(self._rows_SD, chunk)
        return Sent(choices, tokens, _AllToAllMessages(plan))

    def drop(self) -> None:
        pass


class AllToAllDispatcher(ExpertDispatcher):
    """See `ExpertDispatcher`."""

    def __init__(self, all_to_all: AllToAll, *, num_experts: int, buffer: float = math.inf) -> None:
        super().__init__(
            ranks=all_to_all.size,
            rank=all_to_all.rank,
            nodes=all_to_all.nodes,
            num_experts=num_experts,
            buffer=buffer,
        )
        self.all_to_all = all_to_all

    def _begin(self, plan: DispatchPlan, x_TD: Tensor, kept: bool) -> _Call:
        return _Call(self.all_to_all, plan, x_TD)

    def _largest(self, number: int, device: torch.device) -> int:
        return self.all_to_all.largest(number, device)
