"""Token dispatch by all-to-all over an expert group. Drops no token. Independent of experts' weights and FSDP2.

A token is sent once to each rank that has one of its experts; that rank sums the weighted outputs of its experts, and
one row comes back: with 64 experts on 4 ranks and top-8, a token leaves as 2.7 rows instead of 6.

Every message is started by one autograd node and waited for by a later one, so what runs in between overlaps with it:
forward, and, since autograd runs the nodes in reverse, backward. torch's functional collectives would need no nodes of
ours, but the backward pass of `all_to_all_single_autograd` (torch 2.7 to 2.11) waits as soon as it has started: the
gradients of results would no longer travel while the shared expert's backward pass runs.

The exchange is flat (one all-to-all of all ranks) or hierarchical: within a node to the rank with the destination's
index, then between the ranks of one index on all nodes. A message between nodes is then L times as long, and there are
L times fewer: 2DH of Tutel (Hwang et al. 2022, arXiv 2206.03382, section 4.3), the balanced form of HetuMoE's gather,
exchange and scatter (Nie et al. 2022, arXiv 2203.14685, section 3.2). Both deliver the same rows in the same order.

Shapes: T tokens of this rank, K choices per token, D width; P ranks = N nodes x L ranks per node; C = min(P, K) ranks
a token is sent to at most; S rows sent, Q rows received.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from foundry_moe.layers.dispatch import Dispatched, Dispatcher, Parts
from foundry_moe.layers.gates.gate import Choices
from foundry_moe.ops.dispatch_plan import gather_rows, plan_dispatch, plan_rounds, sum_rows
from foundry_moe.ops.permute import plan_permute
from foundry_moe.parallel.collectives import all_to_all, side_stream
from foundry_moe.parallel.expected_counts import Sizes

Splits = tuple[list[int], list[int]]  # rows to each rank of a group, and rows from each
CHOICES, TOKENS, RESULTS = "choices", "tokens", "results"  # the messages of a dispatch, in the order they are sent


Once = Callable[[Hashable, Callable[[], Any]], Any]


def _compute(_: Hashable, compute: Callable[[], Any]) -> Any:
    return compute()


class Exchange:
    """The messages of one dispatch: where rows go, and which messages were started.

    row_TC: the row of each token for each of its ranks; -1 = none.
    stages: splits of each stage of the all-to-all.
    blocks: of a hierarchical one, rows between the stages: [from a rank of this node][to a node].
    received_choices: choices among the rows received, or more.
    padded: some rows are not in use. Their experts are -1, and gradients of their results zeros, since the gradient of
        biases is a sum over all rows.
    """

    def __init__(
        self,
        dispatcher: AllToAllDispatcher,
        row_TC: Tensor,
        stages: Sequence[Splits],
        blocks: list[list[int]],
        received_choices: int,
        padded: bool,
    ) -> None:
        self.dispatcher, self.row_TC = dispatcher, row_TC
        self.stages, self.blocks = stages, blocks
        self.received_choices, self.padded = received_choices, padded
        self._arrivals: dict[str, Callable[[], Tensor]] = {}

    @property
    def sent(self) -> int:
        return sum(self.stages[0][0])

    def start(self, message: str, rows: Tensor, *, back: bool = False) -> None:
        """Starts to send rows to the ranks of their experts, or rows that came from there back."""
        self._arrivals[message] = self.dispatcher.start(rows, self, back=back)

    def wait(self, message: str) -> Tensor:
        """The rows of a message that was started, once they have arrived."""
        return self._arrivals.pop(message)()

    def receive(self, rows: Dispatched) -> Dispatched:
        """See `Dispatched`."""
        weights_QK, experts_QK = _ReceiveChoices.apply(rows.weights, self)
        plan = plan_permute(experts_QK, self.dispatcher.local_experts, self.received_choices)  # while tokens travel
        return rows._replace(x=_Wait.apply(rows.x, self, TOKENS), weights=weights_QK, plan=plan)

    def send_back(self, y_QD: Tensor) -> Dispatched:
        """See `Dispatched`."""
        return Dispatched(_Start.apply(y_QD, y_QD, self, RESULTS), exchange=self)


# A link is an empty tensor: the edge of the graph from the node that starts a message to the node that waits for it.


class _Start(torch.autograd.Function):
    """Starts to send rows of x: a link. Backward: waits for gradients, and sums each token's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, exchange: Exchange, message: str) -> Tensor:
        ctx.exchange, ctx.message = exchange, message
        exchange.start(message, rows, back=message == RESULTS)
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        arrived = ctx.exchange.wait(ctx.message)
        # y_QD of results has one row for each row that is sent
        return arrived if ctx.message == RESULTS else sum_rows(arrived, ctx.exchange.row_TC), None, None, None


