"""Plans which rows are sent to which rank, on Triton kernels where they run, else in plain torch. Sends nothing.

Shapes: T tokens, K choices, P ranks, C = min(P, K) ranks a token goes to at most, S rows, D model width,
N blocks of tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from foundry_moe_kernels import dispatch_plan as kernels
from foundry_moe_kernels import permute as permute_kernels
from torch import Tensor

from foundry_moe.ops.operators import on_gpu
from foundry_moe.ops.permute import sum_choices

# room_P2, int64 by slot: rows, and choices among them, that each rank has room for; and the sum of these rows
Room = tuple[Tensor, int]
# room -> row_TC (int32, -1 = none), and by row [S or more, 2 K] combine weights and local expert numbers. A rank with
# more than its room gets nothing, and rows that are not in use have experts -1. None = as much room as is needed.
AssignRows = Callable[[Room | None], tuple[Tensor, Tensor]]


def plan_dispatch(
    experts_TK: Tensor, weights_TK: Tensor, *, local_experts: int, ranks: int, nodes: int = 1
) -> tuple[Tensor, AssignRows]:
    """How many rows go to each rank, and a function that plans which: so counts are exchanged while it runs.

    Args:
        experts_TK: integers; -1 = no choice. Rank e // local_experts has expert e.
        weights_TK: their combine weights, fp32 or fp64.
        nodes: rows are sorted by slot: by a rank's index on its node, then by the node; 1 = by rank.

    Returns:
        counts_P2: int64; by slot, rows for that rank and choices among them.
        assign_rows: see `AssignRows`.
    """
    experts_TK, weights_TK = experts_TK.contiguous(), weights_TK.detach().contiguous()
    if not on_gpu()(experts_TK):
        return plan_plain(experts_TK, weights_TK, local_experts, ranks, nodes)
    counts_P2, counts_PN = kernels.count_rows(experts_TK, local_experts, ranks, nodes)
    return counts_P2, lambda room: kernels.assign_rows(
        experts_TK, weights_TK, local_experts, counts_P2, counts_PN, nodes, room
    )


def plan_plain(
    experts_TK: Tensor, weights_TK: Tensor, local_experts: int, ranks: int, nodes: int = 1
) -> tuple[Tensor, AssignRows]:
    """The plain twin of both kernels; without `room` its packed rows are only those in use."""
    experts_TK = experts_TK.long()
    choices = experts_TK.shape[1]
    rank_TK = torch.where(experts_TK >= 0, experts_TK // local_experts, -1)
    rank_P = torch.arange(ranks, device=experts_TK.device)
    slot_P = (rank_P % (ranks // nodes)) * nodes + rank_P // (ranks // nodes)
    hits_TKP = rank_TK[:, :, None] == rank_P
    by_slot_P = torch.argsort(slot_P)
    present_PT = hits_TKP.any(1)[:, by_slot_P].T
    counts_P2 = torch.stack([present_PT.sum(1), hits_TKP.sum((0, 1))[by_slot_P]], dim=1)

    def assign_rows(room: Room | None) -> tuple[Tensor, Tensor]:
        room_P2, rows = room or (counts_P2, int(counts_P2[:, 0].sum()))
        sent_PT = present_PT & (counts_P2 <= room_P2).all(1)[:, None]
        first_P1 = (room_P2[:, 0].cumsum(0) - room_P2[:, 0])[:, None]
        row_TP = torch.where(sent_PT, first_P1 + sent_PT.cumsum(1) - 1, -1)[slot_P].T
        row_TC = row_TP
        if ranks > choices:
            first_TKP = hits_TKP & (hits_TKP.cumsum(1) == 1)
            row_TC = torch.where(first_TKP.any(-1), (row_TP[:, None] * first_TKP).sum(-1), -1)
        token, rank = (row_TP >= 0).nonzero(as_tuple=True)
        local = torch.where(rank_TK[token] == rank[:, None], experts_TK[token] - rank[:, None] * local_experts, -1)
        packed = weights_TK.new_full((rows, 2 * choices), -1)
        packed[row_TP[token, rank]] = torch.cat([weights_TK[token], local.to(weights_TK.dtype)], dim=1)
        return row_TC.int().contiguous(), packed

    return counts_P2, assign_rows


def plan_rounds(
    choices_PP: Tensor, experts_TK: Tensor, rank: int, *, local_experts: int, buffer: float
) -> list[slice] | None:
    """The parts in which this rank sends its tokens, so that no rank gets more than its limit at once; None = one.

    A sender's share of a rank's limit is its share of all choices for that rank. So a rank receives in one round at
    most its limit and K more choices from each sender, however they are spread over the batch. Waits for the device.

    Args:
        choices_PP: choices that go from each rank to each, on the host.
        experts_TK: of this rank's tokens.
        buffer: the limit, as a multiple of the mean of all ranks' choices.
    """
    received_P = choices_PP.sum(0)
    limit = buffer * int(received_P.sum()) / len(received_P)
    if received_P.max() <= limit:
        return None
    sent_P, top_k = choices_PP[rank].tolist(), experts_TK.shape[1]
    most_choices = {  # K or more, so that a part has room for a token
        to: max(math.ceil(limit * sent_P[to] / received), top_k)
        for to, received in enumerate(received_P.tolist())
        if received > limit
    }
    ranks = torch.tensor(list(most_choices), device=experts_TK.device)
    chosen_TX = (experts_TK[:, :, None] // local_experts == ranks).sum(1)
    until_XT = chosen_TX.cumsum(0).T.contiguous().cpu()
    most_X1 = torch.tensor(list(most_choices.values()))[:, None]
    parts, begin = [], 0
    while begin < len(experts_TK):
        before_X1 = until_XT[:, begin - 1, None] if begin else 0
        end = int(torch.searchsorted(until_XT, before_X1 + most_X1, right=True).min())  # as many tokens as possible
        assert end > begin, "a part has room for a token"
        parts.append(slice(begin, end))
        begin = end
    return parts


def gather_rows(x_TD: Tensor, row_TC: Tensor, rows: int | None = None, *, zeros: bool = False) -> Tensor:
    """x_SD: tokens copied to their rows. Without gradient.

    Args:
        rows: S; None = T * C, the most without `room`.
        zeros: in unused rows, which are undefined otherwise.
    """
    rows = row_TC.numel() if rows is None else rows
    if on_gpu()(x_TD):
        return permute_kernels.permute(x_TD.contiguous(), row_TC, None, rows, zeros=zeros)
    x_SD = (x_TD.new_zeros if zeros else x_TD.new_empty)(rows, x_TD.shape[1])
    token, column = (row_TC >= 0).nonzero(as_tuple=True)
    x_SD[row_TC[token, column].long()] = x_TD[token]
    return x_SD


def sum_rows(y_SD: Tensor, row_TC: Tensor) -> Tensor:
    """y_TD: the sum of each token's rows, in fp32 or better; zeros for a token without. Without gradient."""
    if on_gpu()(y_SD):
        return permute_kernels.unpermute(y_SD.contiguous(), None, row_TC)
    return sum_choices(y_SD, None, row_TC)
