"""Copies of a layer's fullest experts on other ranks: which, where, and which tokens go to them. Sends nothing.

Every rank has a slot for each of its own experts and a few more for copies; to a dispatcher each slot is an expert. The
plan comes from the loads of the last steps, the same on every rank, and changes between steps only.

Shapes: T tokens, K choices, E experts, P ranks of an expert group, e = E / P local experts, N slots for copies on each
rank, S = P (e + N) slots, B buckets that tokens are divided into.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from foundry_moe.layers.gates.gate import Choices
from foundry_moe.ops.select_topk import count_choices

BUCKETS = 64
_STRIDE = 39  # no divisor of 64 but 1, and close to its golden section: neighbouring rows go to different copies
_LEAST = 0.02  # of an even share of rows: what moves fewer is not worth an expert's weights; a guess, not measured
_KEPT = 0.5  # of the loads of earlier steps in the next plan, so that one odd batch does not decide


def plan_copies(loads: Sequence[float], ranks: int, most: int) -> dict[int, list[float]]:
    """The share of each copied expert's tokens that each rank takes; others stay where they are. By expert.

    Again and again the fullest rank gives away of its fullest expert what it has above the mean, to the emptiest rank
    first, which takes no more than it lacks.

    Args:
        loads: choices of each expert; rank e // (E / P) has expert e.
        most: experts to copy at most.
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
    """Where the tokens of one rank go, if all ranks have as many: what its own copy can take stays there."""
    part = 1.0 / len(share)
    here = [min(taken, part) for taken in share]
    room = [taken - own for taken, own in zip(share, here, strict=True)]
    left = (part - here[sender]) / sum(room) if sum(room) > 0 else 0.0
    sent = [left * taken for taken in room]
    sent[sender] += here[sender]
    return [amount / sum(sent) for amount in sent]


@dataclass(frozen=True, kw_only=True)
class WeightTraffic:
    """Whose weights a rank sends to and gets from each other rank, so that copies have them.

    sent_P: local numbers of own experts, by the rank that they go to. received_P: how many copies come from each rank;
    they lie in the slots for copies in this order.
    """

    sent_P: list[list[int]]
    received_P: list[int]


class HotExperts:
    """The slots of one layer on one rank.

    Args:
        num_experts, ranks, rank: E, P and this rank's index among them.
        copies: N.

    num_slots: S, for the dispatcher.
    traffic: None while nothing is copied.
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
        """Plans the next step. Every rank must give the same numbers.

        Args:
            counts: choices of each expert in the last step, of all ranks.
        """
        earlier = self.loads or counts
        self.loads = [_KEPT * old + (1.0 - _KEPT) * new for old, new in zip(earlier, counts, strict=True)]
        self.use(plan_copies(self.loads, self.ranks, self.copies))

    def use(self, shares: dict[int, list[float]]) -> None:
        """Takes a plan, as `plan_copies` makes it."""
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
        """The choices by slot. A token's row number decides which copy it goes to. Without a host wait."""
        experts_TK = choices.experts_TK
        if self._slot_EB.device != experts_TK.device:
            self._slot_EB, self.counts_S = self._slot_EB.to(experts_TK.device), self.counts_S.to(experts_TK.device)
        bucket_T1 = torch.arange(experts_TK.shape[0], device=experts_TK.device)[:, None] % BUCKETS
        slots_TK = self._slot_EB[experts_TK.clamp(min=0).long(), bucket_T1]
        slots_TK = torch.where(experts_TK >= 0, slots_TK, -1).to(experts_TK.dtype)
        if torch.is_grad_enabled():
            self.counts_S += count_choices(slots_TK, self.num_slots)
        return replace(choices, experts_TK=slots_TK)
