"""`gshard`: two experts per token, the second one by chance (Lepikhin et al. 2020, GShard, arXiv 2006.16668).

Shapes: T tokens, D model width, E experts, K = 2 choices.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from foundry_moe.layers.context import GateContext
from foundry_moe.layers.gates.gate import Choices, LinearGate
from foundry_moe.layers.gates.keys import GShardKeys

_SECOND = 2


class GShardGate(LinearGate):
    """Top-2 of the softmax, weights divided by their sum (algorithm 1 of the paper).

    In training the second expert is kept with probability min(1, 2 * its weight); the first keeps its weight.

    YAML: `gate: {name: gshard, random_second: true}`, with `top_k: 2`.

    Raises:
        ValueError: `top_k` other than 2.
    """

    MAY_CHANGE: ClassVar[frozenset[str]] = frozenset({"random_second"})

    REPLAYS: ClassVar[bool] = True
    Config = GShardKeys
    config: GShardKeys

    def forward(self, x_TD: Tensor, context: GateContext) -> Choices:
        """See `Gate`. Losses: `balance` over first choices, as in the paper, and `z`."""
        second = None
        if self.training and self.config.random_second:
            second = context.token_keys(x_TD.shape[0], x_TD.device), context.stream(_SECOND)
        return self.choose_best(self.logits(x_TD), 2, context, normalize=True, second_by_chance=second, counted=1)
