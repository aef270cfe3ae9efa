"""`gshard`: two experts a token, the second one by chance (Lepikhin et al. 2020, GShard, arXiv 2006.16668).

Shapes: T tokens, D model width, E experts, K = 2 choices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foundry_moe.layers.context import GateContext
from foundry_moe.layers.gates.base import Choices, Gate, LinearGate
from foundry_moe.ops import noise
from foundry_moe.ops.topk import count_choices, topk

_SECOND = 2


class GShardGate(LinearGate):
    """Top-2 of the softmax, weights divided by their sum (algorithm 1 of the paper).

    In training the second expert is kept with probability min(1, 2 * its weight); the first keeps its weight.

    YAML: `gate: {name: gshard, random_second: true}`, with `top_k: 2`.

    Raises:
        ValueError: `top_k` other than 2.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(Gate.Config):
        """
        random_second: false keeps every second expert in training too.
        """

        random_second: bool = True

    config: Config

    def __init__(self, config: Config, **shape: Any) -> None:
        super().__init__(config, **shape)
        self.need_top_k(2, "gate gshard chooses two experts")

    def forward(self, x_TD: Tensor, context: GateContext) -> Choices:
        """See `Gate`. Losses: `balance` over first choices, as in the paper, and `z`."""
        logits_TE = self.logits(x_TD)
        probs_TE = logits_TE.softmax(-1)
        best_TK, experts_TK = topk(probs_TE, 2)
        weights_TK = best_TK / best_TK.sum(-1, keepdim=True).clamp(min=torch.finfo(best_TK.dtype).tiny)
        counts_E = count_choices(experts_TK[:, :1], self.num_experts, context.mask_T)
        if self.training and self.config.random_second:
            keys_T = context.token_keys(x_TD.shape[0], x_TD.device)
            drawn_T1 = noise.uniform(keys_T, 1, context.stream(_SECOND))
            dropped_T1 = 2 * weights_TK[:, 1:].detach() <= drawn_T1
            dropped_TK = torch.cat([torch.zeros_like(dropped_T1), dropped_T1], dim=1)
            experts_TK = experts_TK.masked_fill(dropped_TK, -1)
            weights_TK = weights_TK.masked_fill(dropped_TK, 0)
        return Choices(
            experts_TK=experts_TK,
            weights_TK=weights_TK,
            losses=self.common_losses(logits_TE, probs_TE, counts_E, context),
            logits_TE=logits_TE,
        )
