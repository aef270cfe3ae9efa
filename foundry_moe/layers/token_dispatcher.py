"""The token dispatcher: brings tokens to their experts and the weighted results back. Here, that of one process.

A layer calls `dispatch`, gives what has been sent to its experts, and gives what these send back to `combine`. What
stands between two of these calls may overlap with messages.

Shapes: T tokens of this process, Q tokens that its experts receive, K choices a token, D model width.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from foundry_moe.layers.gates.gate import Choices
from foundry_moe.layers.rounds import ExpertMLP, compute_in_rounds
from foundry_moe.ops import PermutePlan, plan_permute


class ExpertInput(NamedTuple):
    """Tokens for the experts of this process: x_QD, their combine weights, and the rows of each expert.

    most_rows: that experts compute at once; more go in rounds.
    """

    x_QD: Tensor
    weights_QK: Tensor | None
    plan: PermutePlan
    most_rows: int | None = None


class Transport(Protocol):
    """How one chunk of tokens comes to the experts of this process, and its results go back."""

    def receive(self, *tensors: Tensor) -> ExpertInput:
        """Waits for the tokens. Takes the tensors that `Chunk` holds."""
        ...

    def send_back(self, y_QD: Tensor) -> Tensor:
        """Starts the results' way back; a tensor for `TokenDispatcher.combine`."""
        ...


class Chunk(NamedTuple):
    """A part of the tokens, sent to experts or, as their result, sent back.

    tensors: what gradients flow through. FSDP2's hooks find tensors of a module's inputs and outputs in tuples alone.
    """

    tensors: tuple[Tensor, ...]
    transport: Transport

    def receive(self) -> ExpertInput:
        """The tokens, once they are here."""
        return self.transport.receive(*self.tensors)

    def send_back(self, y_QD: Tensor) -> Chunk:
        """Starts the way back of the experts' results for these tokens."""
        return Chunk((self.transport.send_back(y_QD),), self.transport)


def compute_chunks(
    sent: tuple[Chunk, ...], dtype: torch.dtype, expert_mlp: ExpertMLP, parameters: tuple[Tensor | None, ...]
) -> tuple[tuple[Chunk, ...], int]:
    """Chunk by chunk: receives tokens, computes, starts the results' way back. Also the most rounds of a chunk.

    Args:
        dtype: of the experts' weights. Outside of autocast tokens are cast to it, as FSDP2 casts a module's inputs:
            what is received here it does not see.
        expert_mlp: (x_QD, weights_QK, plan, *parameters) -> y_QD.
        parameters: all tensors that it computes with and that may have a gradient.
    """
    outputs, most_rounds = [], 1
    for chunk in sent:
        x_QD, weights_QK, plan, most_rows = chunk.receive()
        if not torch.is_autocast_enabled(x_QD.device.type):
            x_QD = x_QD.to(dtype)
        y_QD, rounds = compute_in_rounds(expert_mlp, parameters, x_QD, weights_QK, plan, most_rows)
        outputs.append(chunk.send_back(y_QD))
        most_rounds = max(most_rounds, rounds)
    return tuple(outputs), most_rounds


class TokenDispatcher(Protocol):
    """Moves tokens between the processes that experts are divided over.

    local_experts: how many of them are on this process.
    """

    local_experts: int

    def dispatch(self, x_TD: Tensor, choices: Choices) -> tuple[Chunk, ...]:
        """Plans where tokens go and sends them there; one chunk at least, with or without tokens in it."""
        ...

    def combine(self, outputs: tuple[Chunk, ...]) -> Tensor:
        """Waits for the experts' results: y_TD, the weighted sum of each token's. `outputs`: by chunk, as sent back."""
        ...


class LocalTransport:
    """Nothing travels."""

    def __init__(self, plan: PermutePlan) -> None:
        self.plan = plan

    def receive(self, *tensors: Tensor) -> ExpertInput:
        x_TD, *weights = tensors
        return ExpertInput(x_TD, weights[0] if weights else None, self.plan)

    def send_back(self, y_QD: Tensor) -> Tensor:
        return y_QD


class LocalDispatcher:
    """All experts are on this process: one chunk, which stays where it is."""

    def __init__(self, num_experts: int) -> None:
        self.num_experts = self.local_experts = num_experts

    def dispatch(self, x_TD: Tensor, choices: Choices) -> tuple[Chunk, ...]:
        plan = choices.plan
        if plan is None:
            plan = plan_permute(choices.experts_TK, self.num_experts, choices.rows)
        return (Chunk((x_TD, choices.weights_TK), LocalTransport(plan)),)

    def combine(self, outputs: tuple[Chunk, ...]) -> Tensor:
        (output,) = outputs
        return output.tensors[0]
