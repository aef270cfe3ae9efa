"""`base`: a linear assignment with equal loads (Lewis et al. 2021, BASE layers, arXiv 2103.16716).

Shapes: T tokens, D model width, E experts, S tokens of the assignment that this process solves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from foundry_moe.layers.context import GateContext, stay
from foundry_moe.layers.gates.gate import Choices, LinearGate
from foundry_moe.layers.gates.keys import BaseKeys
from foundry_moe.layers.init import normal_matrix
from foundry_moe.ops.assignment import assign
from foundry_moe.ops.select_topk import topk
from foundry_moe.schema import UserError

_SHUFFLE = 6


class BaseGate(LinearGate):
    """In training an assignment of tokens to experts with equal loads; in evaluation each token's best expert.

    The weight is sigmoid(x w) of the expert, through which its embedding w gets its gradient. Over several processes,
    scores are shuffled before the assignment and the assigned experts taken back after it, so that each process solves
    an unbiased sample of the batch (section 3.2.1 of the paper).

    YAML: `gate: {name: base}`, with `top_k: 1` and `loss: {}`.

    Raises:
        ValueError: `top_k` other than 1; in training, fewer tokens than experts, as a mean of the processes.
    """

    MAY_CHANGE: ClassVar[frozenset[str]] = frozenset({"epsilon", "rounds"})

    LOSSES: ClassVar[frozenset[str]] = BaseKeys.LOSSES
    DEFAULT_LOSSES: ClassVar[Mapping[str, float]] = BaseKeys.DEFAULT_LOSSES
    REPLAYS: ClassVar[bool] = True
    Config = BaseKeys
    config: BaseKeys

    @torch.no_grad()
    def reset_parameters(self, *, seed: int, layer: int, std: float) -> None:
        """Orthogonal rows of length 0.1, as the authors' code (fairseq) has them; `std` is not used."""
        experts, width = self.weight_ED.shape
        device = self.weight_ED.device
        tall = (max(experts, width), min(experts, width))
        q, r = torch.linalg.qr(normal_matrix(tall, 1.0, seed=seed, layer=layer, name="router", device=device))
        q = q * torch.diagonal(r).sign()
        self.weight_ED.copy_(0.1 * (q.t() if experts <= width else q))

    def forward(self, x_TD: Tensor, context: GateContext) -> Choices:
        """See `Gate`. No losses."""
        logits_TE = self.logits(x_TD)
        if context.experts_TK is not None:
            experts_TK = context.experts_TK
        elif self.training:
            experts_TK = self._assigned(logits_TE.detach(), context)[:, None]
        else:
            experts_TK = topk(logits_TE.detach(), 1)[1]
        present_TK = experts_TK >= 0
        chosen_TK = logits_TE.gather(1, experts_TK.clamp(min=0))
        weights_TK = chosen_TK.sigmoid().masked_fill(~present_TK, 0)
        return Choices(experts_TK=experts_TK, weights_TK=weights_TK, logits_TE=logits_TE)

    def _assigned(self, logits_TE: Tensor, context: GateContext) -> Tensor:
        """int64 [T]; padding has no expert."""
        real_T1 = torch.ones_like(logits_TE[:, :1]) if context.mask_T is None else context.mask_T[:, None]
        rows_TX = torch.cat([logits_TE, real_T1.to(logits_TE.dtype)], dim=1)
        stream = 0 if context.shuffle is stay else context.stream(_SHUFFLE)
        rows_SX, give_back = context.shuffle(rows_TX, stream)
        tokens = rows_SX.shape[0]  # a rank may have none of its own
        if tokens < self.num_experts:
            raise UserError(
                f"gate base assigns tokens evenly: {tokens} tokens are fewer than num_experts ({self.num_experts}); "
                "raise the microbatch or the sequence length"
            )
        expert_S = assign(rows_SX[:, :-1], rows_SX[:, -1] > 0, epsilon=self.config.epsilon, rounds=self.config.rounds)
        return give_back(expert_S)
