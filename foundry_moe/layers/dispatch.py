"""The interface between a layer and token dispatch: rows for local experts, and results back.

Independent of ranks and messages.

Shapes: T tokens of this process, Q rows that its experts receive, K choices per token, D model width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from foundry_moe.layers.gates.gate import Choices
from foundry_moe.ops import PermutePlan, plan_permute


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Tokens that are dispatched in rounds: those of each round, and the experts of all."""

    dispatcher: Dispatcher
    tokens: tuple[slice, ...]
    experts_TK: Tensor

    def choices(self, number: int, weights_TK: Tensor) -> Choices:
        """The choices of a round, with the weights of its tokens."""
        return Choices(experts_TK=self.experts_TK[self.tokens[number]], weights_TK=weights_TK)


class Dispatched(NamedTuple):
    """Rows for the experts of this process; after the experts, their results.

    A named tuple, since FSDP2's hooks find the tensors of a module's inputs and outputs in tuples only.

    x: [Q, D]. While rows travel, an empty tensor that carries their gradient.
    weights: [Q, K], combine weights; likewise.
    plan: which rows each local expert has; None while the choices travel.
    exchange: the dispatcher's record of rows that travel; None = they do not.
    parts: given if tokens are dispatched one part after the other. Then `x` and `weights` are x_TD and weights_TK.
    """

    x: Tensor
    weights: Tensor | None = None
    plan: PermutePlan | None = None
    exchange: Any = None
    parts: Parts | None = None

    def receive(self) -> Dispatched:
        """Waits for the rows: x_QD, weights_QK and the plan."""
        return self if self.exchange is None else self.exchange.receive(self)

    def send_back(self, y_QD: Tensor) -> Dispatched:
        """Starts to send the experts' results, already weighted, to the processes that have the tokens."""
        return Dispatched(y_QD) if self.exchange is None else self.exchange.send_back(y_QD)


class Dispatcher:
    """Brings tokens to their experts and the results back. What runs between two calls overlaps with messages.

    This one has all experts on one process: a permutation, and no messages. `AllToAllDispatcher` overrides each method.

    local_experts: experts of this process.
    expected: sizes of messages from earlier passes, see `foundry_moe/parallel/expected_counts.py`; None = exact ones.
    """

    expected: Any = None

    def __init__(self, num_experts: int) -> None:
        self.local_experts = num_experts

    def dispatch(self, x_TD: Tensor, choices: Choices, *, part: int | None = None) -> Dispatched:
        """Starts to send tokens to their experts, in rounds where they are too many.

        Args:
            part: number of the round whose tokens these are, which are sent at once.
        """
        plan = plan_permute(choices.experts_TK, self.local_experts, choices.rows)
        return Dispatched(x_TD, choices.weights_TK, plan)

    def combine(self, results: Dispatched) -> Tensor:
        """Waits for the results: y_TD, the sum over each token's rows."""
        return results.x
