"""`dense_to_sparse`: many experts at first, few later (Nie et al. 2021, arXiv 2112.14397).

Shapes: T tokens, D model width, E experts, K choices per token at most in this batch.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from foundry_moe.layers.context import GateContext
from foundry_moe.layers.gates.gate import Choices, LinearGate, pack_choices
from foundry_moe.layers.gates.keys import DenseToSparseKeys
from foundry_moe.layers.schedule import parse_duration, parse_schedule, share_of
from foundry_moe.ops import noise
from foundry_moe.ops.select_topk import count_choices, pack, topk
from foundry_moe.ops.softmax_topk import masked_sum, softmax_topk

_GUMBEL = 3


class DenseToSparseGate(LinearGate):
    """g = softmax((x W + Gumbel noise) / temperature); every expert with g above a threshold, weighted by g.

    The temperature falls, so g grows peaked and a token has fewer experts. After `hard_after`, and in evaluation,
    it has the best one of softmax(x W), weighted by that probability. One host synchronisation per forward pass reads
    the number of choices; none with `max_experts`.

    YAML:

        gate:
          name: dense_to_sparse
          temperature: {start: 1.0, end: 0.5, until: 1000ba, shape: exponential}
          threshold: 0.001
          hard_after: 2000ba

    Raises:
        ValueError: `top_k` other than 1, the final number of experts per token.
    """

    MAY_CHANGE: ClassVar[frozenset[str]] = frozenset({"temperature", "threshold", "hard_after", "max_experts"})

    Config = DenseToSparseKeys
    config: DenseToSparseKeys

    def __init__(self, config: DenseToSparseKeys, **shape: Any) -> None:
        super().__init__(config, **shape)
        self.temperature = parse_schedule(config.temperature, "temperature")
        self.hard_after = parse_duration(config.hard_after, "hard_after") if config.hard_after else None

    def forward(self, x_TD: Tensor, context: GateContext) -> Choices:
        """See `Gate`. Losses: `balance` of the choices and softmax(x W), `z`."""
        logits_TE = self.logits(x_TD)
        if self._is_hard(context):
            return self.choose_best(logits_TE, 1, context)
        soft_TE, ranked_TE = self._soft(logits_TE, context)
        most = min(self.config.max_experts, self.num_experts)
        losses, rows, counts_E = {}, None, None
        if most:
            weights_TK, experts_TK = pack(soft_TE, ranked_TE, most)
        if context.losses:  # before the host waits: the device has something to do meanwhile
            selection = softmax_topk(logits_TE, 1, mask_T=context.mask_T)
            if most:
                counted_TK, counts_E = experts_TK, count_choices(experts_TK, self.num_experts, context.mask_T)
            else:
                chosen_TE = ~(ranked_TE < 0)  # NaN is a choice, as in `pack`
                counted_TK = torch.where(chosen_TE, torch.arange(self.num_experts, device=x_TD.device), -1)
                counts_E = masked_sum(chosen_TE.long(), context.mask_T)
            losses = self.common_losses(logits_TE, None, counts_E, context, counted_TK, selection)
        if not most:
            experts_TK, weights_TK, rows = pack_choices(ranked_TE, soft_TE, context)
        return Choices(
            experts_TK=experts_TK,
            weights_TK=weights_TK,
            losses=losses,
            logits_TE=logits_TE,
            rows=rows,
            counts_E=counts_E,
        )

    def _is_hard(self, context: GateContext) -> bool:
        if not self.training:
            return True
        return self.hard_after is not None and share_of(self.hard_after, self.progress(context)) >= 1

    def _soft(self, logits_TE: Tensor, context: GateContext) -> tuple[Tensor, Tensor]:
        """g, and g without gradient with -1 where an expert is not chosen."""
        temperature = self.value_of(self.temperature, context)
        keys_T = context.token_keys(logits_TE.shape[0], logits_TE.device)
        drawn_TE = noise.gumbel(keys_T, self.num_experts, context.stream(_GUMBEL)).to(logits_TE.dtype)
        soft_TE = ((logits_TE + drawn_TE) / temperature).softmax(-1)
        given_TE = soft_TE.detach()
        best_T1 = topk(given_TE, 1)[1]
        chosen_TE = (given_TE > self.config.threshold).scatter_(1, best_T1, True)
        return soft_TE, given_TE.masked_fill(~chosen_TE, -1)
