"""`expert_choice`: each expert takes its best tokens (Zhou et al. 2022, arXiv 2202.09368).

Shapes: T tokens, D model width, E experts, C tokens per expert, K choices of the token that has most.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from foundry_moe.layers.context import GateContext
from foundry_moe.layers.gates.gate import Choices, LinearGate, pack_choices
from foundry_moe.layers.gates.keys import ExpertChoiceKeys
from foundry_moe.ops.select_topk import keep_largest
from foundry_moe.ops.softmax_topk import z_loss


class ExpertChoiceGate(LinearGate):
    """Each expert takes the T * top_k / E tokens of a microbatch that score it highest, weighted by their softmax.

    Loads are even by construction; a token may have from no expert to all of them.

    YAML: `gate: {name: expert_choice}`; `top_k` is the mean number of experts per token.

    Warns: whether a token is chosen depends on later tokens of its sequence, in training and in evaluation, so the
    loss of a causal model is not one that it could have when it generates.
    """

    LOSSES: ClassVar[frozenset[str]] = ExpertChoiceKeys.LOSSES
    DEFAULT_LOSSES: ClassVar[Mapping[str, float]] = ExpertChoiceKeys.DEFAULT_LOSSES
    Config = ExpertChoiceKeys

    def __init__(self, config: Any, **shape: Any) -> None:
        super().__init__(config, **shape)
        warnings.warn(
            "gate expert_choice reads whole sequences: whether an expert takes a token depends on the tokens after it, "
            "so the training loss of a causal model is lower than its loss in generation. Use it for encoders, or for "
            "comparison",
            stacklevel=2,
        )

    def forward(self, x_TD: Tensor, context: GateContext) -> Choices:
        """See `Gate`. Losses: `z`."""
        tokens = x_TD.shape[0]
        logits_TE = self.logits(x_TD)
        probs_TE = logits_TE.softmax(-1)
        # at most all tokens, at least one so that a lone token finds an expert
        taken = min(max(tokens * self.top_k // self.num_experts, 1), tokens)
        number: int | Tensor = taken
        scores_ET = probs_TE.detach().t()
        if context.mask_T is not None:
            scores_ET = scores_ET.masked_fill(~context.mask_T, -1)
            real = context.mask_T.sum()
            number = torch.minimum((real * self.top_k // self.num_experts).clamp(min=1), real)
        ranked_TE = keep_largest(scores_ET, number).t()
        experts_TK, weights_TK, rows = pack_choices(ranked_TE, probs_TE, context, taken * self.num_experts)
        losses = {"z": z_loss(logits_TE, context.mask_T)} if "z" in context.losses else {}
        return Choices(experts_TK=experts_TK, weights_TK=weights_TK, losses=losses, logits_TE=logits_TE, rows=rows)
