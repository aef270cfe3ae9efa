"""Experts in rounds: a batch that sends far more than an even share of rows here is computed part by part.

The first round keeps what its backward pass needs; later ones are computed again there, so the most memory that experts
take does not depend on the router. No token is dropped, and other processes need not know.

All rounds share one tensor of outputs and one of each gradient; that of the tokens takes the place of that of the
outputs. In the graph the first round stands between two nodes: `_LaterRounds` computes the others, hands the first its
inputs and gets their gradients back, to which it adds; `_FirstRound` puts the first one's outputs beside the others'.

Shapes: Q tokens received, K choices, R rows (a token has one for each of its experts here), D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from foundry_moe.ops import PermutePlan, plan_permute

# (x_QD, weights_QK, plan, *parameters) -> y_QD
ExpertMLP = Callable[..., Tensor]
_BEFORE_INPUTS = 5  # arguments of `_LaterRounds` before tensors that may have gradients
_BY_TOKEN = 2  # of those the first ones, x and weights, are cut into rounds


def compute_in_rounds(
    expert_mlp: ExpertMLP,
    parameters: tuple[Tensor | None, ...],
    x_QD: Tensor,
    weights_QK: Tensor | None,
    plan: PermutePlan,
    most_rows: int | None,
) -> tuple[Tensor, int]:
    """y_QD, and in how many rounds it was computed: one, unless there are more rows than `most_rows`.

    With several, the host waits once for the device, and the gradient of y_QD is overwritten by that of x_QD.

    Args:
        parameters: of the experts: gradients reach those tensors alone that are given here.
        plan: of all tokens; as many rows as it was made for count.
        most_rows: of a round; None = no limit. A round takes whole tokens: it may have K - 1 rows more.
    """
    if most_rows is None or plan.num_rows <= most_rows:
        return expert_mlp(x_QD, weights_QK, plan, *parameters), 1
    return _compute_in_rounds(expert_mlp, parameters, x_QD, weights_QK, plan, most_rows)


@dataclass(frozen=True, kw_only=True)
class _Round:
    """The tokens of a round, and how many rows they have."""

    tokens: slice
    rows: int

    def plan(self, experts_QK: Tensor, num_experts: int) -> PermutePlan:
        return plan_permute(experts_QK[self.tokens], num_experts, self.rows)


@torch.compiler.disable  # how many rounds there are comes from the data: not for a compiled graph
def _compute_in_rounds(
    expert_mlp: ExpertMLP,
    parameters: tuple[Tensor | None, ...],
    x_QD: Tensor,
    weights_QK: Tensor | None,
    plan: PermutePlan,
    most_rows: int,
) -> tuple[Tensor, int]:
    first, *later = _divide(plan, most_rows)
    if not later:
        return expert_mlp(x_QD, weights_QK, plan, *parameters), 1
    y_QD, x_first, weights_first, *parameters_again = _LaterRounds.apply(
        expert_mlp, first, later, plan.num_experts, plan.experts_TK, x_QD, weights_QK, *parameters
    )
    y_first = expert_mlp(x_first, weights_first, first.plan(plan.experts_TK, plan.num_experts), *parameters_again)
    return _FirstRound.apply(y_QD, y_first), 1 + len(later)


def _divide(plan: PermutePlan, most_rows: int) -> list[_Round]:
    """The rounds, in the order of tokens."""
    count, choices = plan.experts_TK.shape
    step = max(most_rows, choices)  # a round ends with the token that reaches so many rows since the first
    ends_Q = (plan.experts_TK >= 0).sum(1).cumsum(0)
    cuts = -(-plan.num_rows // step) - 1
    wanted = torch.arange(1, cuts + 1, device=ends_Q.device) * step
    token_host, row_host, used = _on_host(ends_Q, torch.searchsorted(ends_Q, wanted) + 1)
    tokens, rows = [0], [0]
    for token, row in zip(token_host, row_host, strict=True):
        if tokens[-1] < token < count and rows[-1] < row < used:
            tokens.append(token)
            rows.append(row)
    ends = zip(pairwise([*tokens, count]), pairwise([*rows, used]), strict=True)
    return [_Round(tokens=slice(*ends_of_tokens), rows=end - start) for ends_of_tokens, (start, end) in ends]


def _on_host(ends_Q: Tensor, tokens: Tensor) -> tuple[list[int], list[int], int]:
    """The tokens, the rows before each, and all rows: one copy."""
    rows = ends_Q[(tokens - 1).clamp(max=ends_Q.shape[0] - 1)]
    numbers = torch.cat((tokens, rows, ends_Q[-1:])).tolist()
    return numbers[: len(tokens)], numbers[len(tokens) : -1], numbers[-1]


class _LaterRounds(torch.autograd.Function):
    """Results of all rounds but the first, whose rows are left undefined, and the inputs of the first.

    Keeps nothing but its inputs. Backward: adds each round's gradients of parameters to the first one's, in place.
    """

    @staticmethod
    def forward(
        ctx: Any,
        expert_mlp: ExpertMLP,
        first: _Round,
        later: list[_Round],
        num_experts: int,
        experts_QK: Tensor,
        *inputs: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        ctx.expert_mlp, ctx.first, ctx.later, ctx.num_experts = expert_mlp, first, later, num_experts
        ctx.device_type = experts_QK.device.type
        ctx.autocast = torch.is_autocast_enabled(ctx.device_type), torch.get_autocast_dtype(ctx.device_type)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(experts_QK, *inputs)
        y_QD: Tensor | None = None
        for part in later:
            x, weights, *parameters = _cut(part, inputs)
            y = expert_mlp(x, weights, part.plan(experts_QK, num_experts), *parameters)
            if y_QD is None:
                y_QD = y.new_empty(experts_QK.shape[0], y.shape[1])
            y_QD[part.tokens] = y
            del y  # before the next round
        handed = [None if tensor is None else tensor.detach() for tensor in _cut(first, inputs)]
        needed = ctx.needs_input_grad[_BEFORE_INPUTS:]
        ctx.mark_non_differentiable(*(t for t, n in zip(handed, needed, strict=True) if t is not None and not n))
        return y_QD, *handed

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy_QD: Tensor, *of_first: Tensor | None) -> tuple[Tensor | None, ...]:
        experts_QK, *inputs = ctx.saved_tensors
        needed = ctx.needs_input_grad[_BEFORE_INPUTS:]
        places: list[Tensor | None] = [None] * len(inputs)
        for number, (tensor, gradient) in enumerate(zip(inputs, of_first, strict=True)):
            if needed[number] and number < _BY_TOKEN:
                places[number] = _place(tensor, gradient, ctx.first.tokens, dy_QD if number == 0 else None)
            elif needed[number]:
                places[number] = torch.zeros_like(tensor) if gradient is None else gradient
        enabled, dtype = ctx.autocast
        for part in ctx.later:
            plan = part.plan(experts_QK, ctx.num_experts)
            leaves = [
                None if tensor is None else tensor.detach().requires_grad_(needs)
                for tensor, needs in zip(_cut(part, inputs), needed, strict=True)
            ]
            for leaf, place in zip(leaves[_BY_TOKEN:], places[_BY_TOKEN:], strict=True):
                if leaf is not None and place is not None:
                    _add_gradient(leaf, place)
            with torch.enable_grad(), torch.autocast(ctx.device_type, dtype=dtype, enabled=enabled):
                end = _End.apply(ctx.expert_mlp(*leaves[:_BY_TOKEN], plan, *leaves[_BY_TOKEN:]), dy_QD[part.tokens])
            end.backward()
            for leaf, place in zip(leaves[:_BY_TOKEN], places, strict=False):
                if leaf is not None and place is not None:
                    place[part.tokens] = 0 if leaf.grad is None else leaf.grad
            del end, leaves  # before the next round
        return (None,) * _BEFORE_INPUTS + tuple(places)


def _cut(part: _Round, inputs: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The inputs of a round: its tokens and their weights, and all parameters."""
    return [t[part.tokens] if t is not None and i < _BY_TOKEN else t for i, t in enumerate(inputs)]


