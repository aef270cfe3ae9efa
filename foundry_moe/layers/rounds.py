"""Rounds: dispatch, experts and combine of parts of a layer's tokens, one after the other, in place of all at once.

The first round saves what its backward pass needs. Later rounds save nothing: the backward pass dispatches and computes
them again. So a layer's peak memory does not depend on the gate. Independent of ranks and of experts' weights.

Shapes: T tokens of this process, K choices per token, D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

# (number of the round, x_TD, weights_TK, *parameters) -> y_TD, of its tokens
Round = Callable[..., Tensor]
_BEFORE_INPUTS = 2  # arguments of `_LaterRounds` before tensors that may have gradients
_BY_TOKEN = 2  # the first of those, x and weights, are cut into rounds


@torch.compiler.disable  # the number of rounds depends on the data
def compute_in_rounds(
    compute: Round,
    rounds: Sequence[slice],
    x_TD: Tensor,
    weights_TK: Tensor,
    parameters: tuple[Tensor | None, ...],
) -> Tensor:
    """y_TD.

    All rounds write to one tensor of outputs and add to one tensor of each gradient. In the graph the first round lies
    between two nodes: `_LaterRounds` computes the others, passes the first one's inputs on, and receives their
    gradients, to which it adds; `_FirstRound` writes the first one's outputs beside the others'. So all ranks send
    messages in the same order.

    Args:
        compute: computes one round from its number, x_TD and weights_TK of these, and the parameters.
        rounds: two or more consecutive slices that cover all tokens; a slice may be empty.
        parameters: of the experts. Only tensors passed here receive gradients.
    """
    y_TD, x_first, weights_first, *parameters_again = _LaterRounds.apply(compute, rounds, x_TD, weights_TK, *parameters)
    return _FirstRound.apply(y_TD, compute(0, x_first, weights_first, *parameters_again))


class _LaterRounds(torch.autograd.Function):
    """Results of all rounds but the first, whose rows stay undefined, and the inputs of the first.

    Saves its inputs only. Backward: adds each round's gradients of parameters to those of the first, in place.
    """

    @staticmethod
    def forward(ctx: Any, compute: Round, rounds: Sequence[slice], *inputs: Tensor | None) -> tuple[Tensor | None, ...]:
        x_TD = inputs[0]
        assert x_TD is not None
        ctx.compute, ctx.rounds, ctx.device_type = compute, rounds, x_TD.device.type
        ctx.autocast = torch.is_autocast_enabled(ctx.device_type), torch.get_autocast_dtype(ctx.device_type)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs)
        y_TD: Tensor | None = None
        for number, tokens in enumerate(rounds[1:], 1):
            y = compute(number, *_cut(tokens, inputs))
            if y_TD is None:
                y_TD = y.new_empty(x_TD.shape[0], y.shape[1])
            y_TD[tokens] = y
            del y  # free it before the next round
        first = [None if tensor is None else tensor.detach() for tensor in _cut(rounds[0], inputs)]
        needed = ctx.needs_input_grad[_BEFORE_INPUTS:]
        ctx.mark_non_differentiable(*(t for t, n in zip(first, needed, strict=True) if t is not None and not n))
        return y_TD, *first

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy_TD: Tensor, *of_first: Tensor | None) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors
        needed = ctx.needs_input_grad[_BEFORE_INPUTS:]
        places: list[Tensor | None] = [None] * len(inputs)
        for number, (tensor, gradient) in enumerate(zip(inputs, of_first, strict=True)):
            if needed[number] and number < _BY_TOKEN:
                of_all = torch.empty_like(tensor)
                of_all[ctx.rounds[0]] = 0 if gradient is None else gradient
                places[number] = of_all
            elif needed[number]:
                places[number] = torch.zeros_like(tensor) if gradient is None else gradient
        del of_first
        enabled, dtype = ctx.autocast
        for number, tokens in enumerate(ctx.rounds[1:], 1):
            leaves = [
                None if tensor is None else tensor.detach().requires_grad_(needs)
                for tensor, needs in zip(_cut(tokens, inputs), needed, strict=True)
            ]
            for leaf, place in zip(leaves[_BY_TOKEN:], places[_BY_TOKEN:], strict=True):
                if leaf is not None and place is not None:
                    _add_gradient(leaf, place)
            with torch.enable_grad(), torch.autocast(ctx.device_type, dtype=dtype, enabled=enabled):
                end = _End.apply(ctx.compute(number, *leaves), dy_TD[tokens])
            end.backward()
            for leaf, place in zip(leaves[:_BY_TOKEN], places, strict=False):
                if leaf is not None and place is not None:
                    place[tokens] = 0 if leaf.grad is None else leaf.grad
            del end, leaves  # free them before the next round
        return (None,) * _BEFORE_INPUTS + tuple(places)


def _cut(tokens: slice, inputs: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The inputs of a round: its tokens and their weights, and all parameters."""
    return [t[tokens] if t is not None and i < _BY_TOKEN else t for i, t in enumerate(inputs)]


def _add_gradient(leaf: Tensor, place: Tensor) -> None:
    """Adds the leaf's gradient to `place` when it is accumulated, and frees it."""

    def add(leaf: Tensor) -> None:
        assert leaf.grad is not None
        place.add_(leaf.grad)
        leaf.grad = None

    leaf.register_post_accumulate_grad_hook(add)


class _End(torch.autograd.Function):
    """A scalar whose backward pass starts with the given gradient of results, so that results need not be kept."""

    @staticmethod
    def forward(ctx: Any, y_TD: Tensor, dy_TD: Tensor) -> Tensor:
        ctx.dy_TD = dy_TD
        return y_TD.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.dy_TD, None


class _FirstRound(torch.autograd.Function):
    """Writes the first round's results beside the others', in place. Backward: no copy."""

    @staticmethod
    def forward(ctx: Any, y_TD: Tensor, y_first: Tensor) -> Tensor:
        ctx.mark_dirty(y_TD)
        ctx.first = y_first.shape[0]
        y_TD[: ctx.first] = y_first
        return y_TD

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0], gradients[0][: ctx.first]
