"""`ktop1`: the best expert of each of k prototypes (Yang et al. 2021, M6-T, arXiv 2105.15082).

Shapes: T tokens, D model width, E experts, K choices = prototypes, M = E / K experts of a prototype.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from foundry_moe.layers.context import GateContext
from foundry_moe.layers.gates.gate import Choices, LinearGate
from foundry_moe.layers.gates.keys import KTop1Keys
from foundry_moe.layers.losses import sequence_balance_loss
from foundry_moe.ops.select_topk import count_choices, take_chosen, topk
from foundry_moe.ops.softmax_topk import masked_mean


class KTop1Gate(LinearGate):
    """`top_k` prototypes of E / k experts; a softmax within each and its best expert, weighted by that probability.

    YAML: `gate: {name: ktop1}`.

    Raises:
        ValueError: `top_k` does not divide `num_experts`.
    """

    REPLAYS: ClassVar[bool] = True
    Config = KTop1Keys

    def forward(self, x_TD: Tensor, context: GateContext) -> Choices:
        """See `Gate`. Losses: `balance` within each prototype, summed over prototypes; `z` likewise."""
        tokens, size = x_TD.shape[0], self.num_experts // self.top_k
        logits_TE = self.logits(x_TD)
        logits_TKM = logits_TE.view(tokens, self.top_k, size)
        probs_TKM = logits_TKM.softmax(-1)
        prototype_K = torch.arange(self.top_k, device=x_TD.device)
        if context.experts_TK is None:
            weights_TK1, inside_TK1 = topk(probs_TKM, 1)
            weights_TK = weights_TK1.squeeze(-1)
            experts_TK = inside_TK1.squeeze(-1) + prototype_K * size
        else:
            experts_TK = context.experts_TK
            weights_TK = take_chosen(probs_TKM.flatten(1), experts_TK)
            own_TK = experts_TK.div(size, rounding_mode="floor") == prototype_K
            inside_TK1 = torch.where(own_TK, experts_TK % size, -1)[:, :, None]
        losses: dict[str, Tensor] = {}
        counts_E = None
        if "balance" in context.losses:
            counts_E = count_choices(experts_TK, self.num_experts, context.mask_T)
            if context.sequences is not None:
                each = [
                    sequence_balance_loss(probs_TM, inside_T1, context.sequences, context.mask_T)
                    for probs_TM, inside_T1 in zip(probs_TKM.unbind(1), inside_TK1.unbind(1), strict=True)
                ]
                losses["balance"] = torch.stack(each).sum()
            else:
                share_KM = context.sum_counts(counts_E).view(self.top_k, size).to(probs_TKM.dtype)
                share_KM = share_KM / share_KM.sum(-1, keepdim=True).clamp(min=1)
                losses["balance"] = size * (share_KM * masked_mean(probs_TKM, context.mask_T)).sum()
        if "z" in context.losses:
            losses["z"] = masked_mean(logits_TKM.logsumexp(-1).square(), context.mask_T).sum()
        return Choices(
            experts_TK=experts_TK,
            weights_TK=weights_TK,
            losses=losses,
            logits_TE=logits_TE,
            counts_E=counts_E,
        )
