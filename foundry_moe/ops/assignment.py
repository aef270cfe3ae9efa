"""The linear assignment of BASE layers: every expert gets the same number of tokens, and the scores' sum is large.

Three steps, all on the scores' device: smoothed dual ascent finds prices of experts at which loads are nearly
even; auction rounds (Bertsekas 1988; Bertsekas and Castanon 1989 for experts with many equal slots) raise prices
until tokens that compete for a slot agree; what is left after the allowed rounds goes, by largest regret first,
to experts with room.

If the auction ends by itself, the sum is within T * epsilon of the optimum: each token is within epsilon of its
best offer at the final prices. The tail of an auction is a few tokens outbidding each other for hundreds of rounds;
cutting it off after 16 costs on average less than two epsilon per token (see tests and benchmarks).

Shapes: T tokens, E experts.
"""

from __future__ import annotations

from typing import Any

import torch
from foundry_moe_kernels import assignment as kernels
from torch import Tensor

from foundry_moe.ops.operators import NAMESPACE, on_gpu

_ASCENT_STEPS = 40
_WARM, _COLD = 1.0, 0.01  # temperatures of the ascent, in deviations of the scores
_TEMPERATURES = [_WARM * (_COLD / _WARM) ** (step / (_ASCENT_STEPS - 1)) for step in range(_ASCENT_STEPS)]
_CHECK_EVERY = 8  # rounds between two looks at whether the auction is over: each look waits for the device


