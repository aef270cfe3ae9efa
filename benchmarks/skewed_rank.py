"""The choices of a skewed router, and one rank of many on one GPU: its experts on what all ranks' tokens send there.

What a message would bring comes as a copy, and what would leave is freed. So memory is that of the rank's experts, with
the rows received and their results, and without what a rank sends: that does not depend on the router.

Shapes: T tokens of a rank, Q tokens received, K choices, D model width, E experts, P ranks.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from foundry_moe.layers.token_dispatcher import Chunk, ExpertInput
from foundry_moe.ops import plan_permute


def choices_of(
    tokens: int, experts: int, top_k: int, ranks: int, skew: float, device: torch.device | str = "cpu"
) -> Tensor:
    """Different experts for each token; the first rank's get `skew` times an even share of the choices."""
    local = experts // ranks
    score_TE = torch.rand(tokens, experts, device=device)
    crowded_T = torch.rand(tokens, device=device) < (skew - 1) / (ranks - 1)
    score_TE[:, :local] += crowded_T[:, None].float()  # such a token chooses among the first rank's experts alone
    return score_TE.topk(top_k).indices


def zipf_choices_of(
    tokens: int, experts: int, top_k: int, exponent: float, device: torch.device | str = "cpu"
) -> Tensor:
    """Different experts for each token: drawn by weights i ** -exponent, which stand in an order of their own."""
    weight_E = torch.arange(1, experts + 1, device=device) ** -exponent
    order_E = torch.randperm(experts, generator=torch.Generator().manual_seed(1)).to(device)  # the same on all ranks
    return torch.multinomial(weight_E[order_E].expand(tokens, -1), top_k)


class _Arrive(torch.autograd.Function):
    """Rows that a message brings. Backward: their gradient leaves."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        return None


class _Leave(torch.autograd.Function):
    """Results leave: a number in their place. Backward: a message brings their gradient."""

    @staticmethod
    def forward(ctx: Any, y_QD: Tensor, gradient_QD: Tensor) -> Tensor:
        ctx.gradient_QD = gradient_QD
        return y_QD.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.gradient_QD.clone(), None


class FirstRank:
    """The first of P ranks: what its experts get in one chunk.

    Args:
        experts_TK: the choices of all ranks' tokens, P T of them.
        width: D.
        buffer: of `MeshConfig`; inf = no rounds.
        dtype: of tokens.
    """

    def __init__(
        self, experts_TK: Tensor, *, experts: int, ranks: int, width: int, buffer: float, dtype: torch.dtype
    ) -> None:
        self.local_experts = experts // ranks
        here_TK = torch.where(experts_TK < self.local_experts, experts_TK, -1)
        self.experts_QK = here_TK[(here_TK >= 0).any(1)].int()
        self.rows = int((self.experts_QK >= 0).sum())
        self.most_rows = math.ceil(min(buffer, ranks) * experts_TK.numel() / ranks)
        options: dict[str, Any] = {"device": experts_TK.device, "dtype": dtype}
        self.rows_QD = torch.randn(len(self.experts_QK), width, **options, requires_grad=True)
        self.gradient_QD = torch.randn(self.rows_QD.shape, **options)
        self.weights_QK = torch.rand(self.experts_QK.shape, device=experts_TK.device, requires_grad=True)

    def step(self, experts: nn.Module) -> None:
        """Forward and backward of the rank's experts."""
        (sent_back,) = experts((Chunk((self.rows_QD, self.weights_QK), self),))
        sent_back.tensors[0].backward()

    def receive(self, *tensors: Tensor) -> ExpertInput:
        x_QD, weights_QK = (_Arrive.apply(tensor) for tensor in tensors)
        return ExpertInput(
            x_QD, weights_QK, plan_permute(self.experts_QK, self.local_experts, self.rows), self.most_rows
        )

    def send_back(self, y_QD: Tensor) -> Tensor:
        return _Leave.apply(y_QD, self.gradient_QD)