def _place(tensor: Tensor, of_first: Tensor | None, first: slice, instead_of: Tensor | None) -> Tensor:
    """Where the gradient of all tokens is put together, with that of the first round in it.

    That is `instead_of` itself, if it can be: a round reads its own tokens' rows alone, before it writes them.
    """
    place = instead_of
    if place is None or place.shape != tensor.shape or place.dtype != tensor.dtype or not place.is_contiguous():
        place = torch.empty_like(tensor)
    place[first] = 0 if of_first is None else of_first
    return place


def _add_gradient(leaf: Tensor, place: Tensor) -> None:
    """Adds the leaf's gradient to `place` as soon as it is there, and frees it."""

    def add(leaf: Tensor) -> None:
        assert leaf.grad is not None
        place.add_(leaf.grad)
        leaf.grad = None

    leaf.register_post_accumulate_grad_hook(add)


class _End(torch.autograd.Function):
    """A scalar from which a backward pass begins with given gradients of results, which need not be kept themselves."""

    @staticmethod
    def forward(ctx: Any, y_QD: Tensor, dy_QD: Tensor) -> Tensor:
        ctx.dy_QD = dy_QD
        return y_QD.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.dy_QD, None


class _FirstRound(torch.autograd.Function):
    """Puts the first round's results beside the others', in place. Backward: copies nothing."""

    @staticmethod
    def forward(ctx: Any, y_QD: Tensor, y_first: Tensor) -> Tensor:
        ctx.mark_dirty(y_QD)
        ctx.first = y_first.shape[0]
        y_QD[: ctx.first] = y_first
        return y_QD

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0], gradients[0][: ctx.first]
