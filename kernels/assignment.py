"""The steps of BASE's assignment: prices by dual ascent, bids, and who keeps a slot; one launch each.

The plain twins are in `foundry_moe.ops.assignment`, which has the algorithm. No atomics: the same input gives the
same bits.

Shapes: T tokens, E experts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_PARTS = 128  # most programs of the ascent: each sums the parts of all programs, so more programs read more
_ELEMENTS = 4096  # scores a program holds
_TOKENS = 16_384  # tokens that `settle` holds at a time; its passes wait for their loads, so few and wide ones


@triton.jit
def _ascend_kernel(
    values_ptr, expert_ptr, log_room_ptr, price_ptr, new_price_ptr, load_ptr, new_load_ptr, tokens, num_experts,
    temperature, last_temperature, FIRST: tl.constexpr, PARTS: tl.constexpr, TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr,
):  # fmt: skip
    e = tl.arange(0, EXPERTS)
    live = e < num_experts
    price = tl.load(price_ptr + e, mask=live, other=0.0)
    if not FIRST:
        # every program completes the previous step itself: all of them sum the loads in the same order
        load = tl.zeros((EXPERTS,), tl.float32)
        for start in range(0, PARTS, TOKENS):
            p = start + tl.arange(0, TOKENS)
            at = p[:, None] * num_experts + e[None, :]
            load += tl.sum(tl.load(load_ptr + at, mask=(p < PARTS)[:, None] & live[None, :], other=0.0), axis=0)
        log_room = tl.load(log_room_ptr + e, mask=live, other=0.0)
        price += last_temperature * (tl.log(tl.maximum(load, 1e-6)) - log_room)
    if tl.program_id(0) == 0:
        tl.store(new_price_ptr + e, price, mask=live)
    total = tl.zeros((EXPERTS,), tl.float32)
    for start in range(tl.program_id(0) * TOKENS, tokens, PARTS * TOKENS):
        t = start + tl.arange(0, TOKENS)
        real = tl.load(expert_ptr + t, mask=t < tokens, other=-1) >= 0
        at = t.to(tl.int64)[:, None] * num_experts + e[None, :]
        values = tl.load(values_ptr + at, mask=real[:, None] & live[None, :], other=float("-inf"))
        offers = (values - price[None, :]) / temperature
        peak = tl.max(offers, axis=1)
        exps = tl.exp(offers - tl.where(real, peak, 0.0)[:, None])
        shares = exps / tl.where(real, tl.sum(exps, axis=1), 1.0)[:, None]
        total += tl.sum(tl.where(real[:, None], shares, 0.0), axis=0)
    tl.store(new_load_ptr + tl.program_id(0) * num_experts + e, total, mask=live)


def ascend(values_TE: Tensor, expert_T: Tensor, log_room_E: Tensor, temperatures: list[float]) -> Tensor:
    """Prices, fp32 [E], after a step of smoothed dual ascent at each temperature, from prices of 0.

    Args:
        values_TE: fp32, contiguous; -inf where an expert has no room.
        expert_T: int32; -1 = an excluded token.
        log_room_E: fp32, logarithm of the target load.
    """
    tokens, experts = values_TE.shape
    wide = triton.next_power_of_2(experts)
    block = max(1, min(_ELEMENTS // wide, 64))
    parts = min(_PARTS, triton.cdiv(tokens, block))
    price, new_price = values_TE.new_zeros(2, experts).unbind()
    load, new_load = values_TE.new_empty(2, parts, experts).unbind()
    last = temperatures[0]
    for step, temperature in enumerate(temperatures):
        _ascend_kernel[(parts,)](
            values_TE, expert_T, log_room_E, price, new_price, load, new_load, tokens, experts, temperature, last,
            FIRST=step == 0, PARTS=parts, TOKENS=block, EXPERTS=wide, num_warps=4,
        )  # fmt: skip
        price, new_price, load, new_load, last = new_price, price, new_load, load, temperature
    return price + last * (load.sum(0).clamp(min=1e-6).log() - log_room_E)


@triton.jit
def _bid_kernel(
    values_ptr, price_ptr, room_ptr, most_ptr, expert_ptr, bid_ptr, epsilon, tokens, num_experts,
    FINAL: tl.constexpr, TOKENS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    e = tl.arange(0, EXPERTS)
    live = e < num_experts
    bidding = tl.load(expert_ptr + t, mask=t < tokens, other=-1) == num_experts
    at = t.to(tl.int64)[:, None] * num_experts + e[None, :]
    values = tl.load(values_ptr + at, mask=bidding[:, None] & live[None, :], other=float("-inf"))
    price = tl.load(price_ptr + e, mask=live, other=0.0)
    offers = values - price[None, :]
    if FINAL:
        room = tl.load(room_ptr + e, mask=live, other=0)
        offers = tl.where((room > 0)[None, :], offers, float("-inf"))
    best = tl.max(offers, axis=1)
    chosen = tl.argmax(offers, axis=1, tie_break_left=True)
    second = tl.max(tl.where(e[None, :] == chosen[:, None], float("-inf"), offers), axis=1)
    # tokens that do not bid have offers of -inf alone
    bid = tl.where(bidding, best, 0.0) - tl.where(bidding, second, 0.0)
    if not FINAL:
        bid = tl.minimum(bid, tl.load(most_ptr)) + epsilon
        bid += tl.load(price_ptr + chosen, mask=bidding, other=0.0)
    tl.store(expert_ptr + t, chosen, mask=bidding)
    tl.store(bid_ptr + t, bid, mask=bidding)


def bid(
    values_TE: Tensor, price_E: Tensor, room_E: Tensor, expert_T: Tensor, bid_T: Tensor, *,
    most: Tensor, epsilon: float, final: bool,
) -> None:  # fmt: skip
    """Tokens without a slot (expert E) take their best offer, the lower expert of equal ones; in place.

    Args:
        room_E: int32; read where `final`: only experts with room are looked at then.
        expert_T: int32, written.
        bid_T: fp32, written: the price, plus the lead of the best offer over the second best (at most `most`, an fp32
            scalar), plus epsilon; where `final`, only this lead (the regret).
    """
    tokens, experts = values_TE.shape
    wide = triton.next_power_of_2(experts)
    block = max(1, min(_ELEMENTS // wide, 32))
    _bid_kernel[(triton.cdiv(tokens, block),)](
        values_TE, price_E, room_E, most, expert_T, bid_T, epsilon, tokens, experts, FINAL=final, TOKENS=block,
        EXPERTS=wide, num_warps=4,
    )  # fmt: skip


@triton.jit
def _mine(expert_ptr, bid_ptr, start, tokens, TOKENS: tl.constexpr):
    """Tokens of this program's expert among those from `start`, their bids, and the bids' order as unsigned."""
    t = start + tl.arange(0, TOKENS)
    mine = tl.load(expert_ptr + t, mask=t < tokens, other=-1) == tl.program_id(0)
    bid = tl.load(bid_ptr + t, mask=mine, other=0.0) + 0.0  # -0 and 0 are one
    bits = bid.to(tl.uint32, bitcast=True)
    return t, mine, bid, tl.where(bits >> 31 == 1, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def _settle_kernel(expert_ptr, bid_ptr, room_ptr, price_ptr, load_ptr, tokens, num_experts, TOKENS: tl.constexpr):
    room = tl.load(room_ptr + tl.program_id(0))
    load = 0
    for start in range(0, tokens, TOKENS):
        _t, mine, _bid, _key = _mine(expert_ptr, bid_ptr, start, tokens, TOKENS)
        load += tl.sum(mine.to(tl.int32), axis=0)
    # the lowest bid that keeps a slot, bit by bit: the largest key that `room` bids reach
    threshold = tl.full((), 0, tl.uint32)
    above = 0
    if load > room:
        bit = tl.full((), 0x80000000, tl.uint32)
        for _bit in range(32):
            candidate = threshold | bit
            reached = 0
            for start in range(0, tokens, TOKENS):
                _t, mine, _bid, key = _mine(expert_ptr, bid_ptr, start, tokens, TOKENS)
                reached += tl.sum((mine & (key >= candidate)).to(tl.int32), axis=0)
            threshold = tl.where(reached >= room, candidate, threshold)
            bit = bit >> 1
        for start in range(0, tokens, TOKENS):
            _t, mine, _bid, key = _mine(expert_ptr, bid_ptr, start, tokens, TOKENS)
            above += tl.sum((mine & (key > threshold)).to(tl.int32), axis=0)
    # of equal bids at the threshold, the first ones
    seen = 0
    lowest = float("inf")
    for start in range(0, tokens, TOKENS):
        t, mine, bid, key = _mine(expert_ptr, bid_ptr, start, tokens, TOKENS)
        level = (mine & (key == threshold)).to(tl.int32)
        earlier = tl.cumsum(level, axis=0) - level + seen
        seen += tl.sum(level, axis=0)
        keeps = (load <= room) | (key > threshold) | ((level == 1) & (earlier < room - above))
        lowest = tl.minimum(lowest, tl.min(tl.where(mine & keeps, bid, float("inf")), axis=0))
        tl.store(expert_ptr + t, tl.zeros_like(t) + num_experts, mask=mine & (keeps == 0))
    tl.store(load_ptr + tl.program_id(0), load)
    price = tl.load(price_ptr + tl.program_id(0))
    full = (load >= room) & (room > 0)
    tl.store(price_ptr + tl.program_id(0), tl.where(full, tl.maximum(price, lowest), price))


def settle(expert_T: Tensor, bid_T: Tensor, room_E: Tensor, price_E: Tensor) -> Tensor:
    """Each expert keeps its highest bidders, on ties the lower tokens; the others are set to E. In place.

    Args:
        expert_T: int32, written.
        bid_T: fp32, no NaN.
        room_E: int32.
        price_E: fp32, written: that of a full expert rises to its lowest bid.

    Returns:
        load_E: int32, tokens that bid for each expert.
    """
    experts = room_E.shape[0]
    load_E = torch.empty_like(room_E)
    block = min(_TOKENS, triton.next_power_of_2(expert_T.shape[0]))
    warps = 16 if block == _TOKENS else 4
    _settle_kernel[(experts,)](
        expert_T, bid_T, room_E, price_E, load_E, expert_T.shape[0], experts, TOKENS=block, num_warps=warps
    )
    return load_E
