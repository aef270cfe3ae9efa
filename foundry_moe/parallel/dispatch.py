"""Dropless expert parallelism: a token goes once to each rank that holds an expert of its, and one result comes back.

A token with several experts on one rank travels once, and that rank sums their weighted outputs: with 64 experts
on 4 ranks and top-8, 2.7 rows a token leave a rank instead of 6. Moves tokens only: it must not know how experts
compute, nor how parameters are sharded.

Messages are started by one node of the autograd graph and waited for by a later one, so that what stands between
them overlaps with the message: forward, and, since autograd goes the other way, backward. Tokens may leave in chunks:
then experts compute one chunk while the next one and the results of the one before travel.

Shapes: T tokens of this rank, K choices a token, E experts in all, P ranks of the expert group, e = E / P local
experts, C = min(P, K) ranks a token goes to at most, H chunks, S rows sent, Q rows received of a chunk, D model width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor

from foundry_moe.ops.departures import Departures, gather_rows, sum_rows
from foundry_moe.ops.routes import Routes, plan_routes
from foundry_moe.parallel.exchange import Exchange, Flight, Splits


class RoutedExperts(Protocol):
    """What this module asks of experts.

    It gives them tokens, of which it asks nothing, and a function that it wants called with these tokens and with the
    experts' own: y_QD from x_QD, combine weights and routes to the local experts.
    """

    def __call__(self, left: Any, /, *, in_parts: Callable[[Any, Callable[..., Tensor]], Any]) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class _Way:
    """Where the rows of one call go: row_TC [T, C], -1 = none. They lie by chunk."""

    exchange: Exchange
    splits: tuple[Splits, ...]
    row_TC: Tensor

    @property
    def sent(self) -> int:
        return sum(splits.sent for splits in self.splits)

    def rows_of(self, rows_SD: Tensor, chunk: int) -> Tensor:
        end = list(accumulate(splits.sent for splits in self.splits))[chunk]
        return rows_SD[end - self.splits[chunk].sent : end]


class _Trip:
    """One kind of message of a call, and what is under way of it, forward or backward: a flight for each chunk."""

    def __init__(self, way: _Way) -> None:
        self.way = way
        self._flights: list[Flight | None] = [None] * len(way.splits)
        self._home_SD: Tensor | None = None

    def there(self, rows_SD: Tensor, chunk: int) -> None:
        """Starts a chunk of rows on its way to the ranks of its experts."""
        self._flights[chunk] = self.way.exchange.there(self.way.rows_of(rows_SD, chunk), self.way.splits[chunk])

    def back(self, rows_QD: Tensor, chunk: int) -> None:
        """Starts rows of a chunk on their way back."""
        if self._home_SD is None:
            self._home_SD = rows_QD.new_empty(self.way.sent, *rows_QD.shape[1:])
        into = self.way.rows_of(self._home_SD, chunk)
        self._flights[chunk] = self.way.exchange.back(rows_QD, self.way.splits[chunk], into)

    def land(self, chunk: int) -> Tensor:
        """Waits for one chunk."""
        flight, self._flights[chunk] = self._flights[chunk], None
        assert flight is not None, "nothing is under way"
        return flight.land()

    def land_home(self) -> Tensor:
        """Waits for all chunks that are on their way back, and sums a token's rows."""
        for chunk in range(len(self._flights)):
            self.land(chunk)
        assert self._home_SD is not None
        rows_SD, self._home_SD = self._home_SD, None
        return sum_rows(rows_SD, self.way.row_TC)


# A token is an empty tensor that ties the node that starts a message to the one that waits for it.


class _Leave(torch.autograd.Function):
    """Starts rows on their way: a token for each chunk. Backward: waits for gradients, sums a token's."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, trip: _Trip) -> tuple[Tensor, ...]:
        ctx.trip = trip
        return tuple(x_TD.new_empty(0) for _ in trip.way.splits)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.trip.land_home(), None


class _Arrive(torch.autograd.Function):
    """Waits for a chunk of rows: x_QD. Backward: starts gradients on their way."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, trip: _Trip, chunk: int) -> Tensor:
        ctx.trip, ctx.chunk = trip, chunk
        return trip.land(chunk)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.trip.back(grads[0], ctx.chunk)
        return grads[0].new_empty(0), None, None


