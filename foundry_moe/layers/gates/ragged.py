"""From which experts each token has, to columns of choices as few as that takes.

Shapes: T tokens, E experts, K choices of the token that has most.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foundry_moe.layers.context import GateContext, unchanged
from foundry_moe.ops.operators import on_gpu
from foundry_moe.ops.select_topk import pack


def pack_choices(
    ranked_TE: Tensor, probs_TE: Tensor, context: GateContext, rows: int | None = None
) -> tuple[Tensor, Tensor, int]:
    """Each token's experts, by falling weight, with -1 where it has fewer than others.

    K is the largest over all processes that share the batch: they exchange these columns. One host synchronisation to
    learn K and how many choices there are; none on a GPU where `rows` is given and nothing is exchanged: K is E then.

    Args:
        ranked_TE: without gradient; below zero where an expert is not chosen, `probs_TE` where it is.
        probs_TE: combine weights; keeps its gradient.
        rows: choices in all, or a few more, where the host knows.

    Returns:
        experts_TK int64, weights_TK, and how many choices there are in all.
    """
    if rows is not None and on_gpu()(ranked_TE) and context.largest is unchanged:
        columns = ranked_TE.shape[1]
    else:
        number_T = (ranked_TE >= 0).sum(-1)
        most = number_T.max() if number_T.shape[0] else number_T.new_zeros(())
        columns, rows = torch.stack([context.largest(most), number_T.sum()]).tolist()
    weights_TK, experts_TK = pack(probs_TE, ranked_TE, max(columns, 1))
    return experts_TK, weights_TK, rows
