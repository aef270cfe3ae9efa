"""BASE's assignment against scipy's exact one."""

import pytest
import torch
from scipy.optimize import linear_sum_assignment

from foundry_moe.ops.assignment import Plain, assign

pytestmark = pytest.mark.quick


def scores(kind: str, tokens: int, experts: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    if kind == "independent":
        return torch.randn(tokens, experts, generator=generator)
    if kind == "gate":
        x_TD, w_ED = (torch.randn(n, 16, generator=generator) for n in (tokens, experts))
        return x_TD @ w_ED.T
    if kind == "one favourite":
        return 0.3 * torch.randn(tokens, experts, generator=generator) + 3.0 * (torch.arange(experts) == 2)
    # text: few types make up most tokens, and equal tokens have equal scores
    chance = 1 / torch.arange(1.0, 301.0)
    types = torch.multinomial(chance, tokens, replacement=True, generator=generator)
    return torch.randn(300, experts, generator=generator)[types]


KINDS = ["independent", "gate", "one favourite", "text"]


def optimum(scores_TE: torch.Tensor) -> float:
    tokens, experts = scores_TE.shape
    room = [tokens // experts + (e < tokens % experts) for e in range(experts)]
    # any expert may take the remainder; ours are the first ones, and the truth is for the same rooms
    columns = [e for e in range(experts) for _ in range(room[e])]
    matrix = scores_TE.numpy()[:, columns]
    rows, chosen = linear_sum_assignment(matrix, maximize=True)
    return float(matrix[rows, chosen].sum())


def deviation(scores_TE):
    centred = scores_TE - scores_TE.mean(1, keepdim=True)
    return centred.square().mean().sqrt().item()


def value(scores_TE, expert_T):
    return scores_TE.gather(1, expert_T[:, None]).sum().item()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("tokens", "experts"), [(512, 16), (203, 7)])
def test_an_auction_that_ends_is_optimal_within_epsilon(kind, tokens, experts):
    scores_TE = scores(kind, tokens, experts)
    expert_T = assign(scores_TE, epsilon=0.02, rounds=None)
    loss = optimum(scores_TE) - value(scores_TE, expert_T)
    # the bound that the auction guarantees, and fp32 rounding of the sums
    assert -1e-3 < loss <= tokens * 0.02 * deviation(scores_TE)


@pytest.mark.parametrize("kind", KINDS)
def test_the_default_costs_less_than_two_hundredths_of_a_deviation_per_token(kind):
    """Cut off after 16 rounds there is no bound; this is what it gives up."""
    scores_TE = scores(kind, 1024, 32)
    expert_T = assign(scores_TE)
    loss = optimum(scores_TE) - value(scores_TE, expert_T)
    assert -1e-3 < loss <= 1024 * 0.02 * deviation(scores_TE)


@pytest.mark.parametrize("kind", [*KINDS, "equal"])
@pytest.mark.parametrize(("tokens", "experts"), [(512, 16), (203, 7), (16, 16), (17, 16), (1, 1), (5, 1)])
@pytest.mark.parametrize("rounds", [0, 3, 64])
def test_loads_differ_by_one_at_most(kind, tokens, experts, rounds):
    scores_TE = torch.zeros(tokens, experts) if kind == "equal" else scores(kind, tokens, experts)
    loads_E = torch.bincount(assign(scores_TE, rounds=rounds), minlength=experts)
    assert loads_E.sum() == tokens and loads_E.max() - loads_E.min() <= 1


@pytest.mark.parametrize("rounds", [0, 3])
def test_the_auction_ends_after_its_rounds(rounds, monkeypatch):
    bid, bids = Plain.bid, []
    monkeypatch.setattr(Plain, "bid", staticmethod(lambda *a, **k: bids.append(not k["final"]) or bid(*a, **k)))
    assign(scores("one favourite", 203, 7), rounds=rounds)
    assert sum(bids) == rounds


def test_padding_has_no_expert_and_takes_no_place():
    scores_TE = scores("gate", 100, 8)
    mask_T = torch.arange(100) % 5 != 0
    expert_T = assign(scores_TE, mask_T)
    assert (expert_T[~mask_T] == -1).all()
    assert torch.equal(torch.bincount(expert_T[mask_T], minlength=8), torch.full((8,), 10))
    moved_TE = torch.where(mask_T[:, None], scores_TE, 1e4 * torch.randn(100, 8))
    assert torch.equal(assign(moved_TE, mask_T), expert_T)


@pytest.mark.parametrize("real", [0, 1, 3])
def test_fewer_real_tokens_than_experts_each_find_a_place(real):
    mask_T = torch.arange(20) < real
    expert_T = assign(scores("independent", 20, 8), mask_T)
    assert (expert_T[:real] >= 0).all() and len(set(expert_T[:real].tolist())) == real and (expert_T[real:] == -1).all()


def test_the_same_scores_give_the_same_assignment():
    scores_TE = scores("text", 300, 8)
    assert torch.equal(assign(scores_TE), assign(scores_TE.clone()))


def test_a_compiled_model_has_it_in_its_graph():
    scores_TE = scores("gate", 64, 8)
    compiled = torch.compile(lambda s: 2 * assign(2 * s), backend="eager", fullgraph=True)
    assert torch.equal(compiled(scores_TE), 2 * assign(2 * scores_TE))


def test_scale_and_offset_of_a_token_do_not_matter():
    scores_TE = scores("gate", 200, 8).double()
    shifted_TE = 1000 * (scores_TE + torch.randn(200, 1).double())
    # equal up to fp32 rounding, which may turn a near tie
    assert (assign(scores_TE) == assign(shifted_TE)).float().mean() > 0.98