class _ArriveChoices(torch.autograd.Function):
    """Waits for what travels beside rows: weights_QK, and local experts (int32), which have no gradient."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, trip: _Trip, chunk: int) -> tuple[Tensor, Tensor]:
        ctx.trip, ctx.chunk = trip, chunk
        weights_QK, local_QK = trip.land(chunk).chunk(2, dim=1)
        local_QK = local_QK.int()
        ctx.mark_non_differentiable(local_QK)
        return weights_QK.contiguous(), local_QK

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.trip.back(grads[0], ctx.chunk)
        return grads[0].new_empty(0), None, None


class _Return(torch.autograd.Function):
    """Starts a chunk of results on their way back. Backward: waits for their gradients."""

    @staticmethod
    def forward(ctx: Any, y_QD: Tensor, trip: _Trip, chunk: int) -> Tensor:
        ctx.trip, ctx.chunk = trip, chunk
        trip.back(y_QD, chunk)
        return y_QD.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.trip.land(ctx.chunk), None, None


class _Home(torch.autograd.Function):
    """Waits for results and sums a token's: y_TD. Backward: copies gradients to rows and starts them on their way."""

    @staticmethod
    def forward(ctx: Any, trip: _Trip, *tokens: Tensor) -> Tensor:
        ctx.trip = trip
        return trip.land_home()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        way = ctx.trip.way
        rows_SD = gather_rows(grads[0], way.row_TC, way.sent)
        for chunk in reversed(range(len(way.splits))):  # autograd comes to the last one first
            ctx.trip.there(rows_SD, chunk)
        return None, *(grads[0].new_empty(0) for _ in way.splits)


class ExpertDispatch:
    """A `dispatch` for MoE layers whose experts are divided over the ranks of a group, in rank order.

    One host synchronisation a call: how many rows come and go; tokens are copied to their rows meanwhile. Ranks
    without tokens, and experts without any, take part with nothing.

    Args:
        chunks: H, in how many parts tokens travel.
    """

    def __init__(self, exchange: Exchange, chunks: int = 1) -> None:
        self.exchange = exchange
        self.chunks = chunks
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
        meanwhile: Callable[[], Tensor] | None = None,
    ) -> Tensor:
        """y_TD. Arguments as in `foundry_moe.layers.moe.Dispatch`; `rows` is not needed, it learns more."""
        return self._run(x_TD, weights_TK, experts_TK, num_experts, experts, meanwhile)

    def _dispatch(
        self,
        x_TD: Tensor,
        weights_TK: Tensor,
        experts_TK: Tensor,
        num_experts: int,
        experts: RoutedExperts,
        meanwhile: Callable[[], Tensor] | None,
    ) -> Tensor:
        ranks = self.exchange.size
        local_experts = num_experts // ranks
        assert local_experts * ranks == num_experts
        if torch.is_autocast_enabled(x_TD.device.type):
            x_TD = x_TD.to(torch.get_autocast_dtype(x_TD.device.type))  # as the experts would: half the bytes to send
        if weights_TK.dtype not in (torch.float32, torch.float64):
            weights_TK = weights_TK.float()  # experts' numbers travel with them, as exact below 2^24
        with torch.no_grad():
            departures = Departures(
                experts_TK,
                weights_TK,
                local_experts=local_experts,
                ranks=ranks,
                nodes=self.exchange.nodes,
                chunks=self.chunks,
            )
            announced = self.exchange.announce(departures.counts_2PH2)
            row_TC, packed = departures.place()
            # as many rows as there could be: how many there are, the host learns while the device copies
            rows_SD = gather_rows(x_TD, row_TC)
            way = _Way(exchange=self.exchange, splits=self.exchange.agree(announced), row_TC=row_TC)
        choices, tokens, results = _Trip(way), _Trip(way), _Trip(way)
        for chunk in range(self.chunks):
            choices.there(packed, chunk)  # before tokens: local routes are planned while these travel
            tokens.there(rows_SD, chunk)
        del packed, rows_SD
        left = (*_Leave.apply(weights_TK, choices), *_Leave.apply(x_TD, tokens))

        def in_parts(left: tuple[Tensor, ...], compute: Callable[..., Tensor]) -> tuple[Tensor, ...]:
            returning = []
            for chunk, splits in enumerate(way.splits):
                weights_QK, local_QK = _ArriveChoices.apply(left[chunk], choices, chunk)
                routes = trim(plan_routes(local_QK, local_experts), splits.received_units)
                x_QD = _Arrive.apply(left[self.chunks + chunk], tokens, chunk)
                y_QD = compute(x_QD, weights_QK, routes)
                returning.append(_Return.apply(y_QD, results, chunk))
            return tuple(returning)

        returning = experts(left, in_parts=in_parts)
        beside_TD = None if meanwhile is None else meanwhile()
        y_TD = _Home.apply(results, *returning)
        return y_TD if beside_TD is None else y_TD + beside_TD


def trim(routes: Routes, rows: int) -> Routes:
    """The same routes without the rows past the end, once the host knows how many are used."""
    return replace(routes, source_R=routes.source_R[:rows])
