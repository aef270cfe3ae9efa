"""Token dispatch as a layer sees it: rows for local experts, and results back. Must not know ranks or messages.

Shapes: T tokens of this process, Q rows that its experts receive, K choices a token, D model width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from foundry_moe.layers.gates.gate import Choices
from foundry_moe.layers.rounds import compute_in_rounds, pass_through
from foundry_moe.ops import PermutePlan, plan_permute


class Dispatched(NamedTuple):
    """Rows for the experts of this process; after the experts, their results.

    A named tuple, since FSDP2's hooks find the tensors of a module's inputs and outputs in tuples only.

    x: [Q, D]. While rows travel, an empty tensor that carries their gradient.
    weights: [Q, K], combine weights; likewise.
    plan: which rows each local expert has; None while the choices travel.
    exchange: the dispatcher's record of rows that travel; None = they do not.
    rounds: the tokens of each round, if they are dispatched one part after the other. Then `x` is x_TD, undispatched,
        and `choices` are those of all tokens. `choices` is no tuple: FSDP2 must not cast combine weights.
    """

    x: Tensor
    weights: Tensor | None = None
    plan: PermutePlan | None = None
    exchange: Any = None
    rounds: tuple[slice, ...] = ()
    choices: Choices | None = None


class Dispatcher(Protocol):
    """Brings tokens to their experts and the results back. What runs between two calls overlaps with messages.

    local_experts: experts of this process.
    """

    local_experts: int

    def dispatch(self, x_TD: Tensor, choices: Choices, *, at_once: bool = False) -> Dispatched:
        """Starts to send tokens to their experts, in rounds where they are too many, unless `at_once`."""
        ...

    def receive(self, rows: Dispatched) -> Dispatched:
        """Waits for the rows: x_QD, weights_QK and the plan."""
        ...

    def send_back(self, y_QD: Tensor, rows: Dispatched) -> Dispatched:
        """Starts to send the experts' results, already weighted, to the processes that have the tokens."""
        ...

    def combine(self, results: Dispatched) -> Tensor:
        """Waits for the results: y_TD, the sum over each token's rows."""
        ...


class LocalDispatcher:
    """All experts are on this process: a permutation, and no messages."""

    def __init__(self, num_experts: int) -> None:
        self.local_experts = num_experts

    def dispatch(self, x_TD: Tensor, choices: Choices, *, at_once: bool = False) -> Dispatched:
        plan = choices.plan
        if plan is None:
            plan = plan_permute(choices.experts_TK, self.local_experts, choices.rows)
        return Dispatched(x_TD, choices.weights_TK, plan)

    def receive(self, rows: Dispatched) -> Dispatched:
        return rows

    def send_back(self, y_QD: Tensor, rows: Dispatched) -> Dispatched:
        return Dispatched(y_QD)

    def combine(self, results: Dispatched) -> Tensor:
        return results.x


# (x_QD, weights_QK, plan, *parameters) -> y_QD
ExpertMLP = Callable[..., Tensor]


def run_experts(
    rows: Dispatched, dispatcher: Dispatcher, expert_mlp: ExpertMLP, parameters: tuple[Tensor | None, ...]
) -> Dispatched:
    """Receives rows, computes the experts, and starts to send results back; in rounds, part by part.

    Args:
        parameters: every tensor of the experts that may need a gradient, a weight first. Outside autocast rows are
            cast to its dtype, as FSDP2 casts a module's inputs: it does not see rows that are received here.
    """
    assert parameters[0] is not None
    dtype = parameters[0].dtype

    def run(rows: Dispatched, *parameters: Tensor | None) -> Dispatched:
        rows = dispatcher.receive(rows)
        x_QD = rows.x if torch.is_autocast_enabled(rows.x.device.type) else rows.x.to(dtype)
        return dispatcher.send_back(expert_mlp(x_QD, rows.weights, rows.plan, *parameters), rows)

    if not rows.rounds:
        return run(rows, *parameters)
    choices = rows.choices
    assert choices is not None and rows.weights is not None

    def compute_round(tokens: slice, x_TD: Tensor, weights_TK: Tensor, *parameters: Tensor | None) -> Tensor:
        part = replace(choices, experts_TK=choices.experts_TK[tokens], weights_TK=weights_TK)
        return dispatcher.combine(run(dispatcher.dispatch(x_TD, part, at_once=True), *parameters))

    # the way of the gradient of combine weights goes through a tensor that FSDP2 sees: see AllToAllDispatcher
    weights_TK = pass_through(rows.weights, choices.weights_TK)
    return Dispatched(compute_in_rounds(compute_round, rows.rounds, rows.x, weights_TK, parameters))
