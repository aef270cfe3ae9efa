"""The token dispatcher: brings tokens to their experts and the weighted results back. Here, that of one process.

A layer calls `dispatch`, gives what has been sent to its experts, and gives what these send back to `combine`. What
stands between two of these calls may overlap with messages.

Shapes: T tokens of this process, Q tokens that its experts receive, K choices a token, D model width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from foundry_moe.layers.gates.gate import Choices
from foundry_moe.layers.rounds import by_way_of, compute_in_rounds
from foundry_moe.ops import PermutePlan, plan_permute

# (x_QD, weights_QK, plan, *parameters) -> y_QD
ExpertMLP = Callable[..., Tensor]


class ExpertInput(NamedTuple):
    """Tokens for the experts of this process: x_QD, their combine weights, and the rows of each expert."""

    x_QD: Tensor
    weights_QK: Tensor | None
    plan: PermutePlan


class Transport(Protocol):
    """How one chunk of tokens comes to the experts of this process, and its results go back."""

    def receive(self, *tensors: Tensor) -> ExpertInput:
        """Waits for the tokens. Takes the tensors that `Chunk` holds."""
        ...

    def send_back(self, y_QD: Tensor) -> Tensor:
        """Starts the results' way back; a tensor for `TokenDispatcher.combine`."""
        ...


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """Stands for the transport of tokens that are not sent yet, x_TD, and go in rounds.

    parts: the tokens of each round; as many on every rank, and one may be empty.
    weights_TK: not among the chunk's tensors, which FSDP2 casts. None of its rows is, in their place: where tokens have
        no gradient and weights do, FSDP2 reduces on each rank in the same order only if it sees a tensor with one.
    send: (tokens, x_TD, weights_TK) -> the chunks of a round, under way.
    combine: of these chunks, as `TokenDispatcher.combine`.
    """

    parts: tuple[slice, ...]
    weights_TK: Tensor
    send: Callable[[slice, Tensor, Tensor], tuple[Chunk, ...]]
    combine: Callable[[tuple[Chunk, ...]], Tensor]


class Chunk(NamedTuple):
    """A part of the tokens, sent to experts or, as their result, sent back; or, with `Rounds`, all of them.

    tensors: what gradients flow through. FSDP2's hooks find tensors of a module's inputs and outputs in tuples alone.
    """

    tensors: tuple[Tensor, ...]
    transport: Transport | Rounds

    def receive(self) -> ExpertInput:
        """The tokens, once they are here. Not of `Rounds`."""
        assert not isinstance(self.transport, Rounds)
        return self.transport.receive(*self.tensors)

    def send_back(self, y_QD: Tensor) -> Chunk:
        """Starts the way back of the experts' results for these tokens. Not of `Rounds`."""
        assert not isinstance(self.transport, Rounds)
        return Chunk((self.transport.send_back(y_QD),), self.transport)


def compute_chunks(
    sent: tuple[Chunk, ...], dtype: torch.dtype, expert_mlp: ExpertMLP, parameters: tuple[Tensor | None, ...]
) -> tuple[tuple[Chunk, ...], int]:
    """Chunk by chunk: receives tokens, computes, starts the results' way back. Also in how many rounds.

    Args:
        dtype: of the experts' weights. Outside of autocast tokens are cast to it, as FSDP2 casts a module's inputs:
            what is received here it does not see.
        expert_mlp: (x_QD, weights_QK, plan, *parameters) -> y_QD.
        parameters: all tensors that it computes with and that may have a gradient.
    """
    rounds = sent[0].transport
    if not isinstance(rounds, Rounds):
        return tuple(_compute(chunk, dtype, expert_mlp, parameters) for chunk in sent), 1
    send, combine = rounds.send, rounds.combine

    def compute(tokens: slice, x_TD: Tensor, weights_TK: Tensor, *parameters: Tensor | None) -> Tensor:
        sent = send(tokens, x_TD, weights_TK)
        return combine(tuple(_compute(chunk, dtype, expert_mlp, parameters) for chunk in sent))

    x_TD, none_of_weights = sent[0].tensors
    weights_TK = by_way_of(none_of_weights, rounds.weights_TK)
    y_TD = compute_in_rounds(compute, rounds.parts, x_TD, weights_TK, parameters)
    return (Chunk((y_TD,), rounds),), len(rounds.parts)


def _compute(chunk: Chunk, dtype: torch.dtype, expert_mlp: ExpertMLP, parameters: tuple[Tensor | None, ...]) -> Chunk:
    x_QD, weights_QK, plan = chunk.receive()
    if not torch.is_autocast_enabled(x_QD.device.type):
        x_QD = x_QD.to(dtype)
    return chunk.send_back(expert_mlp(x_QD, weights_QK, plan, *parameters))


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
