"""A gate of one's own: a token has as many experts as it takes to reach a probability of p, `top_k` at most.

After Huang et al. 2024 (arXiv 2403.07652): tokens that the gate is sure of have one expert, others more. `pip install
examples/own_gate` makes it known as `top_p`; `python -m top_p_gate` then trains a layer with it.

Shapes: T tokens, D model width, E experts, K choices per token at most.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foundry_moe.layers.gates.gate import Choices, Gate, LinearGate
from foundry_moe.ops.select_topk import count_choices


class TopPGate(LinearGate):
    """YAML: `gate: {name: top_p, p: 0.6}`. Losses: `balance` and `z`, as every linear gate has them."""

    @dataclass(frozen=True, kw_only=True)
    class Config(Gate.Config):
        """p: the probability that a token's experts have together."""

        p: float = 0.6

        def __post_init__(self) -> None:
            if not 0 < self.p <= 1:
                raise ValueError(f"p ({self.p}) must be above 0 and at most 1")

    def forward(self, x_TD: Tensor, context: Any) -> Choices:
        logits_TE = self.logits(x_TD)
        probs_TE = logits_TE.softmax(-1)
        weights_TK, experts_TK = probs_TE.topk(self.top_k, dim=-1)
        before_TK = weights_TK.cumsum(-1) - weights_TK
        kept_TK = before_TK < self.config.p  # the first one always
        experts_TK = experts_TK.masked_fill(~kept_TK, -1)  # -1: no choice
        weights_TK = weights_TK * kept_TK
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
        counts_E = count_choices(experts_TK, self.num_experts, context.mask_T)
        return Choices(
            experts_TK=experts_TK,
            weights_TK=weights_TK,
            losses=self.common_losses(logits_TE, probs_TE, counts_E, context, experts_TK),
            logits_TE=logits_TE,
            counts_E=counts_E,
        )


def main() -> None:
    from foundry_moe import MoEConfig, MoELayer
    from foundry_moe.layers.context import BatchContext

    torch.manual_seed(0)
    config = MoEConfig(
        num_experts=8, top_k=4, expert_hidden_size=32, activation="swiglu", gate={"name": "top_p", "p": 0.5}
    )
    layer = MoELayer(32, config, layer_index=0, num_layers=1, context=BatchContext())
    layer.reset_parameters()
    x_TD, target_TD = torch.randn(2, 256, 32)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
    for step in range(101):
        loss = (layer(x_TD) - target_TD).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            experts = layer.statistics.counts_E.sum().item() / len(x_TD)
            print(f"step {step}: loss {loss.item():.3f}, {experts:.2f} experts per token")
        layer.statistics.reset()


if __name__ == "__main__":
    main()
