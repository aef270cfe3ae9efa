"""An MoE layer written from its formulas, densely and slowly in fp64: what a certificate holds a layer against.

Shares no code with the layers, gates and operators that it judges: every expert computes every token, and choices are
a mask. Gates without a formula here are refused by `why_not`.

Shapes: T tokens, D model width, F expert width, E experts, K choices, G groups, S sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

_POINTWISE: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}
_GATES = ("topk", "switch", "ktop1", "hierarchical", "gshard")


@dataclass(frozen=True, kw_only=True)
class Formula:
    """One layer.

    weights: fp64, by the layer's own names: `gate.weight_ED`, `experts.w1_EFD`, `shared_expert.w1.weight`, ...
    bias_E: of the choice, not of the weight.
    losses: weights of auxiliary losses.
    by_sequence: the balance loss is of each sequence by itself.
    """

    gate: str
    keys: Mapping[str, Any]
    num_experts: int
    top_k: int
    pointwise: str
    weights: Mapping[str, Tensor]
    losses: Mapping[str, float]
    bias_E: Tensor | None = None
    by_sequence: bool = False


@dataclass(frozen=True, kw_only=True)
class Routed:
    """probs_TE: what balance losses are over. counts_TE: choices that count, 0 or 1. weights_TE: 0 if not chosen."""

    logits_TE: Tensor
    probs_TE: Tensor
    counts_TE: Tensor
    weights_TE: Tensor
    blocks: int = 1
    extra: dict[str, Tensor] = field(default_factory=dict)


def why_not(gate: str, keys: Mapping[str, Any], *, capacity: Any, widths: Any) -> str:
    """Why a layer has no formula here; empty where it has one."""
    if gate not in _GATES:
        return f"gate {gate} has no independent formula"
    if keys.get("noise"):
        return "gate.noise draws random numbers"
    if gate == "gshard" and keys.get("random_second", True):
        return "gate.random_second draws random numbers"
    if isinstance(capacity, int | float):
        return f"capacity ({capacity}) drops choices, which the formula does not"
    if isinstance(widths, tuple | list):
        return "experts of several widths have no formula"
    return ""


def _best(scores_TX: Tensor, k: int) -> Tensor:
    """Mask of the k largest of each row."""
    chosen = scores_TX.topk(k, dim=-1).indices
    return torch.zeros_like(scores_TX).scatter(-1, chosen, 1.0)


def route(formula: Formula, x_TD: Tensor) -> Routed:
    """The gate: from (jittered) tokens to weights of all experts."""
    logits_TE = x_TD @ formula.weights["gate.weight_ED"].T
    keys, k, experts = formula.keys, formula.top_k, formula.num_experts
    if formula.gate == "ktop1":
        by_block_TKM = logits_TE.view(-1, k, experts // k)
        probs_TKM = (by_block_TKM - by_block_TKM.logsumexp(-1, keepdim=True)).exp()
        chosen_TE = _best(probs_TKM.detach(), 1).view_as(logits_TE)
        probs_TE = probs_TKM.view_as(logits_TE)
        return Routed(
            logits_TE=logits_TE, probs_TE=probs_TE, counts_TE=chosen_TE, weights_TE=probs_TE * chosen_TE, blocks=k
        )
    softmax_TE = (logits_TE - logits_TE.logsumexp(-1, keepdim=True)).exp()
    scores_TE = 1 / (1 + (-logits_TE).exp()) if keys.get("score") == "sigmoid" else softmax_TE
    probs_TE = scores_TE / scores_TE.sum(-1, keepdim=True)
    ranked_TE = scores_TE.detach()
    if formula.bias_E is not None:
        ranked_TE = ranked_TE + formula.bias_E
    groups, extra = int(keys.get("groups", 1)), {}
    limit = 1 if formula.gate == "hierarchical" else int(keys.get("group_limit", 0))
    inside_TE = torch.ones_like(ranked_TE)
    if 0 < limit < groups:
        by_group_TGM = ranked_TE.view(len(x_TD), groups, -1)
        best = by_group_TGM.shape[-1] if formula.gate == "hierarchical" else min(2, by_group_TGM.shape[-1])
        worth_TG = by_group_TGM.sort(-1, descending=True).values[..., :best].sum(-1)
        inside_TE = _best(worth_TG, limit).repeat_interleave(experts // groups, dim=1)
        ranked_TE = ranked_TE.masked_fill(inside_TE == 0, -torch.inf)
    chosen_TE = _best(ranked_TE, k)
    weights_TE = scores_TE * chosen_TE
    if formula.gate == "hierarchical":
        last_T1 = torch.where(chosen_TE > 0, probs_TE, torch.inf).min(-1, keepdim=True).values
        extra["alignment"] = ((probs_TE - last_T1).clamp(min=0) * (1 - inside_TE)).sum(-1).mean()
    if formula.gate == "gshard" or (formula.gate == "topk" and keys.get("normalize", True)):
        weights_TE = weights_TE / weights_TE.sum(-1, keepdim=True)
    counts_TE = _best(ranked_TE, 1) if formula.gate == "gshard" else chosen_TE
    weights_TE = weights_TE * float(keys.get("scale", 1.0))
    return Routed(logits_TE=logits_TE, probs_TE=probs_TE, counts_TE=counts_TE, weights_TE=weights_TE, extra=extra)


def experts_output(formula: Formula, x_TD: Tensor, weights_TE: Tensor) -> Tensor:
    """sum over e of weight[t, e] * FFN_e(x[t]), and the shared expert's output."""
    pointwise, weights = _POINTWISE[formula.pointwise], formula.weights

    def bias(name: str) -> Tensor | float:
        return weights[name][:, None] if name in weights else 0.0

    h_ETF = pointwise(torch.einsum("td,efd->etf", x_TD, weights["experts.w1_EFD"]) + bias("experts.w1_bias_EF"))
    if "experts.v1_EFD" in weights:
        h_ETF = h_ETF * (torch.einsum("td,efd->etf", x_TD, weights["experts.v1_EFD"]) + bias("experts.v1_bias_EF"))
    out_ETD = torch.einsum("etf,edf->etd", h_ETF, weights["experts.w2_EDF"]) + bias("experts.w2_bias_ED")
    y_TD = torch.einsum("te,etd->td", weights_TE, out_ETD)
    if "shared_expert.w1.weight" in weights:
        h_TF = pointwise(x_TD @ weights["shared_expert.w1.weight"].T)
        if "shared_expert.v1.weight" in weights:
            h_TF = h_TF * (x_TD @ weights["shared_expert.v1.weight"].T)
        shared_TD = h_TF @ weights["shared_expert.w2.weight"].T
        if "shared_expert.gate.weight" in weights:
            shared_TD = shared_TD / (1 + (-(x_TD @ weights["shared_expert.gate.weight"].T)).exp())
        y_TD = y_TD + shared_TD
    return y_TD


