"""Auxiliary losses of a gate, each a function of tensors. Means and sums are over the real tokens of one process
unless stated otherwise.

Shapes: T tokens, E experts, K choices per token. `mask_T` is True for real tokens; padding is left out of all sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from foundry_moe.layers.context import TokenSequences, unchanged
from foundry_moe.ops.softmax_topk import masked_mean, masked_sum

_LEAST_DEVIATION = 1e-6  # below, the gradient of Phi is 0 times an infinite ratio


def sequence_balance_loss(
    probs_TE: Tensor, experts_TK: Tensor, sequences: TokenSequences, mask_T: Tensor | None = None
) -> Tensor:
    """The mean, over real tokens, of the balance loss of the sequence that a token is in.

    For sequences of one length, this is the loss of DeepSeek-V3 (2412.19437, equations 17 to 20); for packed documents,
    it is the mean weighted by length. So it is the same however a batch is divided over ranks and microbatches.

    Args:
        experts_TK: -1 is no choice.
    """
    num_experts = probs_TE.shape[1]
    if mask_T is not None:
        experts_TK = experts_TK.masked_fill(~mask_T[:, None], -1)
    entries = sequences.num_sequences * num_experts
    at_TK = torch.where(experts_TK >= 0, sequences.index_T[:, None] * num_experts + experts_TK, entries)
    counts = torch.zeros(entries + 1, dtype=torch.int64, device=experts_TK.device)
    counts.scatter_add_(0, at_TK.flatten(), torch.ones_like(at_TK).flatten())
    counts_NE = counts[:-1].view(sequences.num_sequences, num_experts)
    share_NE = counts_NE.to(probs_TE.dtype) / counts_NE.sum(-1, keepdim=True).clamp(min=1)
    return num_experts * masked_mean((probs_TE * share_NE[sequences.index_T]).sum(-1), mask_T)


def variation_squared(
    values_TE: Tensor, mask_T: Tensor | None = None, sum_over: Callable[[Tensor], Tensor] = unchanged
) -> Tensor:
    """The squared coefficient of variation of the experts' sums; 0 when even or where all is zero.

    Of combine weights, zero where an expert is not chosen, it is the loss `importance` (Shazeer et al. 2017, equations
    6 and 7); of `chosen_with_new_noise`, the expected loads, `load` (appendix A, equations 10 and 11).

    Args:
        sum_over: sums a tensor over the processes or microbatches that the loss covers. The value is then that of all
            of them; the gradient is this part's, over its share of the tokens, so that parts weighed by their tokens
            have the gradient of the whole.
    """
    totals_E = masked_sum(values_TE, mask_T)
    if sum_over is not unchanged:
        one = totals_E.new_ones(1)
        real_1 = one * values_TE.shape[0] if mask_T is None else mask_T.sum() * one
        whole = sum_over(torch.cat([totals_E.detach(), real_1]))
        totals_E = whole[:-1] + (totals_E - totals_E.detach()) * (whole[-1] / real_1.clamp(min=1))
    mean = totals_E.mean()
    return (totals_E - mean).square().mean() / mean.square().clamp(min=torch.finfo(totals_E.dtype).tiny)


def chosen_with_new_noise(clean_TE: Tensor, noisy_TE: Tensor, deviation_TE: Tensor, k: int) -> Tensor:
    """P(x, e) [T, E]: the chance that e is among the k best if its own noise alone is drawn again.

    Phi((clean_e - kth_excluding(noisy, k, e)) / deviation_e) (Shazeer et al. 2017, equations 8 and 9).

    Args:
        clean_TE, noisy_TE: logits without and with noise.
        deviation_TE: of the noise, at least 0.
        k: below E.
    """
    assert k < clean_TE.shape[1]
    best_TK = noisy_TE.topk(k + 1, dim=-1).values
    kth_T1, next_T1 = best_TK[:, k - 1 : k], best_TK[:, k : k + 1]
    # without an expert that is among the k best, the k-th best is the next one
    threshold_TE = torch.where(noisy_TE > next_T1, next_T1, kth_T1)
    return torch.special.ndtr((clean_TE - threshold_TE) / deviation_TE.clamp(min=_LEAST_DEVIATION))


def alignment_loss(probs_TE: Tensor, inside_TE: Tensor, last_chosen_T: Tensor, mask_T: Tensor | None = None) -> Tensor:
    """mean over tokens of sum over e outside the group of max(0, p_e - p of the k-th choice) (Jiang et al. 2021, SAM).

    Zero once no expert outside a token's group is better than the worst one chosen inside it.

    Args:
        inside_TE: bool, the experts of the token's group.
        last_chosen_T: p of the k-th choice.
    """
    excess_TE = (probs_TE - last_chosen_T[:, None]).clamp(min=0)
    return masked_mean(excess_TE.masked_fill(inside_TE, 0).sum(-1), mask_T)


@torch.no_grad()
def gate_entropy(logits_TE: Tensor, mask_T: Tensor | None = None, *, score: str = "softmax") -> Tensor:
    """The mean over tokens of the entropy of the gate's probabilities, over log E. A measurement, not a loss.

    1 if all probabilities are equal, 0 if each token has one expert of probability 1; loads may be even in both cases.

    Args:
        score: softmax | sigmoid, whose scores are normalised first.
    """
    if score == "sigmoid":
        scores_TE = logits_TE.sigmoid()
        probs_TE = scores_TE / scores_TE.sum(-1, keepdim=True).clamp(min=torch.finfo(scores_TE.dtype).tiny)
    else:
        probs_TE = logits_TE.softmax(-1)
    return masked_mean(torch.special.entr(probs_TE).sum(-1), mask_T) / math.log(max(2, logits_TE.shape[-1]))
