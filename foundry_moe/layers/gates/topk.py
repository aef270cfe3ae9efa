"""`topk`: the k experts with the largest scores (Shazeer et al. 2017, arXiv 1701.06538, and today's practice).

Shapes: T tokens, D model width, E experts, K choices a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from foundry_moe.config import one_of
from foundry_moe.layers.context import GateContext
from foundry_moe.layers.gates.base import Choices, Gate, LinearGate
from foundry_moe.layers.losses import balance_loss, z_loss
from foundry_moe.ops.topk import count_choices, topk


class TopKGate(LinearGate):
    """Top-k over softmax or sigmoid scores.

    YAML: `gate: {name: topk, score: softmax, normalize: true, scale: 1.0, jitter: 0.0}`
    """

    LOSSES: ClassVar[frozenset[str]] = frozenset({"balance", "z"})

    @dataclass(frozen=True, kw_only=True)
    class Config(Gate.Config):
        """
        score: softmax | sigmoid of the logits.
        normalize: divide a token's weights by their sum (Mixtral: true, OLMoE: false).
        scale: factor on the weights (DeepSeek-V3: 2.5).
        jitter: in training, the gate's input is multiplied by U[1 - jitter, 1 + jitter] (Fedus et al. 2021).
        """

        score: str = "softmax"
        normalize: bool = True
        scale: float = 1.0
        jitter: float = 0.0

        def __post_init__(self) -> None:
            one_of("score", self.score, ("softmax", "sigmoid"))
            if not 0 <= self.jitter < 1:
                raise ValueError(f"jitter ({self.jitter}) must be at least 0 and below 1")

    config: Config

    def forward(self, x_TD: Tensor, context: GateContext) -> Choices:
        """See `Gate`. Losses: `balance` over softmax or normalised sigmoid scores, `z`."""
        config = self.config
        if self.training and config.jitter:
            x_TD = x_TD * torch.empty_like(x_TD).uniform_(1 - config.jitter, 1 + config.jitter)
        logits_TE = self.logits(x_TD)
        if config.score == "softmax":
            scores_TE = probs_TE = logits_TE.softmax(-1)
        else:
            scores_TE = logits_TE.sigmoid()
            probs_TE = scores_TE / scores_TE.sum(-1, keepdim=True).clamp(min=1e-20)
        weights_TK, experts_TK = topk(scores_TE, self.top_k)
        if config.normalize:
            weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True).clamp(min=1e-20)
        counts_E = context.sum_over_ranks(count_choices(experts_TK, self.num_experts, context.mask_T))
        return Choices(
            experts_TK=experts_TK,
            weights_TK=weights_TK * config.scale,
            losses={
                "balance": balance_loss(probs_TE, counts_E, context.mask_T),
                "z": z_loss(logits_TE, context.mask_T),
            },
            logits_TE=logits_TE,
        )
