"""Which rows leave for which rank: planned on Triton kernels where these run, else in plain torch. Moves no message.

Shapes: T tokens, K choices, P ranks, C = min(P, K) ranks a token goes to at most, H chunks, S rows, D model width.
"""

from __future__ import annotations

import torch
from foundry_moe_kernels import departures, permutation, reference
from torch import Tensor

from foundry_moe.ops.routes import _sum_choices


class Departures:
    """A plan in two parts, so that ranks can tell each other what will come while the second is made.

    Args:
        experts_TK: integers; -1 = no choice. Rank e // local_experts has expert e.
        weights_TK: their combine weights, fp32 or fp64.
        nodes: rows lie in slots, by a rank's place on its node, then by the node; 1 = by rank.
        chunks: H; tokens leave in so many parts, ceil(T / H) in each, and rows lie by part, then by slot.

    counts_2PH2: int64; its first half has, by slot and chunk, rows for that rank and choices among them; its second,
        zeros, is for what the ranks answer.
    """

    def __init__(
        self,
        experts_TK: Tensor,
        weights_TK: Tensor,
        *,
        local_experts: int,
        ranks: int,
        nodes: int = 1,
        chunks: int = 1,
    ) -> None:
        self._experts_TK, self._weights_TK = experts_TK.contiguous(), weights_TK.detach().contiguous()
        self._local_experts, self._nodes = local_experts, nodes
        self._placed: tuple[Tensor, Tensor] | None = None
        if experts_TK.is_cuda:
            self.counts_2PH2, self._counts_PN = departures.count(self._experts_TK, local_experts, ranks, nodes, chunks)
            return
        counts_PH2, *placed = reference.departures(
            self._experts_TK, self._weights_TK, local_experts, ranks, nodes, chunks
        )
        self.counts_2PH2 = torch.stack([counts_PH2, torch.zeros_like(counts_PH2)])
        self._placed = (placed[0], placed[1])

    def place(self) -> tuple[Tensor, Tensor]:
        """row_TC (int32, -1 = none), and by row [S or more, 2 K] weights and experts as that rank numbers its own."""
        if self._placed is not None:
            return self._placed
        return departures.place(
            self._experts_TK, self._weights_TK, self._local_experts, self.counts_2PH2, self._counts_PN, self._nodes
        )


def gather_rows(x_TD: Tensor, row_TC: Tensor, rows: int | None = None) -> Tensor:
    """x_SD: tokens copied to their rows; rows of nobody are undefined. Without gradient.

    Args:
        rows: S; None = T * C, as many as there could be.
    """
    rows = row_TC.numel() if rows is None else rows
    if x_TD.is_cuda:
        return permutation.permute(x_TD.contiguous(), row_TC, row_TC, rows, zero_tail=False)
    x_SD = x_TD.new_empty(rows, x_TD.shape[1])
    token, place = (row_TC >= 0).nonzero(as_tuple=True)
    x_SD[row_TC[token, place].long()] = x_TD[token]
    return x_SD


def sum_rows(y_SD: Tensor, row_TC: Tensor) -> Tensor:
    """y_TD: the sum of each token's rows, in fp32 or better; zeros for a token without. Without gradient."""
    if y_SD.is_cuda:
        return permutation.combine(y_SD.contiguous(), None, row_TC)
    return _sum_choices(y_SD, None, row_TC)
