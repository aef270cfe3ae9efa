"""`hierarchical`: first a group of experts, then experts inside it (Jiang et al. 2021, SAM, arXiv 2110.07431).

A group is the experts of one device or node, so all experts of a token are on one device or node.

Shapes: T tokens, D model width, E experts, K choices, G groups, M = E / G experts of a group.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from foundry_moe.layers.context import GateContext
from foundry_moe.layers.gates.gate import Choices, LinearGate
from foundry_moe.layers.gates.keys import HierarchicalKeys
from foundry_moe.layers.losses import alignment_loss
from foundry_moe.ops.select_topk import count_choices, take_chosen, topk


class HierarchicalGate(LinearGate):
    """The group with the largest sum of probabilities, and its k best experts, weighted by their probabilities.

    YAML: `gate: {name: hierarchical, groups: 4}`, with `loss: {balance: 0.01, alignment: 0.01}`.

    Raises:
        ValueError: `groups` does not divide `num_experts`, or a group has fewer than `top_k` experts.
    """

    LOSSES: ClassVar[frozenset[str]] = HierarchicalKeys.LOSSES
    REPLAYS: ClassVar[bool] = True
    Config = HierarchicalKeys  # type: ignore[assignment]  # a key is needed
    config: HierarchicalKeys

    def forward(self, x_TD: Tensor, context: GateContext) -> Choices:
        """See `Gate`. Losses: `balance`, `z`, `alignment`."""
        groups = self.config.groups
        size = self.num_experts // groups
        logits_TE = self.logits(x_TD)
        probs_TE = logits_TE.softmax(-1)
        if context.experts_TK is None:
            probs_TGM = probs_TE.view(-1, groups, size)
            group_T1 = topk(probs_TGM.detach().sum(-1), 1)[1]
            probs_TM = probs_TGM.gather(1, group_T1[:, :, None].expand(-1, 1, size)).squeeze(1)
            weights_TK, inside_TK = topk(probs_TM, self.top_k)
            experts_TK = group_T1 * size + inside_TK
        else:
            experts_TK = context.experts_TK
            weights_TK, group_T1 = take_chosen(probs_TE, experts_TK), experts_TK[:, :1].clamp(min=0) // size
        counts_E = count_choices(experts_TK, self.num_experts, context.mask_T)
        losses = self.common_losses(logits_TE, probs_TE, counts_E, context, experts_TK)
        if "alignment" in context.losses:
            group_E = torch.arange(self.num_experts, device=x_TD.device) // size
            losses["alignment"] = alignment_loss(probs_TE, group_E == group_T1, weights_TK[:, -1], context.mask_T)
        return Choices(
            experts_TK=experts_TK, weights_TK=weights_TK, losses=losses, logits_TE=logits_TE, counts_E=counts_E
        )
