"""`topk`: the k experts with the largest scores (Shazeer et al. 2017, arXiv 1701.06538, and today's practice).

Shapes: T tokens, D model width, E experts, K choices per token, G groups of experts.
"""

from __future__ import annotations

import warnings
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foundry_moe.layers.context import GateContext
from foundry_moe.layers.gates.gate import Choices, JitteredGate
from foundry_moe.layers.gates.keys import TopKKeys
from foundry_moe.layers.losses import chosen_with_new_noise, variation_squared
from foundry_moe.layers.schedule import Progress, parse_schedule
from foundry_moe.ops import noise
from foundry_moe.ops.gate_logits import Jitter, gate_logits
from foundry_moe.ops.select_topk import count_choices, take_chosen, topk
from foundry_moe.ops.softmax_topk import z_loss

_NOISE = 1
_TINY = 1e-20


class TopKGate(JitteredGate):
    """Top-k over softmax or sigmoid scores.

    YAML, as DeepSeek-V3 has it::

        gate: {name: topk, score: sigmoid, scale: 2.5, bias_balance: true, groups: 8, group_limit: 4}
    """

    MAY_CHANGE: ClassVar[frozenset[str]] = frozenset({"jitter", "bias_step"})  # `noise` adds a parameter

    LOSSES: ClassVar[frozenset[str]] = TopKKeys.LOSSES
    REPLAYS: ClassVar[bool] = True
    Config = TopKKeys
    config: TopKKeys
    bias_E: Tensor | None

    def __init__(self, config: TopKKeys, **shape: Any) -> None:
        super().__init__(config, **shape)
        config.check_bias()
        if config.normalize and self.top_k == 1 < self.num_experts:
            warnings.warn(
                "gate topk with top_k 1 and normalize (true) gives each token the weight 1, so the loss of the task "
                "does not train the gate: use gate: {name: switch}, or normalize: false",
                stacklevel=2,
            )
        self.bias_step = parse_schedule(config.bias_step, "bias_step")
        device = self.weight_ED.device
        self.weight_noise_ED = nn.Parameter(torch.empty_like(self.weight_ED)) if config.noise else None
        bias_E = torch.zeros(self.num_experts, device=device, dtype=torch.float32) if config.bias_balance else None
        self.register_buffer("bias_E", bias_E)

    @torch.no_grad()
    def reset_parameters(self, *, seed: int, layer: int, std: float) -> None:
        super().reset_parameters(seed=seed, layer=layer, std=std)
        if self.weight_noise_ED is not None:
            self.weight_noise_ED.zero_()  # Shazeer et al. 2017, appendix A
        if self.bias_E is not None:
            self.bias_E.zero_()

    @property
    def uses_loads(self) -> bool:
        return self.config.bias_balance

    @property
    def chooses_by_tokens_alone(self) -> bool:
        return not self.config.noise and super().chooses_by_tokens_alone

    @torch.no_grad()
    def after_step(self, counts_E: Tensor, progress: Progress) -> None:
        if self.bias_E is not None:
            # E * count against the sum: whole numbers, so that an expert at the mean stays where it is
            direction_E = torch.sign(counts_E.sum() - counts_E * self.num_experts)
            self.bias_E.add_(direction_E.to(self.bias_E), alpha=self.bias_step.at(progress))

    def forward(self, x_TD: Tensor, context: GateContext) -> Choices:
        """See `Gate`. Losses: `balance` over softmax or normalised sigmoid scores, `z`, `importance`, `load`."""
        config = self.config
        if self.training and self.uses_loads:
            self.progress(context)  # refuses a bias that nothing would step
        jitter = self.input_jitter(x_TD, context)
        clean_TE = self.logits(x_TD, jitter)
        logits_TE, deviation_TE = self._noisy(x_TD, clean_TE, jitter, context)
        if config.score == "softmax" and self.bias_E is None and not self._is_limited:
            choices = self.choose_best(logits_TE, self.top_k, context, normalize=config.normalize, scale=config.scale)
            if "z" in choices.losses and logits_TE is not clean_TE:
                choices.losses["z"] = z_loss(clean_TE, context.mask_T)
        else:
            choices = self._choose_by_scores(logits_TE, clean_TE, context)
        if "importance" in context.losses:
            # -1 of replayed choices goes to a column that is cut off
            slots = self.num_experts + 1
            gates_TS = logits_TE.new_zeros(len(logits_TE), slots).scatter(
                1, choices.experts_TK % slots, choices.weights_TK
            )
            gates_TE = gates_TS[:, :-1]
            choices.losses["importance"] = variation_squared(gates_TE, context.mask_T, context.sum_importance)
        if "load" in context.losses:
            assert deviation_TE is not None, "see check_losses"
            chances_TE = chosen_with_new_noise(clean_TE, logits_TE, deviation_TE, self.top_k)
            choices.losses["load"] = variation_squared(chances_TE, context.mask_T, context.sum_load)
        return choices

    def _choose_by_scores(self, logits_TE: Tensor, clean_TE: Tensor, context: GateContext) -> Choices:
        """The choices where scores are sigmoids, or biased, or limited to groups."""
        config = self.config
        if config.score == "softmax":
            scores_TE = probs_TE = logits_TE.softmax(-1)
        else:
            scores_TE = logits_TE.sigmoid()
            probs_TE = scores_TE / scores_TE.sum(-1, keepdim=True).clamp(min=_TINY)
        if context.experts_TK is None:
            weights_TK, experts_TK = self._choose(scores_TE)
        else:
            weights_TK, experts_TK = take_chosen(scores_TE, context.experts_TK), context.experts_TK
        if config.normalize:
            weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True).clamp(min=_TINY)
        losses, counts_E = {}, None
        if context.losses:
            counts_E = count_choices(experts_TK, self.num_experts, context.mask_T)
            losses = self.common_losses(clean_TE, probs_TE, counts_E, context, experts_TK)
        return Choices(
            experts_TK=experts_TK,
            weights_TK=weights_TK * config.scale,
            losses=losses,
            logits_TE=logits_TE,
            counts_E=counts_E,
        )

    def _noisy(
        self, x_TD: Tensor, clean_TE: Tensor, jitter: Jitter, context: GateContext
    ) -> tuple[Tensor, Tensor | None]:
        """The logits to choose by, and the deviation of their noise."""
        if self.weight_noise_ED is None or not self.training:
            return clean_TE, None
        deviation_TE = F.softplus(gate_logits(x_TD, self.weight_noise_ED, jitter))
        keys_T = context.token_keys(x_TD.shape[0], x_TD.device)
        drawn_TE = noise.normal(keys_T, self.num_experts, context.stream(_NOISE)).to(clean_TE.dtype)
        return clean_TE + drawn_TE * deviation_TE, deviation_TE

    def _choose(self, scores_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Scores and experts of each token's choices; bias and groups affect the choice only."""
        if self.bias_E is None and not self._is_limited:
            return topk(scores_TE, self.top_k)
        ranked_TE = scores_TE.detach()
        if self.bias_E is not None:
            ranked_TE = ranked_TE + self.bias_E.to(ranked_TE.dtype)
        if self._is_limited:
            ranked_TE = self._best_groups(ranked_TE)
        experts_TK = topk(ranked_TE, self.top_k)[1]
        return scores_TE.gather(1, experts_TK), experts_TK

    @property
    def _is_limited(self) -> bool:
        return 0 < self.config.group_limit < self.config.groups

    def _best_groups(self, ranked_TE: Tensor) -> Tensor:
        """The same scores, with -inf outside each token's best groups."""
        groups = self.config.groups
        by_group_TGM = ranked_TE.view(-1, groups, self.num_experts // groups)
        best_TG = topk(by_group_TGM, min(2, by_group_TGM.shape[2]))[0].sum(-1)
        kept_TL = topk(best_TG, self.config.group_limit)[1]
        eligible_TG = torch.zeros_like(best_TG, dtype=torch.bool).scatter_(1, kept_TL, True)
        return by_group_TGM.masked_fill(~eligible_TG[:, :, None], -torch.inf).view_as(ranked_TE)
