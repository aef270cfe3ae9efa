"""Auxiliary losses of a router, each a function of tensors.

Shapes: T tokens, E experts, K choices a token. `mask_T` is True for real tokens; padding takes part in nothing.
"""

import torch
from torch import Tensor


def masked_mean(values_T: Tensor, mask_T: Tensor | None) -> Tensor:
    """The mean over real tokens along the first dimension; zero where there is none."""
    if mask_T is None:
        return values_T.sum(0) / max(values_T.shape[0], 1)
    weight = mask_T.to(values_T.dtype).reshape(-1, *[1] * (values_T.dim() - 1))
    return (values_T * weight).sum(0) / weight.sum().clamp(min=1)


def balance_loss(probs_TE: Tensor, counts_E: Tensor, mask_T: Tensor | None = None) -> Tensor:
    """E * sum_e f_e P_e: 1 when even (Fedus et al. 2021, equations 4 to 6, over all choices as in GShard's top-2).

    Args:
        probs_TE: router probabilities, rows sum to one.
        counts_E: choices per expert of the real tokens; carries no gradient.
    """
    share_E = counts_E.to(probs_TE.dtype) / counts_E.sum().clamp(min=1)
    return probs_TE.shape[1] * (share_E * masked_mean(probs_TE, mask_T)).sum()


def z_loss(logits_TE: Tensor, mask_T: Tensor | None = None) -> Tensor:
    """The mean of logsumexp(logits)^2 (Zoph et al. 2022, ST-MoE, equation 5)."""
    return masked_mean(torch.logsumexp(logits_TE, dim=-1).square(), mask_T)
