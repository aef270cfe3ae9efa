"""GShard's MoE layer as einsums over masks (Lepikhin et al. 2020, arXiv 2006.16668, algorithm 1 and section 3.2).

Tokens stand in groups, and each expert takes C of a group; a mask [S, E, C] says which token has which of its slots.
Dispatch and combine are products with this mask, whose cost grows with the square of a group: DeepSpeed-MoE
(Rajbhandari et al. 2022, arXiv 2201.05596) has one group, all tokens of a GPU; GShard has many. Plain torch, for
comparison.

Shapes: G groups, S tokens of a group, D model width, F expert width, E experts, K choices (1: Switch, 2: GShard),
C slots.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from foundry_moe.ops.capacity import capacity_of


def combine_weights(logits_GSE: Tensor, top_k: int, capacity: int) -> tuple[Tensor, Tensor]:
    """The mask, and the balance loss.

    Returns:
        [G, S, E, C], the weight of each token's slots, zero elsewhere; and E * sum of (mean probability, share of first
        choices) over the experts, the mean of the groups.
    """
    experts = logits_GSE.shape[-1]
    probs_GSE = logits_GSE.float().softmax(-1)
    weights_GSK, experts_GSK = probs_GSE.topk(top_k)
    if top_k > 1:
        weights_GSK = weights_GSK / weights_GSK.sum(-1, keepdim=True)
    taken_GE = torch.zeros_like(probs_GSE[:, 0], dtype=torch.int64)
    parts, balance = [], probs_GSE.new_zeros(())
    for choice in range(top_k):
        chosen_GSE = F.one_hot(experts_GSK[..., choice], experts)
        slot_GSE = chosen_GSE.cumsum(1) - 1 + taken_GE[:, None]  # first choices come before second ones
        taken_GE = taken_GE + chosen_GSE.sum(1)
        kept_GSE = chosen_GSE * (slot_GSE < capacity)
        slot_GS = (slot_GSE * kept_GSE).sum(-1)
        parts.append((weights_GSK[..., choice, None] * kept_GSE, slot_GS))
        if choice == 0:
            balance = experts * (probs_GSE.mean(1) * chosen_GSE.float().mean(1)).sum(-1).mean()
    combine_GSEC = sum(
        torch.einsum("gse,gsc->gsec", weights_GSE, F.one_hot(slot_GS, capacity).to(weights_GSE.dtype))
        for weights_GSE, slot_GS in parts
    )
    assert isinstance(combine_GSEC, Tensor)
    return combine_GSEC, balance


def einsum_layer(
    x_TD: Tensor,
    gate_ED: Tensor,
    w1_EFD: Tensor,
    w2_EDF: Tensor,
    *,
    top_k: int,
    capacity_factor: float = 1.0,
    groups: int = 1,
) -> tuple[Tensor, Tensor]:
    """y_TD and the balance loss of experts that are MLPs with GELU.

    Args:
        groups: G, which divides T.
    """
    x_GSD = x_TD.view(groups, -1, x_TD.shape[1])
    experts = gate_ED.shape[0]
    capacity = capacity_of(capacity_factor, x_GSD.shape[1], top_k, experts)
    combine_GSEC, balance = combine_weights(F.linear(x_GSD.float(), gate_ED.float()), top_k, capacity)
    dispatch_GSEC = combine_GSEC.bool().to(x_TD.dtype)
    x_ERD = torch.einsum("gsec,gsd->egcd", dispatch_GSEC, x_GSD).flatten(1, 2)
    y_ERD = torch.bmm(F.gelu(torch.bmm(x_ERD, w1_EFD.mT)), w2_EDF.mT)
    y_EGCD = y_ERD.unflatten(1, (groups, capacity))
    y_TD = torch.einsum("gsec,egcd->gsd", combine_GSEC.to(x_TD.dtype), y_EGCD).reshape(x_TD.shape)
    return y_TD, balance
