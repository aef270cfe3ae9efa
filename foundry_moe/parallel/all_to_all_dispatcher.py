"""The token dispatcher of expert parallelism, dropless: a token is sent once to each rank that has one of its experts.

That rank sums the weighted outputs of its experts, and one result comes back: with 64 experts on 4 ranks and top-8,
a rank sends 2.7 rows a token instead of 6. Moves tokens only: it must not know how experts compute, nor how
parameters are sharded.

Messages are started by one node of the autograd graph and waited for by a later one, so that what stands between
them overlaps with the message: forward, and, since autograd goes the other way, backward. Tokens may be sent in
chunks: then experts compute one chunk while the next one and the results of the one before travel.

Shapes: T tokens of this rank, K choices a token, E experts in all, P ranks of the expert group, e = E / P local
experts, C = min(P, K) ranks a token goes to at most, H chunks, S rows sent, Q rows received of a chunk, D model width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from foundry_moe.layers.gates.gate import Choices
from foundry_moe.layers.token_dispatcher import Chunk, ExpertInput
from foundry_moe.ops.dispatch_plan import DispatchPlan, gather_rows, sum_rows
from foundry_moe.ops.permute import plan_permute
from foundry_moe.parallel.all_to_all import AllToAll, Handle, Splits


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


class _Messages:
    """One kind of message of a call, forward or backward: a handle for each chunk under way."""

    def __init__(self, plan: _SendPlan) -> None:
        self.plan = plan
        self._handles: list[Handle | None] = [None] * len(plan.splits)
        self._returned_SD: Tensor | None = None

    def send(self, rows_SD: Tensor, chunk: int) -> None:
        """Starts to send a chunk of rows to the ranks of its experts."""
        rows_D = self.plan.rows_of(rows_SD, chunk)
        self._handles[chunk] = self.plan.all_to_all.send(rows_D, self.plan.splits[chunk])

    def send_back(self, rows_QD: Tensor, chunk: int) -> None:
        """Starts to send rows of a chunk back to the ranks that they came from."""
        if self._returned_SD is None:
            self._returned_SD = rows_QD.new_empty(self.plan.sent, *rows_QD.shape[1:])
        into = self.plan.rows_of(self._returned_SD, chunk)
        self._handles[chunk] = self.plan.all_to_all.send_back(rows_QD, self.plan.splits[chunk], into)

    def wait(self, chunk: int) -> Tensor:
        """The rows of one chunk, once they are here."""
        handle, self._handles[chunk] = self._handles[chunk], None
        assert handle is not None, "no message is under way"
        return handle.wait()

    def wait_and_sum(self) -> Tensor:
        """Waits for all chunks that were sent back, and sums each token's rows."""
        for chunk in range(len(self._handles)):
            self.wait(chunk)
        assert self._returned_SD is not None
        rows_SD, self._returned_SD = self._returned_SD, None
        return sum_rows(rows_SD, self.plan.row_TC)


# A link is an empty tensor: an edge of the graph from the node that starts a message to the one that waits for it.


