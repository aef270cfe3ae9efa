"""`switch`: one expert a token (Fedus et al. 2021, Switch Transformers, arXiv 2101.03961).

Shapes: T tokens, D model width, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from foundry_moe.layers.context import GateContext
from foundry_moe.layers.gates.base import Choices, Gate, LinearGate
from foundry_moe.layers.progress import parse_schedule
from foundry_moe.ops import noise
from foundry_moe.ops.topk import count_choices, topk

_JITTER = 0


class SwitchGate(LinearGate):
    """Top-1 of the softmax; the weight is the probability itself, so that the router learns from one choice.

    YAML: `gate: {name: switch, jitter: 0.01}`, with `top_k: 1`.

    Raises:
        ValueError: `top_k` other than 1.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(Gate.Config):
        """
        jitter: in training, the gate's input is multiplied by U[1 - jitter, 1 + jitter] (section 2.4); a number or
            a schedule.
        """

        jitter: float | dict[str, Any] = 0.01

        def __post_init__(self) -> None:
            low, high = parse_schedule(self.jitter, "jitter").bounds
            if low < 0 or high >= 1:
                raise ValueError(f"jitter ({self.jitter}) must be at least 0 and below 1")

    config: Config

    def __init__(self, config: Config, **shape: Any) -> None:
        super().__init__(config, **shape)
        self.need_top_k(1, "gate switch sends a token to one expert")
        self.jitter = parse_schedule(config.jitter, "jitter")

    @property
    def follows_time(self) -> bool:
        return not self.jitter.is_constant

    def forward(self, x_TD: Tensor, context: GateContext) -> Choices:
        """See `Gate`. Losses: `balance`, `z`."""
        if self.training:
            amount = self.jitter.start if self.jitter.is_constant else self.jitter.at(self.progress(context))
            if amount:
                keys_T = context.token_keys(x_TD.shape[0], x_TD.device)
                x_TD = noise.jitter(x_TD, keys_T, amount, context.stream(_JITTER))
        logits_TE = self.logits(x_TD)
        probs_TE = logits_TE.softmax(-1)
        weights_TK, experts_TK = topk(probs_TE, 1)
        counts_E = count_choices(experts_TK, self.num_experts, context.mask_T)
        return Choices(
            experts_TK=experts_TK,
            weights_TK=weights_TK,
            losses=self.common_losses(logits_TE, probs_TE, counts_E, context),
            logits_TE=logits_TE,
        )