@torch.library.custom_op(f"{NAMESPACE}::assign", mutates_args=())  # its loops read the device: no graph can hold them
def assign(
    scores_TE: Tensor, mask_T: Tensor | None = None, *, epsilon: float = 0.01, rounds: int | None = 16
) -> Tensor:
    """The expert of each token, int64 [T]; experts' loads differ by one at most. -1 for tokens that are not real.

    The same scores give the same result on every run; ties go to the lower token and the lower expert.

    Args:
        scores_TE: any float dtype, finite.
        mask_T: True for tokens that take part; None = all.
        epsilon: in standard deviations of the scores of a token.
        rounds: of the auction at most; None = until it ends.
    """
    tokens, experts = scores_TE.shape
    device = scores_TE.device
    mask_T = torch.ones(tokens, dtype=torch.bool, device=device) if mask_T is None else mask_T
    if tokens == 0 or experts == 1:
        return torch.where(mask_T, 0, -1)
    real = mask_T.sum()
    room_E = (real // experts + (torch.arange(experts, device=device) < real % experts)).int()
    values_TE = _standardise(scores_TE.float(), mask_T)
    values_TE = values_TE.masked_fill(room_E == 0, -torch.inf)
    expert_T = torch.where(mask_T, experts, -1).int()  # E: a token without a slot
    steps = kernels if on_gpu()(scores_TE) else Plain
    price_E = steps.ascend(values_TE, expert_T, room_E.float().clamp(min=1).log(), _TEMPERATURES)
    _auction(steps, values_TE, price_E, expert_T, room_E, epsilon, rounds)
    _fill(steps, values_TE, price_E, expert_T, room_E)
    return expert_T.long()


@assign.register_fake
def _(scores_TE, mask_T=None, *, epsilon=0.01, rounds=16):  # type: ignore[no-untyped-def]
    return scores_TE.new_empty(scores_TE.shape[0], dtype=torch.int64)


def _standardise(scores_TE: Tensor, mask_T: Tensor) -> Tensor:
    """Each token's scores less their mean, over the deviation of all: a constant for all experts changes nothing."""
    centred_TE = scores_TE - scores_TE.mean(1, keepdim=True)
    real = mask_T.sum().clamp(min=1)
    deviation = (centred_TE.square().mean(1) * mask_T).sum().div(real).sqrt()
    return centred_TE / torch.where(deviation > 0, deviation, 1.0)


def _auction(
    steps: Any, values_TE: Tensor, price_E: Tensor, expert_T: Tensor, room_E: Tensor, epsilon: float, rounds: int | None
) -> None:
    """Rounds of bids until every token has a slot; `price_E` and `expert_T` are changed in place."""
    experts = room_E.shape[0]
    # a bound on any gain, so that bids stay finite where only one expert has room
    finite_TE = values_TE.masked_fill(values_TE == -torch.inf, 0)
    most = finite_TE.max() - finite_TE.min()
    bid_T = torch.zeros_like(values_TE[:, 0])
    done = 0
    while rounds is None or done < rounds:
        if done % _CHECK_EVERY == 0 and not bool((expert_T == experts).any()):
            break
        done += 1
        steps.bid(values_TE, price_E, room_E, expert_T, bid_T, most=most, epsilon=epsilon, final=False)
        steps.settle(expert_T, bid_T, room_E, price_E)


def _fill(steps: Any, values_TE: Tensor, price_E: Tensor, expert_T: Tensor, room_E: Tensor) -> None:
    """Gives every token without a slot one at an expert with room; a round that leaves tokens over fills an expert."""
    experts = room_E.shape[0]
    load_E1 = torch.zeros(experts + 1, dtype=torch.int32, device=expert_T.device)
    assigned_T = torch.where(expert_T < 0, experts, expert_T).long()
    left_E = room_E - load_E1.scatter_add(0, assigned_T, torch.ones_like(expert_T))[:experts]
    regret_T = torch.zeros_like(values_TE[:, 0])
    for step in range(experts):
        unassigned_T = expert_T == experts
        if step % 2 == 0 and not bool(unassigned_T.any()):
            break
        wanted_T = torch.where(unassigned_T, experts, -1).int()
        steps.bid(values_TE, price_E, left_E, wanted_T, regret_T, most=price_E[0], epsilon=0.0, final=True)
        left_E = (left_E - steps.settle(wanted_T, regret_T, left_E, torch.zeros_like(price_E))).clamp(min=0)
        expert_T.copy_(torch.where(unassigned_T, wanted_T, expert_T))


class Plain:
    """The plain twins of `foundry_moe_kernels.assignment`; arguments and results are explained there."""

    @staticmethod
    def ascend(values_TE: Tensor, expert_T: Tensor, log_room_E: Tensor, temperatures: list[float]) -> Tensor:
        price_E = torch.zeros_like(log_room_E)
        weight_1T = (expert_T >= 0).to(price_E.dtype)[None]
        for temperature in temperatures:
            load_E = (weight_1T @ ((values_TE - price_E) / temperature).softmax(1))[0]
            price_E = price_E + temperature * (load_E.clamp(min=1e-6).log() - log_room_E)
        return price_E

    @staticmethod
    def bid(
        values_TE: Tensor, price_E: Tensor, room_E: Tensor, expert_T: Tensor, bid_T: Tensor, *,
        most: Tensor, epsilon: float, final: bool,
    ) -> None:  # fmt: skip
        bidding_T = expert_T == values_TE.shape[1]
        offers_TE = values_TE - price_E
        if final:
            offers_TE = offers_TE.masked_fill(room_E <= 0, -torch.inf)
        best_T = offers_TE.argmax(1)
        offer_T2 = offers_TE.topk(2, dim=1).values
        gain_T = offer_T2[:, 0] - offer_T2[:, 1]
        if not final:
            gain_T = price_E[best_T] + gain_T.clamp(max=most) + epsilon
        expert_T.copy_(torch.where(bidding_T, best_T, expert_T))
        bid_T.copy_(torch.where(bidding_T, gain_T, bid_T))

    @staticmethod
    def settle(expert_T: Tensor, bid_T: Tensor, room_E: Tensor, price_E: Tensor) -> Tensor:
        experts = room_E.shape[0]
        bin_T = torch.where(expert_T < 0, experts, expert_T).long()
        order_T = torch.argsort(bid_T, descending=True, stable=True)  # within an expert: highest bid, lowest token
        order_T = order_T[torch.argsort(bin_T[order_T], stable=True)]
        load_E1 = torch.zeros(experts + 1, dtype=torch.int64, device=bin_T.device)
        load_E1 = load_E1.scatter_add(0, bin_T, torch.ones_like(bin_T))
        first_E1 = load_E1.cumsum(0) - load_E1
        position_T = torch.arange(bin_T.shape[0], device=bin_T.device) - first_E1[bin_T[order_T]]
        position_T = torch.zeros_like(position_T).index_copy(0, order_T, position_T)
        outbid_T = (bin_T < experts) & (position_T >= torch.cat([room_E, room_E[:1]])[bin_T])
        kept_T = torch.where(outbid_T, experts, bin_T)
        lowest_E1 = torch.full((experts + 1,), torch.inf, dtype=bid_T.dtype, device=bid_T.device)
        lowest_E = lowest_E1.scatter_reduce(0, kept_T, bid_T, "amin")[:experts]
        load_E = load_E1[:experts].int()
        full_E = (load_E >= room_E) & (room_E > 0)
        price_E.copy_(torch.where(full_E, torch.maximum(price_E, lowest_E), price_E))
        expert_T.copy_(torch.where(outbid_T, experts, expert_T))
        return load_E
