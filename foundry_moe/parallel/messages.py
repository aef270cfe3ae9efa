"""The way of tokens to experts on other ranks and back, as nodes of the autograd graph.

Messages are started by one node of the graph and waited for by a later one, so that what stands between them overlaps
with the message: forward, and, since autograd goes the other way, backward. Must not know how rows travel.

Shapes: T tokens of this rank, K choices a token, P ranks of the expert group, H chunks, Q rows received of a chunk,
D model width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from foundry_moe.layers.token_dispatcher import Chunk, ExpertInput, Rounds
from foundry_moe.ops.permute import plan_permute


class Messages(Protocol):
    """One kind of message of a call, forward or backward: as many under way as there are chunks, H."""

    chunks: int

    def send(self, x_TD: Tensor, *, backward: bool = False) -> None:
        """Starts to send tokens to the ranks of their experts; the last chunk first in a backward pass."""
        ...

    def send_back(self, rows_QD: Tensor, chunk: int) -> None:
        """Starts to send rows of a chunk back to the ranks that they came from."""
        ...

    def wait(self, chunk: int) -> Tensor:
        """The rows of one chunk, once they are here."""
        ...

    def wait_and_sum(self) -> Tensor:
        """Waits for all chunks that were sent back, and sums each token's rows."""
        ...


# A link is an empty tensor: an edge of the graph from the node that starts a message to the one that waits for it.


class _Send(torch.autograd.Function):
    """Rows are on their way: a link for each chunk. Backward: waits for gradients, sums each token's."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, messages: Messages) -> tuple[Tensor, ...]:
        ctx.messages = messages
        return tuple(x_TD.new_empty(0) for _ in range(messages.chunks))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.messages.wait_and_sum(), None


class _Receive(torch.autograd.Function):
    """Waits for a chunk of rows: x_QD. Backward: starts to send gradients back."""

    @staticmethod
    def forward(ctx: Any, link: Tensor, messages: Messages, chunk: int) -> Tensor:
        ctx.messages, ctx.chunk = messages, chunk
        return messages.wait(chunk)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.messages.send_back(grads[0], ctx.chunk)
        return grads[0].new_empty(0), None, None


class _ReceiveChoices(torch.autograd.Function):
    """Waits for what travels beside rows: weights_QK, and local experts (int32), which have no gradient."""

    @staticmethod
    def forward(ctx: Any, link: Tensor, messages: Messages, chunk: int) -> tuple[Tensor, Tensor]:
        ctx.messages, ctx.chunk = messages, chunk
        weights_QK, local_QK = messages.wait(chunk).chunk(2, dim=1)
        local_QK = local_QK.int()
        ctx.mark_non_differentiable(local_QK)
        return weights_QK.clone(memory_format=torch.contiguous_format), local_QK

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.messages.send_back(grads[0], ctx.chunk)
        return grads[0].new_empty(0), None, None


class _SendBack(torch.autograd.Function):
    """Starts to send a chunk of results back: a link. Backward: waits for their gradients."""

    @staticmethod
    def forward(ctx: Any, y_QD: Tensor, messages: Messages, chunk: int) -> Tensor:
        ctx.messages, ctx.chunk = messages, chunk
        messages.send_back(y_QD, chunk)
        return y_QD.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.messages.wait(ctx.chunk), None, None


class _Combine(torch.autograd.Function):
    """Waits for results and sums each token's: y_TD. Backward: copies gradients to rows and starts to send them."""

    @staticmethod
    def forward(ctx: Any, messages: Messages, *links: Tensor) -> Tensor:
        ctx.messages = messages
        return messages.wait_and_sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.messages.send(grads[0], backward=True)
        return None, *(grads[0].new_empty(0) for _ in range(ctx.messages.chunks))


@dataclass(frozen=True, kw_only=True)
class Way:
    """Of one call: three kinds of messages, of which the first two are under way.

    received_choices: of each chunk.
    """

    choices: Messages
    tokens: Messages
    results: Messages
    received_choices: Sequence[int]
    local_experts: int

    def chunks(self, weights_TK: Tensor, x_TD: Tensor) -> tuple[Chunk, ...]:
        """What a dispatcher returns; gradients flow through links to `weights_TK` and `x_TD`."""
        links = zip(_Send.apply(weights_TK, self.choices), _Send.apply(x_TD, self.tokens), strict=True)
        return tuple(Chunk(pair, _Transport(way=self, chunk=chunk)) for chunk, pair in enumerate(links))


@dataclass(frozen=True, kw_only=True)
class _Transport:
    """The way of one chunk."""

    way: Way
    chunk: int

    def receive(self, *tensors: Tensor) -> ExpertInput:
        choices_link, tokens_link = tensors
        weights_QK, local_QK = _ReceiveChoices.apply(choices_link, self.way.choices, self.chunk)
        used = self.way.received_choices[self.chunk]
        rows_plan = plan_permute(local_QK, self.way.local_experts, used)  # while tokens travel
        x_QD = _Receive.apply(tokens_link, self.way.tokens, self.chunk)
        return ExpertInput(x_QD, weights_QK, rows_plan)

    def send_back(self, y_QD: Tensor) -> Tensor:
        return _SendBack.apply(y_QD, self.way.results, self.chunk)


def combine(outputs: tuple[Chunk, ...]) -> Tensor:
    """y_TD: each rank's sum for a token, summed."""
    transport = outputs[0].transport
    if isinstance(transport, Rounds):  # a round has been combined after it was computed
        return outputs[0].tensors[0]
    assert isinstance(transport, _Transport)
    return _Combine.apply(transport.way.results, *(output.tensors[0] for output in outputs))
