"""Plans copies of a layer's most loaded experts on other ranks, and which tokens use them. Sends nothing.

Every rank has a slot for each of its own experts and N more for copies; the dispatcher treats each slot as an expert.
The plan follows from the loads of the last steps, which are equal on all ranks, and changes only between steps.

Shapes: T tokens, K choices, E experts, P ranks of an expert group, e = E / P local experts, N slots for copies on each
rank, S = P (e + N) slots, B buckets of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from foundry_moe.layers.gates.gate import Choices
from foundry_moe.ops.select_topk import count_choices

BUCKETS = 64
_STRIDE = 39  # coprime to 64 and near its golden section, so that neighbouring rows use different copies
_LEAST = 0.02  # of an even share of rows: below it a copy is not worth sending its weights; not measured
_KEPT = 0.5  # weight of earlier steps' loads in the next plan, so that one unusual batch does not decide it


def plan_copies(loads: Sequence[float], ranks: int, most: int) -> dict[int, list[float]]:
    """By copied expert, the share of its tokens that each rank computes.

    Repeats: the rank with the most rows moves its rows above the mean, taken from its most loaded expert, to the ranks
    with the fewest rows, each of which receives at most as many rows as it is below the mean.

    Args:
        loads: choices of each expert; rank e // (E / P) has expert e.
        most: the largest number of experts to copy.
    """
    local = len(loads) // ranks
    rows = [float(sum(loads[rank * local : (rank + 1) * local])) for rank in range(ranks)]
    even = sum(rows) / ranks
    least = _LEAST * even
    shares: dict[int, list[float]] = {}
    while len(shares) < most:
        full = max(range(ranks), key=rows.__getitem__)
        rest = [expert for expert in range(full * local, (full + 1) * local) if expert not in shares]
        if not rest:
            break
        expert = max(rest, key=loads.__getitem__)
        left = min(rows[full] - even, loads[expert])
        share = [0.0] * ranks
        for rank in sorted(range(ranks), key=rows.__getitem__):
            moved = min(left, even - rows[rank])
            if moved <= least:
                break
            share[rank] = moved / loads[expert]
            rows[rank] += moved
            rows[full] -= moved
            left -= moved
        if not any(share):
            break
        share[full] = max(1.0 - sum(share), 0.0)
        shares[expert] = share
    return dict(sorted(shares.items()))


def shares_of_sender(share: Sequence[float], sender: int) -> list[float]:
    """How one rank's tokens are divided over the copies, its own copy first; all ranks have equally many tokens."""
    part = 1.0 / len(share)
    here = [min(taken, part) for taken in share]
    room = [taken - own for taken, own in zip(share, here, strict=True)]
    left = (part - here[sender]) / sum(room) if sum(room) > 0 else 0.0
    sent = [left * taken for taken in room]
    sent[sender] += here[sender]
    return [amount / sum(sent) for amount in sent]


@dataclass(frozen=True, kw_only=True)
class WeightTraffic:
    """The weights that a rank exchanges with each other rank for copies.

    sent_P: local numbers of own experts, by receiving rank.
    received_P: number of copies from each rank, which fill the slots for copies in this order.
    """

    sent_P: list[list[int]]
    received_P: list[int]


class HotExperts:
    """The slots of one layer on one rank.

    Args:
        num_experts, ranks, rank: E, P and this rank's index among them.
        copies: N.

    num_slots: S, for the dispatcher.
    traffic: None while there are no copies.
    counts_S: int64, choices of this rank's tokens by slot, in passes with gradient since `reset`.
    """

    def __init__(self, *, num_experts: int, ranks: int, rank: int, copies: int) -> None:
        self.ranks, self.rank, self.copies = ranks, rank, copies
        self.local_experts = num_experts // ranks
        self.num_slots = num_experts + ranks * copies
        self.loads: list[float] = []
        self.traffic: WeightTraffic | None = None
        self.counts_S = torch.zeros(self.num_slots, dtype=torch.int64)
        expert_E = torch.arange(num_experts)
        self._own_E = expert_E + expert_E // self.local_experts * copies
        self._slot_EB = self._own_E[:, None].repeat(1, BUCKETS)

    def reset(self) -> None:
        self.counts_S.zero_()

    def after_step(self, counts: Sequence[int]) -> None:
        """Plans the next step. All ranks must pass the same numbers.

        Args:
            counts: choices of each expert in the last step, of all ranks.
        """
        earlier = self.loads or counts
        self.loads = [_KEPT * old + (1.0 - _KEPT) * new for old, new in zip(earlier, counts, strict=True)]
        self.use(plan_copies(self.loads, self.ranks, self.copies))

    def use(self, shares: dict[int, list[float]]) -> None:
        """Applies a plan of `plan_copies`."""
        sent_P: list[list[int]] = [[] for _ in range(self.ranks)]
        received_P, used_P = [0] * self.ranks, [0] * self.ranks
        slot_EB = self._own_E[:, None].repeat(1, BUCKETS)
        for expert, share in shares.items():
            owner, number = divmod(expert, self.local_experts)
            slots = []
            for rank, taken in enumerate(share):
                if rank == owner or not taken:
                    slots.append(int(self._own_E[expert]))
                    continue
                slots.append(rank * (self.local_experts + self.copies) + self.local_experts + used_P[rank])
                used_P[rank] += 1
                if owner == self.rank:
                    sent_P[rank].append(number)
                if rank == self.rank:
                    received_P[owner] += 1
            ends = [round(BUCKETS * end) for end in accumulate(shares_of_sender(share, self.rank))]
            bucket_B = torch.arange(BUCKETS) * _STRIDE % BUCKETS
            for slot, first, end in zip(slots, [0, *ends], ends, strict=False):
                slot_EB[expert, bucket_B[first:end]] = slot
        self.traffic = WeightTraffic(sent_P=sent_P, received_P=received_P) if shares else None
        self._slot_EB = slot_EB.to(self._slot_EB.device)

    def renumber(self, choices: Choices) -> Choices:
        """The choices by slot. A token's row number selects the copy. No host synchronization."""
        experts_TK = choices.experts_TK
        if self._slot_EB.device != experts_TK.device:
            self._slot_EB, self.counts_S = self._slot_EB.to(experts_TK.device), self.counts_S.to(experts_TK.device)
        bucket_T1 = torch.arange(experts_TK.shape[0], device=experts_TK.device)[:, None] % BUCKETS
        slots_TK = self._slot_EB[experts_TK.clamp(min=0).long(), bucket_T1]
        slots_TK = torch.where(experts_TK >= 0, slots_TK, -1).to(experts_TK.dtype)
        if torch.is_grad_enabled():
            self.counts_S += count_choices(slots_TK, self.num_slots)
        return replace(choices, experts_TK=slots_TK)
