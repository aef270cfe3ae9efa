"""Rows stored straight into the memory of other ranks: on Triton kernels between GPUs, else in plain torch.

Shapes: P ranks, H chunks, T tokens, K choices, C = min(P, K) ranks a token goes to at most, X rows, D their width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from foundry_moe_kernels import peer_rows as kernels
from torch import Tensor

from foundry_moe.ops.operators import on_gpu


@dataclass(frozen=True, kw_only=True)
class PeerRegion:
    """Memory of each rank of a group that all of them write to.

    memory: uint8, one tensor a rank, all of `size` bytes; `me` is this rank's.
    pointers_P: int64, their addresses, multiples of 16.
    """

    memory: tuple[Tensor, ...]
    pointers_P: Tensor
    me: int
    size: int

    def limit(self, like: Tensor) -> int:
        """How many rows as wide as `like`'s fit."""
        return self.size // max(like.shape[1] * like.element_size(), 1)

    def rows(self, rank: int, width: int, dtype: torch.dtype) -> Tensor:
        """The memory of one rank as rows."""
        wide = width * dtype.itemsize
        count = self.size // max(wide, 1)
        return self.memory[rank][: count * wide].view(dtype).view(count, width)


def store_counts(counts_PH2: Tensor, region: PeerRegion) -> None:
    """Stores this rank's counts (int64) into the memory of each rank, as the row of this rank."""
    if on_gpu()(counts_PH2):
        return kernels.store_counts(counts_PH2, region.pointers_P, region.me)
    for rank in range(len(region.memory)):
        region.rows(rank, counts_PH2.numel(), torch.int64)[region.me].copy_(counts_PH2.flatten())


def plan_places(stored_PPH2: Tensor, me: int) -> tuple[Tensor, Tensor]:
    """Where rows of this rank go, and where those that it gets go back to.

    Rows to send lie by chunk, then by rank; rows received by chunk, then by the rank that they came from.

    Args:
        stored_PPH2: what each rank has stored by `store_counts`: [from][to][chunk], rows and choices among them.

    Returns:
        counts_PPH2: a copy.
        places_H23P: int32. [:, 0] are blocks of rows to send, [:, 1] blocks of rows received, to be sent back: for each
            rank where its block begins (of those received: among its chunk's), how many rows it has, and where it
            begins in the memory of that rank.
    """
    if on_gpu()(stored_PPH2):
        return kernels.plan_places(stored_PPH2, me)
    return plan_places_plain(stored_PPH2, me)


def plan_places_plain(stored_PPH2: Tensor, me: int) -> tuple[Tensor, Tensor]:
    """The plain twin of `plan_places`."""
    rows_HSP = stored_PPH2[..., 0].permute(2, 0, 1)
    sent_HS, received_HP = rows_HSP.sum(2), rows_HSP.sum(1)
    within_source_HSP = rows_HSP.cumsum(2) - rows_HSP
    within_target_HSP = rows_HSP.cumsum(1) - rows_HSP
    begin_HSP = (sent_HS.cumsum(0) - sent_HS)[:, :, None] + within_source_HSP
    target_HSP = (received_HP.cumsum(0) - received_HP)[:, None] + within_target_HSP
    out_H3P = torch.stack([begin_HSP[:, me], rows_HSP[:, me], target_HSP[:, me]], dim=1)
    back_H3P = torch.stack([within_target_HSP[:, :, me], rows_HSP[:, :, me], begin_HSP[:, :, me]], dim=1)
    return stored_PPH2.clone(), torch.stack([out_H3P, back_H3P], dim=1).int()


def store_tokens(
    x_TD: Tensor,
    row_TC: Tensor,
    experts_TK: Tensor,
    local_experts: int,
    places_3P: Tensor,
    region: PeerRegion,
    tokens: range,
) -> None:
    """Stores each of some tokens to its row in the memory of each of its ranks.

    Args:
        row_TC: from `DispatchPlan.assign_rows`; of `experts_TK`.
        places_3P: where rows of these tokens' chunk go, of `plan_places`.
    """
    limit = region.limit(x_TD)
    if on_gpu()(x_TD):
        return kernels.store_tokens(
            x_TD, row_TC, experts_TK, local_experts, places_3P, region.pointers_P, limit, tokens
        )
    ranks = len(region.memory)
    begin_P, _, target_P = places_3P.tolist()
    rank_TC = experts_TK // local_experts if ranks > experts_TK.shape[1] else torch.arange(ranks).expand(row_TC.shape)
    for rank in range(ranks):
        sent = (row_TC >= 0) & (rank_TC == rank)
        sent[: tokens.start], sent[tokens.stop :] = False, False
        token, column = sent.nonzero(as_tuple=True)
        target = row_TC[token, column].long() - begin_P[rank] + target_P[rank]
        fits = target < limit
        region.rows(rank, x_TD.shape[1], x_TD.dtype)[target[fits]] = x_TD[token[fits]]


def store_blocks(rows_XD: Tensor, places_3P: Tensor, region: PeerRegion) -> None:
    """Stores blocks of rows, one for each rank, where `places_3P` says, into the ranks' memory."""
    limit = region.limit(rows_XD)
    if on_gpu()(rows_XD):
        return kernels.store_blocks(rows_XD, places_3P, region.pointers_P, limit, region.me)
    for rank, (begin, count, target) in enumerate(places_3P.T.tolist()):
        count = max(min(count, limit - target), 0)
        rows = region.rows(rank, rows_XD.shape[1], rows_XD.dtype)
        rows[target : target + count] = rows_XD[begin : begin + count]