class _Wait(torch.autograd.Function):
    """Waits for tokens: x_QD; or for results, and sums each token's: y_TD. Backward: starts to send gradients."""

    @staticmethod
    def forward(ctx: Any, link: Tensor, exchange: Exchange, message: str) -> Tensor:
        ctx.exchange, ctx.message = exchange, message
        arrived = exchange.wait(message)
        return sum_rows(arrived, exchange.row_TC) if message == RESULTS else arrived

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        exchange, rows = ctx.exchange, grads[0]
        if ctx.message == RESULTS:
            rows = gather_rows(rows, exchange.row_TC, exchange.sent, zeros=exchange.padded)
        exchange.start(ctx.message, rows, back=ctx.message == TOKENS)
        return grads[0].new_empty(0), None, None


class _ReceiveChoices(torch.autograd.Function):
    """Waits for weights_QK and experts_QK (int32, without gradient). Backward: starts to send weights' gradients."""

    @staticmethod
    def forward(ctx: Any, link: Tensor, exchange: Exchange) -> tuple[Tensor, Tensor]:
        ctx.exchange = exchange
        weights_QK, experts_QK = exchange.wait(CHOICES).chunk(2, dim=1)
        experts_QK = experts_QK.int()
        ctx.mark_non_differentiable(experts_QK)
        return weights_QK.clone(memory_format=torch.contiguous_format), experts_QK

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.exchange.start(CHOICES, grads[0], back=True)
        return grads[0].new_empty(0), None


