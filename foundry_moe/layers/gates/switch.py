"""`switch`: one expert a token (Fedus et al. 2021, Switch Transformers, arXiv 2101.03961).

Shapes: T tokens, D model width, E experts.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from foundry_moe.layers.context import GateContext
from foundry_moe.layers.gates.gate import Choices, LinearGate
from foundry_moe.layers.gates.keys import SwitchKeys
from foundry_moe.layers.schedule import parse_schedule
from foundry_moe.ops.softmax_topk import softmax_topk

_JITTER = 0


class SwitchGate(LinearGate):
    """Top-1 of the softmax; the weight is the probability itself, so that the gate gets a gradient from one choice.

    YAML: `gate: {name: switch, jitter: 0.01}`, with `top_k: 1`.

    Raises:
        ValueError: `top_k` other than 1.
    """

    MAY_CHANGE: ClassVar[frozenset[str]] = frozenset({"jitter"})

    Config = SwitchKeys
    config: SwitchKeys

    def __init__(self, config: SwitchKeys, **shape: Any) -> None:
        super().__init__(config, **shape)
        self.jitter = parse_schedule(config.jitter, "jitter")

    @property
    def follows_time(self) -> bool:
        return not self.jitter.is_constant

    @property
    def chooses_by_tokens_alone(self) -> bool:
        return self.jitter.is_constant and not self.jitter.start

    def forward(self, x_TD: Tensor, context: GateContext) -> Choices:
        """See `Gate`. Losses: `balance`, `z`."""
        logits_TE = self.logits(x_TD, self.jitter_of(self.jitter, context, x_TD, _JITTER))
        selection = softmax_topk(logits_TE, 1, mask_T=context.mask_T, **self.sums(context))
        return Choices(
            experts_TK=selection.experts_TK,
            weights_TK=selection.weights_TK,
            losses=self.losses_of(selection, context, logits_TE),
            logits_TE=logits_TE,
            counts_E=self.counts_of(selection, context),
        )
