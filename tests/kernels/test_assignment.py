"""The steps of BASE's assignment against their twins, and the whole of it on them."""

import pytest
import torch
from foundry_moe_kernels import assignment as kernels

from foundry_moe.ops import assignment
from foundry_moe.ops.assignment import Plain, assign

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(200, 7), (65, 64), (33, 1)]
TEMPERATURES = [1.0, 0.3, 0.1]


def market(tokens: int, experts: int, room: int) -> tuple[torch.Tensor, ...]:
    """Values of which some tie, prices, rooms of which one is 0, and a third of the tokens without a place."""
    generator = torch.Generator().manual_seed(tokens)
    values_TE = torch.randn(tokens, experts, generator=generator).mul(4).round().div(4)
    expert_T = torch.randint(-1, experts, (tokens,), generator=generator).int()
    expert_T[::3] = experts
    bid_T = torch.randn(tokens, generator=generator).mul(4).round().div(4)
    room_E = torch.full((experts,), room, dtype=torch.int32)
    if experts > 1:
        values_TE[:, -1], room_E[-1] = -torch.inf, 0
        expert_T[expert_T == experts - 1] = 0
    price_E = torch.rand(experts, generator=generator).mul(4).round().div(4)
    return tuple(part.to(DEVICE) for part in (values_TE, price_E, room_E, expert_T, bid_T))


@pytest.mark.parametrize(("tokens", "experts"), SHAPES)
def test_ascent_gives_the_twins_prices(tokens, experts):
    values_TE, _, room_E, expert_T, _ = market(tokens, experts, room=5)
    log_room_E = room_E.float().clamp(min=1).log()
    price_E = kernels.ascend(values_TE, expert_T, log_room_E, TEMPERATURES)
    # rounding of sums of up to 200 shares, and of their logarithms over falling temperatures
    torch.testing.assert_close(
        price_E, Plain.ascend(values_TE, expert_T, log_room_E, TEMPERATURES), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("final", [False, True])
@pytest.mark.parametrize(("tokens", "experts"), [(200, 7), (65, 64)])
def test_bids_are_the_twins(tokens, experts, final):
    values_TE, price_E, room_E, expert_T, bid_T = market(tokens, experts, room=5)
    room_E[1] = 0
    results = []
    for steps in (kernels, Plain):
        result = expert_T.clone(), bid_T.clone()
        most = torch.tensor(1.5, device=DEVICE)
        steps.bid(values_TE, price_E, room_E, *result, most=most, epsilon=0.25, final=final)
        results.append(result)
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])  # quarters: exact
    assert (results[0][0] != expert_T).any()


@pytest.mark.parametrize("room", [0, 1, 5, 1000])
@pytest.mark.parametrize(("tokens", "experts"), [*SHAPES, (5000, 3)])
def test_who_keeps_a_place_is_the_twins(tokens, experts, room):
    _, price_E, room_E, expert_T, bid_T = market(tokens, experts, room)
    results = []
    for steps in (kernels, Plain):
        state = expert_T.clone(), bid_T.clone(), room_E, price_E.clone()
        load_E = steps.settle(*state)
        results.append((state[0], state[3], load_E))
    for ours, twin in zip(*results, strict=True):
        assert torch.equal(ours, twin)
    if room == 1:
        assert (results[0][0] == experts).sum() > (expert_T == experts).sum()


def test_all_tokens_at_one_expert_with_negative_and_equal_bids():
    expert_T = torch.zeros(40, dtype=torch.int32, device=DEVICE)
    bid_T = torch.tensor([-1.0, 0.0, -0.0, -2.0], device=DEVICE).repeat(10)
    price_E = torch.full((2,), -5.0, device=DEVICE)
    room_E = torch.tensor([15, 3], dtype=torch.int32, device=DEVICE)
    load_E = kernels.settle(expert_T, bid_T, room_E, price_E)
    assert load_E.tolist() == [40, 0] and price_E.tolist() == [0.0, -5.0]
    zeros_T = (bid_T == 0).nonzero()[:, 0]
    assert torch.equal((expert_T == 0).nonzero()[:, 0], zeros_T[:15])


@pytest.mark.parametrize(("tokens", "experts", "rounds"), [(200, 7, 3), (33, 32, None), (64, 16, 0)])
def test_an_assignment_on_the_kernels_is_as_good_as_on_the_twins(tokens, experts, rounds, monkeypatch):
    scores_TE = torch.randn(tokens, 5, device=DEVICE) @ torch.randn(5, experts, device=DEVICE)
    mask_T = torch.arange(tokens, device=DEVICE) % 10 != 3

    def value(expert_T: torch.Tensor) -> float:
        return scores_TE[mask_T].gather(1, expert_T[mask_T, None]).mean().item() / scores_TE.std().item()

    on_twins = assign(scores_TE.cpu(), mask_T.cpu(), rounds=rounds).to(DEVICE)
    monkeypatch.setattr(assignment, "Plain", kernels)
    on_kernels = assign(scores_TE, mask_T, rounds=rounds)
    assert torch.equal(on_kernels, assign(scores_TE, mask_T, rounds=rounds))
    loads_E = torch.bincount(on_kernels[mask_T], minlength=experts)
    assert loads_E.max() - loads_E.min() <= 1 and (on_kernels[~mask_T] == -1).all()
    # prices differ by rounding, and so may ties; the sums do not differ by more than the auction's epsilon
    assert abs(value(on_kernels) - value(on_twins)) < 0.01
