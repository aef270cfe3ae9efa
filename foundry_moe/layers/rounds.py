"""Experts in rounds: a batch that sends far more than an even share of rows here is computed part by part.

The first round keeps what its backward pass needs; later ones are computed again there, so the most memory that experts
take does not depend on the router. No token is dropped, and other processes need not know.

Shapes: Q tokens received, K choices, R rows (a token has one for each of its experts here), D model width.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from foundry_moe.ops import PermutePlan, plan_permute

ExpertMLP = Callable[[Tensor, Tensor | None, PermutePlan], Tensor]


def compute_in_rounds(
    expert_mlp: ExpertMLP, x_QD: Tensor, weights_QK: Tensor | None, plan: PermutePlan, most_rows: int | None
) -> tuple[Tensor, int]:
    """y_QD, and in how many rounds it was computed: one, unless there are more rows than `most_rows`.

    With several, the host waits once for the device.

    Args:
        plan: of all tokens; as many rows as it was made for count.
        most_rows: of a round; None = no limit. Never fewer than a token's choices.
    """
    if most_rows is None or plan.num_rows <= most_rows:
        return expert_mlp(x_QD, weights_QK, plan), 1
    tokens, rows = _bounds(plan, most_rows)
    outputs = []
    for number, (start, end) in enumerate(pairwise(tokens)):
        part = plan_permute(plan.experts_TK[start:end], plan.num_experts, rows[number + 1] - rows[number])
        weights = None if weights_QK is None else weights_QK[start:end]
        if number == 0:
            outputs.append(expert_mlp(x_QD[start:end], weights, part))
        else:
            outputs.append(
                checkpoint(expert_mlp, x_QD[start:end], weights, part, use_reentrant=False, preserve_rng_state=False)
            )
    return torch.cat(outputs), len(outputs)


def _bounds(plan: PermutePlan, most_rows: int) -> tuple[list[int], list[int]]:
    """The first token of each round and the rows before it; then all tokens and all rows."""
    count, choices = plan.experts_TK.shape
    step = max(most_rows - choices + 1, 1)  # a round takes tokens until it has so many rows; the last adds K at most
    ends_Q = (plan.experts_TK >= 0).sum(1).cumsum(0)
    rounds = -(-plan.num_rows // step)
    wanted = torch.arange(1, rounds, device=ends_Q.device) * step
    first = torch.searchsorted(ends_Q, wanted) + 1  # the token after the one that reaches so many rows
    before = ends_Q[(first - 1).clamp(max=count - 1)]
    first_host, before_host, used = torch.cat((first, before, ends_Q[-1:])).cpu().split((rounds - 1, rounds - 1, 1))
    tokens, rows = [0], [0]
    for token, row in zip(first_host.tolist(), before_host.tolist(), strict=True):
        if tokens[-1] < token < count:
            tokens.append(token)
            rows.append(row)
    return [*tokens, count], [*rows, int(used)]
