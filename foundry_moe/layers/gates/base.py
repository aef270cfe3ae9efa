"""The interface of a gate: from tokens to experts and combine weights.

Shapes: T tokens, D model width, E experts, K choices a token at most.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foundry_moe.layers.context import GateContext
from foundry_moe.layers.init import normal_matrix


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What a gate decides.

    experts_TK: int64, -1 where a token has fewer than K choices.
    weights_TK: combine weights, fp32 or better.
    losses: auxiliary losses by name, scalars, not yet weighted.
    logits_TE: the router's logits where it has any; None for gates without a router.
    """

    experts_TK: Tensor
    weights_TK: Tensor
    losses: dict[str, Tensor] = field(default_factory=dict)
    logits_TE: Tensor | None = None


class Gate(nn.Module):
    """Base of all gates. A subclass names its keys in `Config` (a frozen dataclass) and its losses in `LOSSES`."""

    LOSSES: ClassVar[frozenset[str]] = frozenset()

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Keys of `gate` beside `name`."""

    def __init__(self, config: Config, *, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.config = config
        self.num_experts = num_experts
        self.top_k = top_k

    def reset_parameters(self, *, seed: int, layer: int, std: float) -> None:
        """Draws initial weights from (seed, layer) alone. Gates without parameters do nothing."""

    def forward(self, x_TD: Tensor, context: GateContext) -> Choices:
        raise NotImplementedError


class LinearGate(Gate):
    """A gate that scores experts by a linear map, computed in fp32 whatever the model's precision."""

    def __init__(
        self,
        config: Gate.Config,
        *,
        d_model: int,
        num_experts: int,
        top_k: int,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__(config, num_experts=num_experts, top_k=top_k)
        self.weight_ED = nn.Parameter(torch.empty(num_experts, d_model, device=device, dtype=dtype))

    @torch.no_grad()
    def reset_parameters(self, *, seed: int, layer: int, std: float) -> None:
        shape = (self.weight_ED.shape[0], self.weight_ED.shape[1])
        device = self.weight_ED.device
        self.weight_ED.copy_(normal_matrix(shape, std, seed=seed, layer=layer, name="router", device=device))

    def logits(self, x_TD: Tensor) -> Tensor:
        """[T, E] in fp32, or fp64 for a model in fp64 (Fedus et al. 2021, section 2.4: selective precision)."""
        dtype = torch.promote_types(x_TD.dtype, torch.float32)
        return F.linear(x_TD.to(dtype), self.weight_ED.to(dtype))
