"""Copies of hot experts: the plan evens out ranks, and every choice goes to a slot that has its expert."""

import pytest
import torch

from foundry_moe.config import MoEConfig
from foundry_moe.layers.gates.gate import Choices
from foundry_moe.layers.hot_experts import HotExperts, plan_copies, shares_of_sender
from foundry_moe.layers.moe import MoELayer

pytestmark = pytest.mark.quick


def zipf(experts, exponent):
    return [1000.0 / (expert + 1) ** exponent for expert in range(experts)]


def rows_of(loads, shares, ranks):
    """Of each rank, under a plan."""
    local = len(loads) // ranks
    rows = [0.0] * ranks
    for expert, load in enumerate(loads):
        default = [float(rank == expert // local) for rank in range(ranks)]
        for rank, share in enumerate(shares.get(expert, default)):
            rows[rank] += share * load
    return rows


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_plan_evens_out_a_zipf_load(ranks):
    loads = zipf(64, 1.5)
    before = rows_of(loads, {}, ranks)
    shares = plan_copies(loads, ranks, most=4)
    after = rows_of(loads, shares, ranks)
    assert max(before) / (sum(before) / ranks) > 1.8
    assert max(after) / (sum(after) / ranks) < 1.05
    assert len(shares) <= 4 and sum(after) == pytest.approx(sum(loads))
    for share in shares.values():
        assert sum(share) == pytest.approx(1) and min(share) >= 0


def test_one_copy_takes_no_more_than_its_expert_has():
    shares = plan_copies([30.0, 30.0, 30.0, 0.0, 0.0, 0.0], ranks=2, most=1)
    assert shares == {0: [0.0, 1.0]}
    assert rows_of([30.0, 30.0, 30.0, 0.0, 0.0, 0.0], shares, 2) == [60.0, 30.0]


@pytest.mark.parametrize("loads", [[5.0] * 8, [0.0] * 8, [101.0, 100.0] * 4])
def test_even_loads_and_none_are_left_alone(loads):
    assert plan_copies(loads, ranks=4, most=3) == {}


def test_tokens_go_to_the_sender_s_own_copy_as_far_as_shares_allow():
    share = [0.1, 0.5, 0.4, 0.0]
    senders = [shares_of_sender(share, sender) for sender in range(4)]
    assert senders[1][1] == senders[2][2] == 1
    assert [sum(column) / 4 for column in zip(*senders, strict=True)] == pytest.approx(share)


EXPERTS, RANKS, TOP_K, TOKENS = 64, 4, 8, 2048
LOCAL = EXPERTS // RANKS


def draw(random_order):
    """Choices of each rank, by Zipf's law with exponent 1.5; some tokens have fewer than others, or none."""
    weights = torch.arange(1, EXPERTS + 1) ** -1.5
    weights = weights[torch.randperm(EXPERTS, generator=torch.Generator().manual_seed(1))] if random_order else weights
    chosen = torch.multinomial(weights.expand(RANKS * TOKENS, -1), TOP_K).view(RANKS, TOKENS, TOP_K)
    chosen[:, 5, 1], chosen[:, 7] = -1, -1
    return chosen


def slots_of(layers, chosen):
    """The rows of the fullest rank over the mean, and slots by rank."""
    ones = torch.ones(TOKENS, TOP_K)
    slots = [
        layer.renumber(Choices(experts_TK=experts_TK, weights_TK=ones)).experts_TK
        for layer, experts_TK in zip(layers, chosen, strict=True)
    ]
    rows = torch.stack([layer.counts_S for layer in layers]).sum(0).view(RANKS, -1).sum(1)
    for layer in layers:
        layer.reset()
    assert rows.sum() == (chosen >= 0).sum()
    return (rows.max() / rows.double().mean()).item(), slots


@pytest.mark.parametrize(
    ("random_order", "copies", "before", "after"), [(True, 1, 1.5, 1.1), (True, 4, 1.5, 1.05), (False, 8, 3.0, 1.05)]
)
def test_every_choice_goes_to_a_slot_with_its_expert_and_the_next_step_is_even(random_order, copies, before, after):
    torch.manual_seed(0)
    layers = [HotExperts(num_experts=EXPERTS, ranks=RANKS, rank=rank, copies=copies) for rank in range(RANKS)]
    chosen = draw(random_order)
    fullest, slots = slots_of(layers, chosen)
    assert fullest > before
    for own, experts_TK in zip(slots, chosen, strict=True):  # without a plan: owners alone
        owner = torch.div(experts_TK, LOCAL, rounding_mode="floor")
        assert torch.equal(own, torch.where(experts_TK >= 0, experts_TK + owner * copies, -1))
    for layer in layers:
        assert layer.traffic is None
        layer.after_step(torch.bincount(chosen[chosen >= 0], minlength=EXPERTS).tolist())
    # which expert each slot has, from what ranks send to each other
    expert_in = torch.full((RANKS, LOCAL + copies), -2)
    for receiver in range(RANKS):
        expert_in[receiver, :LOCAL] = torch.arange(LOCAL) + receiver * LOCAL
        traffic = [layer.traffic.sent_P[receiver] for layer in layers]
        assert layers[receiver].traffic.received_P == [len(numbers) for numbers in traffic]
        arrived = [sender * LOCAL + number for sender, numbers in enumerate(traffic) for number in numbers]
        expert_in[receiver, LOCAL : LOCAL + len(arrived)] = torch.tensor(arrived, dtype=torch.int64)
    chosen = draw(random_order).int()
    fullest, slots = slots_of(layers, chosen)
    assert fullest < after
    for slot_TK, experts_TK in zip(slots, chosen, strict=True):
        assert slot_TK.dtype == experts_TK.dtype
        has = torch.where(slot_TK >= 0, expert_in.flatten()[slot_TK.clamp(min=0).long()], -1)
        assert torch.equal(has, experts_TK.long())


def test_training_where_nothing_tells_loads_is_an_error_that_names_the_fix():
    layer = MoELayer(8, MoEConfig(num_experts=4, expert_hidden_size=8, activation="gelu"))
    layer.hot = HotExperts(num_experts=4, ranks=2, rank=0, copies=1)
    with pytest.raises(ValueError, match=r"mesh.hot_experts \(1\) follows the loads.*dmoe_steps"):
        layer(torch.randn(3, 8))
