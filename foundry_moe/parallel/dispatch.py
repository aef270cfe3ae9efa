"""Dropless expert parallelism: a token goes once to each rank that holds an expert of its, and one result comes back.

A token with several experts on one rank travels once, and that rank sums their weighted outputs: with 64 experts
on 4 ranks and top-8, 2.7 rows a token leave a rank instead of 6. Moves tokens only: it must not know how experts
compute, nor how parameters are sharded.

Messages are started by one node of the autograd graph and waited for by a later one, so that what stands between
them overlaps with the message: forward, and, since autograd goes the other way, backward.

Shapes: T tokens of this rank, K choices a token, E experts in all, P ranks of the expert group, e = E / P local
experts, C = min(P, K) ranks a token goes to at most, S rows sent, Q rows received, D model width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from foundry_moe.ops.departures import Departures, gather_rows, sum_rows
from foundry_moe.ops.routes import Routes, plan_routes
from foundry_moe.parallel.exchange import Exchange, Flight, Splits


class RoutedExperts(Protocol):
    """What this module asks of experts: y_QD from tokens, combine weights and routes to the local ones."""

    def __call__(self, x_QD: Tensor, weights_QK: Tensor, routes: Routes) -> Tensor: ...


@dataclass(frozen=True, kw_only=True)
class _Way:
    """Where the rows of one call go: row_TC [T, C], -1 = none."""

    exchange: Exchange
    splits: Splits
    row_TC: Tensor

    def there(self, rows_SD: Tensor) -> Flight:
        return self.exchange.there(rows_SD, self.splits)

    def back(self, rows_QD: Tensor) -> Flight:
        return self.exchange.back(rows_QD, self.splits)


class _Trip:
    """One message of a call and, in the backward pass, its gradient's: what is under way of it."""

    def __init__(self, way: _Way) -> None:
        self.way = way
        self.flight: Flight | None = None

    def land(self) -> Tensor:
        assert self.flight is not None, "nothing is under way"
        flight, self.flight = self.flight, None
        return flight.land()


# A token is an empty tensor that ties the node that starts a message to the one that waits for it.


class _Leave(torch.autograd.Function):
    """Starts rows on their way; `rows_SD` holds them already. Backward: waits for gradients, sums a token's."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, rows_SD: Tensor, trip: _Trip) -> Tensor:
        ctx.trip = trip
        trip.flight = trip.way.there(rows_SD)
        return x_TD.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return sum_rows(ctx.trip.land(), ctx.trip.way.row_TC), None, None


class _Arrive(torch.autograd.Function):
    """Waits for rows: x_QD. Backward: starts gradients on their way."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, trip: _Trip) -> Tensor:
        ctx.trip = trip
        return trip.land()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.trip.flight = ctx.trip.way.back(grads[0])
        return grads[0].new_empty(0), None


class _ArriveChoices(torch.autograd.Function):
    """Waits for what travels beside rows: weights_QK, and local experts (int32), which have no gradient."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, trip: _Trip) -> tuple[Tensor, Tensor]:
        ctx.trip = trip
        weights_QK, local_QK = trip.land().chunk(2, dim=1)
        local_QK = local_QK.int()
        ctx.mark_non_differentiable(local_QK)
        return weights_QK.contiguous(), local_QK

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.trip.flight = ctx.trip.way.back(grads[0])
        return grads[0].new_empty(0), None


class _Return(torch.autograd.Function):
    """Starts results on their way back. Backward: waits for their gradients."""

    @staticmethod
    def forward(ctx: Any, y_QD: Tensor, trip: _Trip) -> Tensor:
        ctx.trip = trip
        trip.flight = trip.way.back(y_QD)
        return y_QD.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.trip.land(), None


class _Home(torch.autograd.Function):
    """Waits for results and sums a token's: y_TD. Backward: copies gradients to rows and starts them on their way."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, trip: _Trip) -> Tensor:
        ctx.trip = trip
        return sum_rows(trip.land(), trip.way.row_TC)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        way = ctx.trip.way
        ctx.trip.flight = way.there(gather_rows(grads[0], way.row_TC, way.splits.sent))
        return grads[0].new_empty(0), None


class ExpertDispatch:
    """A `dispatch` for MoE layers whose experts are divided over the ranks of a group, in rank order.

    One host synchronisation a call: how many rows come and go; tokens are copied to their rows meanwhile. Ranks
    without tokens, and experts without any, take part with nothing.
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
                experts_TK, weights_TK, local_experts=local_experts, ranks=ranks, nodes=self.exchange.nodes
            )
            announced = self.exchange.announce(departures.counts_2P2)
            row_TC, packed = departures.place()
            # as many rows as there could be: how many there are, the host learns while the device copies
            rows_SD = gather_rows(x_TD, row_TC)
            splits = self.exchange.agree(announced)
        way = _Way(exchange=self.exchange, splits=splits, row_TC=row_TC)
        choices, tokens, results = _Trip(way), _Trip(way), _Trip(way)
        # choices first: local routes are planned while tokens travel
        choices_left = _Leave.apply(weights_TK, packed[: splits.sent], choices)
        tokens_left = _Leave.apply(x_TD, rows_SD[: splits.sent], tokens)
        del packed, rows_SD
        weights_QK, local_QK = _ArriveChoices.apply(choices_left, choices)
        routes = trim(plan_routes(local_QK, local_experts), splits.received_units)
        y_QD = experts(_Arrive.apply(tokens_left, tokens), weights_QK, routes)
        results_left = _Return.apply(y_QD, results)
        beside_TD = None if meanwhile is None else meanwhile()
        y_TD = _Home.apply(results_left, results)
        return y_TD if beside_TD is None else y_TD + beside_TD


def trim(routes: Routes, rows: int) -> Routes:
    """The same routes without the rows past the end, once the host knows how many are used."""
    return replace(routes, source_R=routes.source_R[:rows])