class _Send(torch.autograd.Function):
    """Rows are on their way: a link for each chunk. Backward: waits for gradients, sums each token's."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, messages: _Messages) -> tuple[Tensor, ...]:
        ctx.messages = messages
        return tuple(x_TD.new_empty(0) for _ in messages.plan.splits)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.messages.wait_and_sum(), None


class _Receive(torch.autograd.Function):
    """Waits for a chunk of rows: x_QD. Backward: starts to send gradients back."""

    @staticmethod
    def forward(ctx: Any, link: Tensor, messages: _Messages, chunk: int) -> Tensor:
        ctx.messages, ctx.chunk = messages, chunk
        return messages.wait(chunk)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.messages.send_back(grads[0], ctx.chunk)
        return grads[0].new_empty(0), None, None


class _ReceiveChoices(torch.autograd.Function):
    """Waits for what travels beside rows: weights_QK, and local experts (int32), which have no gradient."""

    @staticmethod
    def forward(ctx: Any, link: Tensor, messages: _Messages, chunk: int) -> tuple[Tensor, Tensor]:
        ctx.messages, ctx.chunk = messages, chunk
        weights_QK, local_QK = messages.wait(chunk).chunk(2, dim=1)
        local_QK = local_QK.int()
        ctx.mark_non_differentiable(local_QK)
        return weights_QK.contiguous(), local_QK

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.messages.send_back(grads[0], ctx.chunk)
        return grads[0].new_empty(0), None, None


class _SendBack(torch.autograd.Function):
    """Starts to send a chunk of results back: a link. Backward: waits for their gradients."""

    @staticmethod
    def forward(ctx: Any, y_QD: Tensor, messages: _Messages, chunk: int) -> Tensor:
        ctx.messages, ctx.chunk = messages, chunk
        messages.send_back(y_QD, chunk)
        return y_QD.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.messages.wait(ctx.chunk), None, None


class _Combine(torch.autograd.Function):
    """Waits for results and sums each token's: y_TD. Backward: copies gradients to rows and starts to send them."""

    @staticmethod
    def forward(ctx: Any, messages: _Messages, *links: Tensor) -> Tensor:
        ctx.messages = messages
        return messages.wait_and_sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        plan = ctx.messages.plan
        rows_SD = gather_rows(grads[0], plan.row_TC, plan.sent)
        for chunk in reversed(range(len(plan.splits))):  # autograd comes to the last one first
            ctx.messages.send(rows_SD, chunk)
        return None, *(grads[0].new_empty(0) for _ in plan.splits)


@dataclass(frozen=True, kw_only=True)
class _Transport:
    """The way of one chunk: three messages, of which the first two are under way."""

    chunk: int
    choices: _Messages
    tokens: _Messages
    results: _Messages
    local_experts: int
    buffer: float

    def _most_rows(self, received: int, choices: int) -> int:
        """`buffer` times the rows of an even load. A rank with fewer tokens than others counts as many as it got."""
        plan = self.choices.plan
        tokens = max(plan.row_TC.shape[0] / len(plan.splits), received / plan.all_to_all.size)
        return max(math.ceil(min(self.buffer, plan.all_to_all.size) * tokens * choices), choices)

    def receive(self, *tensors: Tensor) -> ExpertInput:
        choices_link, tokens_link = tensors
        weights_QK, local_QK = _ReceiveChoices.apply(choices_link, self.choices, self.chunk)
        used = self.choices.plan.splits[self.chunk].received_choices
        rows_plan = plan_permute(local_QK, self.local_experts, used)  # while tokens travel
        x_QD = _Receive.apply(tokens_link, self.tokens, self.chunk)
        return ExpertInput(x_QD, weights_QK, rows_plan, self._most_rows(*local_QK.shape))

    def send_back(self, y_QD: Tensor) -> Tensor:
        return _SendBack.apply(y_QD, self.results, self.chunk)


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
        weights_TK = choices.weights_TK
        if torch.is_autocast_enabled(x_TD.device.type):
            x_TD = x_TD.to(torch.get_autocast_dtype(x_TD.device.type))  # as the experts would: half the bytes to send
        if weights_TK.dtype not in (torch.float32, torch.float64):
            weights_TK = weights_TK.float()  # experts' numbers travel with them, as exact below 2^24
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
        sent_choices, tokens, results = _Messages(plan), _Messages(plan), _Messages(plan)
        for chunk in range(self.chunks):
            sent_choices.send(packed, chunk)
            tokens.send(rows_SD, chunk)
        del packed, rows_SD
        links = zip(_Send.apply(weights_TK, sent_choices), _Send.apply(x_TD, tokens), strict=True)
        ways = [
            _Transport(
                chunk=chunk,
                choices=sent_choices,
                tokens=tokens,
                results=results,
                local_experts=self.local_experts,
                buffer=self.buffer,
            )
            for chunk in range(self.chunks)
        ]
        return tuple(Chunk(pair, way) for pair, way in zip(links, ways, strict=True))

    @torch.compiler.disable
    def combine(self, outputs: tuple[Chunk, ...]) -> Tensor:
        """y_TD: each rank's sum for a token, summed."""
        transport = outputs[0].transport
        assert isinstance(transport, _Transport)
        return _Combine.apply(transport.results, *(output.tensors[0] for output in outputs))