class AllToAllDispatcher(Dispatcher):
    """The dispatcher of a layer whose experts are divided over the ranks of a group, in rank order.

    One host synchronization a call, for the numbers of rows; none where `expected` has them, or in a recomputation that
    has `once`.
    Ranks without tokens, and experts without any, take part.

    Args:
        groups: flat: (the expert group,); hierarchical: (its ranks on this node, its ranks with this rank's index on
            every node).
        num_experts: E.
        buffer: most choices that a rank receives at once, as a multiple of the ranks' mean; more are sent in rounds.
        once: of the layer's `BatchContext`; gives a recomputation the counts of the first forward pass.
    """

    def __init__(
        self, groups: Sequence[ProcessGroup], *, num_experts: int, buffer: float = math.inf, once: Once = _compute
    ) -> None:
        sizes, ranks = [group.size() for group in groups], [group.rank() for group in groups]
        self.groups = groups
        self.ranks_per_node, self.nodes = sizes if len(groups) == 2 else (sizes[0], 1)
        self.ranks = self.ranks_per_node * self.nodes
        self.rank = ranks[-1] * self.ranks_per_node + ranks[0] if len(groups) == 2 else ranks[0]
        assert num_experts % self.ranks == 0
        self.local_experts = num_experts // self.ranks
        self.buffer, self.once = buffer, once

    # a compiled block's graph breaks here: sizes are read on the host, and messages fill memory in place
    @torch.compiler.disable
    def dispatch(self, x_TD: Tensor, choices: Choices, *, part: int | None = None) -> Dispatched:
        """See `Dispatcher`. Choices are sent before tokens, so that local rows are planned while tokens travel."""
        if torch.is_autocast_enabled(x_TD.device.type):  # cast as experts would: half the bytes
            x_TD = x_TD.to(torch.get_autocast_dtype(x_TD.device.type))
        weights_TK, experts_TK = choices.weights_TK, choices.experts_TK.contiguous()
        if weights_TK.dtype not in (torch.float32, torch.float64):
            weights_TK = weights_TK.float()  # experts' numbers travel in the same dtype: exact below 2^24
        with torch.no_grad():
            counts_P2, assign_rows = plan_dispatch(
                experts_TK, weights_TK, local_experts=self.local_experts, ranks=self.ranks, nodes=self.nodes
            )
            counts, sizes, first_P2 = self.once((self, part), lambda: (*self._begin(counts_P2, part), counts_P2))
            if first_P2 is not counts_P2:  # rows would be sent to the wrong places
                torch._assert_async((first_P2 == counts_P2).all(), "a recomputation chose other experts")  # type: ignore[call-overload]
            row_TC, packed = assign_rows(sizes and sizes.room)
            # room for T x C rows: the device gathers while the host waits for the number that is used
            rows_SD = gather_rows(x_TD, row_TC, sizes and sizes.room[1])
            counts_PP2 = sizes.room_PP2 if sizes else counts()
            rounds: tuple[slice, ...] = ()
            if part is None and sizes is None:
                rounds = self.once((self, "rounds"), lambda: self._rounds(counts_PP2[..., 1], experts_TK))
                if self.expected is not None and len(rounds) <= 1:
                    self.expected.learn(self, counts_PP2)
        if len(rounds) > 1:
            parts = Parts(dispatcher=self, tokens=rounds, experts_TK=experts_TK)
            return Dispatched(x_TD, weights_TK, parts=parts)
        exchange = self.plan_exchange(counts_PP2, row_TC, padded=sizes is not None)
        return Dispatched(
            weights=_Start.apply(weights_TK, packed[: exchange.sent], exchange, CHOICES),
            x=_Start.apply(x_TD, rows_SD[: exchange.sent], exchange, TOKENS),
            exchange=exchange,
        )

    @torch.compiler.disable
    def combine(self, results: Dispatched) -> Tensor:
        if results.exchange is None:  # rounds were combined one by one
            return results.x
        return _Wait.apply(results.x, results.exchange, RESULTS)

    def _begin(self, counts_P2: Tensor, part: int | None) -> tuple[Callable[[], Tensor], Sizes | None]:
        """Starts to gather the counts; and the sizes to send with before they are known, or None."""
        counts = self.gather_counts(counts_P2)
        return counts, self.expected.sizes_for(self, counts) if self.expected is not None and part is None else None

    def room_by_slot(self, room_PP2: Tensor) -> Tensor:
        """room_P2: this rank's room for each rank, in the order of `plan_dispatch`."""
        return room_PP2[self.rank].view(self.nodes, self.ranks_per_node, 2).transpose(0, 1).reshape(-1, 2)

    def gather_counts(self, counts_P2: Tensor) -> Callable[[], Tensor]:
        """Starts to gather the counts of all ranks on each of them, and to copy them to the host.

        Args:
            counts_P2: int64; by slot (see `plan_dispatch`), rows for that rank, and choices among them.

        Returns:
            Waits for counts_PP2 on the host, by rank: [from][to].
        """
        stream = side_stream(counts_P2.device)
        gathered = counts_P2
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(counts_P2.device))
        with torch.cuda.stream(stream):  # a stream of its own, so that the device gathers rows meanwhile
            for group in self.groups:
                output = gathered.new_empty(group.size() * len(gathered), 2)
                work = dist.all_gather_into_tensor(output, gathered, group=group, async_op=True)
                assert work is not None
                work.wait()
                gathered = output
            if stream is not None:
                on_host = torch.empty(gathered.shape, dtype=gathered.dtype, pin_memory=True)
                on_host.copy_(gathered, non_blocking=True)
                event = stream.record_event()

        def wait(outlives_the_message: Tensor = counts_P2) -> Tensor:
            counts = gathered
            if stream is not None:
                event.synchronize()
                counts = on_host
            return counts.view(self.ranks, self.ranks_per_node, self.nodes, 2).transpose(1, 2).flatten(1, 2)

        return wait

    def start(self, rows: Tensor, exchange: Exchange, *, back: bool) -> Callable[[], Tensor]:
        """Starts the stages of an all-to-all. A hierarchical one waits for the first stage before the second."""
        stages = [(group, *splits) for group, splits in zip(self.groups, exchange.stages, strict=True)]
        blocks: Sequence[Sequence[int]] = exchange.blocks
        if back:
            stages = [(group, from_, to) for group, to, from_ in reversed(stages)]
            blocks = list(zip(*blocks, strict=True))
        (group, to, from_), *later = stages
        wait = all_to_all(rows, to, from_, group)
        for group, to, from_ in later:
            wait = all_to_all(_transpose_blocks(wait(), blocks), to, from_, group)
        return wait

    def largest(self, number: int, device: torch.device) -> int:
        """The largest of the ranks' numbers. Waits for the device."""
        tensor = torch.tensor(number, device=device)
        for group in self.groups:
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)
        return int(tensor)

    def _rounds(self, choices_PP: Tensor, experts_TK: Tensor) -> tuple[slice, ...]:
        """The tokens of each round; as many rounds on each rank. None where one message is enough."""
        if self.buffer >= self.ranks:
            return ()
        parts = plan_rounds(choices_PP, experts_TK, self.rank, local_experts=self.local_experts, buffer=self.buffer)
        if parts is None:
            return ()
        tokens = len(experts_TK)
        missing = self.largest(len(parts), experts_TK.device) - len(parts)
        return (*parts, *[slice(tokens, tokens)] * missing)

    def plan_exchange(self, counts_PP2: Tensor, row_TC: Tensor, *, padded: bool = False) -> Exchange:
        """Splits of this rank's messages.

        Args:
            counts_PP2: of `gather_counts`, or the room that messages have.
            row_TC: of `plan_dispatch`.
            padded: there is more room than rows.
        """
        node, local = divmod(self.rank, self.ranks_per_node)
        shape = (self.nodes, self.ranks_per_node)
        rows_PP, choices_PP = np.moveaxis(counts_PP2.numpy(), 2, 0)  # a tenth of torch's time for so few numbers
        rows_NLNL = rows_PP.reshape(*shape, *shape)  # from (node, rank of it) to (node, rank of it)
        middle_LN = rows_NLNL[node, :, :, local]  # what ranks of this node send by way of this one
        stages = [(rows_NLNL[node, local].sum(0).tolist(), middle_LN.sum(1).tolist())]
        if self.nodes > 1:
            stages.append((middle_LN.sum(0).tolist(), rows_NLNL[:, :, node, local].sum(1).tolist()))
        received_choices = int(choices_PP[:, self.rank].sum())
        return Exchange(self, row_TC, stages, middle_LN.tolist(), received_choices, padded)


def _transpose_blocks(rows: Tensor, blocks: Sequence[Sequence[int]]) -> Tensor:
    """Blocks of rows in row-major order of [i][j], put in row-major order of [j][i]."""
    inner = len(blocks[0])
    parts = rows.split([size for row in blocks for size in row])
    return torch.cat([parts[i * inner + j] for j in range(inner) for i in range(len(blocks))])
