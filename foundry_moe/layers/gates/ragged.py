"""From which experts each token has, to columns of choices as few as that takes.

Shapes: T tokens, E experts, K choices of the token that has most.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foundry_moe.layers.context import GateContext
from foundry_moe.ops.topk import topk


def pack_choices(chosen_TE: Tensor, weights_TE: Tensor, context: GateContext) -> tuple[Tensor, Tensor, int]:
    """Each token's experts, by falling weight, with -1 where it has fewer than others.

    One host synchronisation. K is the largest over all processes that share the batch: they exchange these columns.

    Args:
        chosen_TE: bool.
        weights_TE: positive where chosen; keeps its gradient.

    Returns:
        experts_TK int64, weights_TK, and how many choices there are in all.
    """
    number_T = chosen_TE.sum(-1)
    most = number_T.max() if number_T.shape[0] else number_T.new_zeros(())
    columns, rows = torch.stack([context.largest(most), number_T.sum()]).tolist()
    columns = max(columns, 1)
    ranked_TE = weights_TE.detach().masked_fill(~chosen_TE, -1)
    experts_TK = topk(ranked_TE, columns)[1]
    absent_TK = ~chosen_TE.gather(1, experts_TK)
    weights_TK = weights_TE.gather(1, experts_TK).masked_fill(absent_TK, 0)
    return experts_TK.masked_fill(absent_TK, -1), weights_TK, rows
