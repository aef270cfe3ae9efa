"""The linear assignment of BASE layers: every expert gets the same number of tokens, and the scores' sum is large.

Three steps, all on the scores' device: smoothed dual ascent finds prices of experts at which loads are nearly
even; auction rounds (Bertsekas 1988; Bertsekas and Castanon 1989 for experts with many equal places) raise prices
until tokens that compete for a place agree; what is left after the allowed rounds goes, by largest regret first,
to experts with room. Knows nothing of gates or ranks.

If the auction ends by itself, the sum is within T * epsilon of the optimum: each token is within epsilon of its
best offer at the final prices. The tail of an auction is a few tokens outbidding each other for hundreds of rounds;
cutting it off after 16 costs on average less than two epsilon a token (see tests and benchmarks).

Shapes: T tokens, E experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foundry_moe.ops.places import places

_ASCENT_STEPS = 40
_WARM, _COLD = 1.0, 0.01  # temperatures of the ascent, in deviations of the scores
_CHECK_EVERY = 8  # rounds between two looks at whether the auction is over: each look waits for the device


@torch.no_grad()
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
    room_E = real // experts + (torch.arange(experts, device=device) < real % experts)
    values_TE = _standardise(scores_TE.float(), mask_T)
    values_TE = values_TE.masked_fill(room_E == 0, -torch.inf)
    price_E = _ascend(values_TE, room_E, mask_T)
    expert_T, price_E = _auction(values_TE, price_E, room_E, mask_T, epsilon, rounds)
    return _fill(values_TE - price_E, expert_T, room_E).masked_fill(~mask_T, -1)


def _standardise(scores_TE: Tensor, mask_T: Tensor) -> Tensor:
    """Each token's scores less their mean, over the deviation of all: what is the same for all experts is no matter."""
    centred_TE = scores_TE - scores_TE.mean(1, keepdim=True)
    real = mask_T.sum().clamp(min=1)
    deviation = (centred_TE.square().mean(1) * mask_T).sum().div(real).sqrt()
    return centred_TE / torch.where(deviation > 0, deviation, 1.0)


def _ascend(values_TE: Tensor, room_E: Tensor, mask_T: Tensor) -> Tensor:
    """Prices at which the softmax of (values - prices) / temperature gives even loads, the temperature falling."""
    price_E = torch.zeros_like(values_TE[0])
    log_room_E = room_E.to(price_E.dtype).clamp(min=1).log()
    weight_1T = mask_T.to(price_E.dtype)[None]
    for step in range(_ASCENT_STEPS):
        temperature = _WARM * (_COLD / _WARM) ** (step / (_ASCENT_STEPS - 1))
        load_E = (weight_1T @ ((values_TE - price_E) / temperature).softmax(1))[0]
        price_E = price_E + temperature * (load_E.clamp(min=1e-6).log() - log_room_E)
    return price_E


def _auction(
    values_TE: Tensor, price_E: Tensor, room_E: Tensor, mask_T: Tensor, epsilon: float, rounds: int | None
) -> tuple[Tensor, Tensor]:
    """Tokens without a place bid for the best offer as much as makes the second best as good, and epsilon.

    An expert keeps its highest bidders; once full, its price is the lowest bid among them.

    Returns:
        expert_T, E for tokens without a place, and the prices.
    """
    tokens, experts = values_TE.shape
    room_E1 = torch.cat([room_E, room_E.new_full((1,), tokens)])
    # no offer is worth more than all there is to gain: bids stay finite where only one expert has room
    finite_TE = values_TE.masked_fill(values_TE == -torch.inf, 0)
    most = finite_TE.max() - finite_TE.min()
    expert_T = torch.full((tokens,), experts, device=values_TE.device)
    bid_T = torch.full_like(values_TE[:, 0], -torch.inf)
    done = 0
    while rounds is None or done < rounds:
        if done % _CHECK_EVERY == 0 and not bool(((expert_T == experts) & mask_T).any()):
            break
        done += 1
        bidding_T = (expert_T == experts) & mask_T
        offer_T2, best_T2 = (values_TE - price_E).topk(2, dim=1)
        gain_T = (offer_T2[:, 0] - offer_T2[:, 1]).clamp(max=most) + epsilon
        expert_T = torch.where(bidding_T, best_T2[:, 0], expert_T)
        bid_T = torch.where(bidding_T, price_E[best_T2[:, 0]] + gain_T, bid_T)
        place_T, load_E1 = places(expert_T, experts, bid_T)
        expert_T = torch.where(place_T < room_E1[expert_T], expert_T, experts)
        lowest_E1 = torch.full_like(room_E1, torch.inf, dtype=bid_T.dtype)
        lowest_E = lowest_E1.scatter_reduce(0, expert_T, bid_T, "amin")[:experts]
        full_E = (load_E1[:experts] >= room_E) & (room_E > 0)
        price_E = torch.where(full_E, torch.maximum(price_E, lowest_E), price_E)
    return expert_T, price_E


def _fill(offers_TE: Tensor, expert_T: Tensor, room_E: Tensor) -> Tensor:
    """Gives every token without a place one at an expert with room; nobody moves, so each round fills an expert."""
    experts = offers_TE.shape[1]
    for step in range(experts):
        homeless_T = expert_T == experts
        if step % 2 == 0 and not bool(homeless_T.any()):
            break
        load_E1 = torch.zeros(experts + 1, dtype=torch.int64, device=expert_T.device)
        load_E1 = load_E1.scatter_add(0, expert_T, torch.ones_like(expert_T))
        left_E = room_E - load_E1[:experts]
        offer_T2, best_T2 = offers_TE.masked_fill(left_E <= 0, -torch.inf).topk(2, dim=1)
        wanted_T = torch.where(homeless_T, best_T2[:, 0], experts)
        place_T, _ = places(wanted_T, experts, offer_T2[:, 0] - offer_T2[:, 1])
        placed_T = homeless_T & (place_T < left_E[best_T2[:, 0]])
        expert_T = torch.where(placed_T, best_T2[:, 0], expert_T)
    return expert_T