def auxiliary_losses(
    formula: Formula, routed: Routed, sequences: int, batch_counts_E: Tensor | None = None
) -> dict[str, Tensor]:
    """The wanted losses of one microbatch, times their weights.

    Args:
        sequences: that the tokens are in, all of one length.
        batch_counts_E: choices of the whole batch, for a balance loss over it; None = those of these tokens.
    """
    losses = dict(routed.extra)
    blocks, experts = routed.blocks, formula.num_experts
    size = experts // blocks

    def balance(probs_TE: Tensor, counts_E: Tensor) -> Tensor:
        share_BM = counts_E.view(blocks, size)
        share_BM = share_BM / share_BM.sum(-1, keepdim=True)
        return size * (share_BM * probs_TE.mean(0).view(blocks, size)).sum()

    if formula.by_sequence:
        by_sequence = zip(routed.probs_TE.chunk(sequences), routed.counts_TE.chunk(sequences), strict=True)
        losses["balance"] = torch.stack([balance(p, c.sum(0)) for p, c in by_sequence]).mean()
    else:
        counts_E = routed.counts_TE.sum(0) if batch_counts_E is None else batch_counts_E
        losses["balance"] = balance(routed.probs_TE, counts_E)
    losses["z"] = routed.logits_TE.view(-1, blocks, size).logsumexp(-1).square().mean(0).sum()
    importance_E = routed.weights_TE.sum(0)
    losses["importance"] = importance_E.var(correction=0) / importance_E.mean().square()
    return {name: losses[name] * weight for name, weight in formula.losses.items()}
