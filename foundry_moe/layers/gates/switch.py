"""`switch`: one expert per token (Fedus et al. 2021, Switch Transformers, arXiv 2101.03961).

Shapes: T tokens, D model width, E experts.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from foundry_moe.layers.context import GateContext
from foundry_moe.layers.gates.gate import Choices, JitteredGate
from foundry_moe.layers.gates.keys import SwitchKeys


class SwitchGate(JitteredGate):
    """Top-1 of the softmax; the weight is the probability itself, so that the gate gets a gradient from one choice.

    YAML: `gate: {name: switch, jitter: 0.01}`, with `top_k: 1`.

    Raises:
        ValueError: `top_k` other than 1.
    """

    MAY_CHANGE: ClassVar[frozenset[str]] = frozenset({"jitter"})

    REPLAYS: ClassVar[bool] = True
    Config = SwitchKeys

    def forward(self, x_TD: Tensor, context: GateContext) -> Choices:
        """See `Gate`. Losses: `balance`, `z`."""
        return self.choose_best(self.logits(x_TD, self.input_jitter(x_TD, context)), 1, context)
