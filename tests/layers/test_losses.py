"""Auxiliary losses against their formulas, written out in fp64, with gradients."""

import math

import pytest
import torch
from torch.autograd import gradcheck
from torch.distributions import Normal

from foundry_moe.layers import losses
from foundry_moe.layers.context import TokenSequences
from foundry_moe.ops.select_topk import count_choices
from foundry_moe.ops.softmax_topk import balance, masked_mean, z_loss
from tests.helpers.gates import batch, build, context_of

pytestmark = pytest.mark.quick

T, E, K = 12, 5, 2


@pytest.fixture
def logits_TE():
    torch.manual_seed(0)
    return torch.randn(T, E, dtype=torch.float64, requires_grad=True)


MASKS = pytest.mark.parametrize(
    "mask_T", [None, torch.arange(T) % 3 != 1, torch.zeros(T, dtype=torch.bool)], ids=["all", "some", "none"]
)


def real(mask_T):
    return [t for t in range(T) if mask_T is None or mask_T[t]]


@MASKS
def test_balance(logits_TE, mask_T):
    counts_E = torch.tensor([4, 0, 9, 1, 3])
    probs_TE = logits_TE.softmax(-1)
    ours = balance(masked_mean(probs_TE, mask_T), counts_E)
    truth = sum(
        E * counts_E[e] / 17 * probs_TE[t, e] / max(len(real(mask_T)), 1) for e in range(E) for t in real(mask_T)
    )
    torch.testing.assert_close(ours, torch.as_tensor(truth, dtype=torch.float64))
    if real(mask_T):
        assert gradcheck(lambda x: balance(masked_mean(x.softmax(-1), mask_T), counts_E), (logits_TE,))


@MASKS
def test_balance_of_sequences_is_the_mean_of_theirs_by_length(logits_TE, mask_T):
    index_T = torch.tensor([0, 0, 0, 4, 4, 4, 4, 4, 2, 2, 2, 2])  # lengths 3, 5, 4; sequences 1 and 3 are empty
    sequences = TokenSequences(index_T, 5)
    experts_TK = logits_TE.detach().topk(K).indices
    experts_TK[5, 1] = -1  # a token with one choice only

    def ours(x):
        return losses.sequence_balance_loss(x.softmax(-1), experts_TK, sequences, mask_T)

    probs_TE, truth = logits_TE.softmax(-1), torch.zeros((), dtype=torch.float64)
    for n in (0, 4, 2):
        mine = [t for t in real(mask_T) if index_T[t] == n]
        if mine:
            chosen = [e for t in mine for e in experts_TK[t].tolist() if e >= 0]
            truth = truth + len(mine) / len(real(mask_T)) * naive_balance(probs_TE[mine], chosen)
    torch.testing.assert_close(ours(logits_TE), truth)
    if real(mask_T):
        assert gradcheck(ours, (logits_TE,))
        even = balance(masked_mean(probs_TE, mask_T), count_choices(experts_TK, E, mask_T))
        assert abs(even - truth) > 1e-3, "the two differ"


def test_balance_is_one_when_even_and_has_no_gradient_through_counts():
    even = balance(torch.full((E,), 1 / E, dtype=torch.float64), torch.full((E,), 7))
    assert even.item() == pytest.approx(1.0, abs=1e-15)
    assert balance(torch.full((E,), 1 / E), torch.zeros(E, dtype=torch.int64)).item() == 0


@MASKS
def test_z(logits_TE, mask_T):
    ours = z_loss(logits_TE, mask_T)
    truth = sum(math.log(sum(math.exp(v) for v in logits_TE[t].tolist())) ** 2 for t in real(mask_T))
    assert ours.item() == pytest.approx(truth / max(len(real(mask_T)), 1), rel=1e-12)
    assert gradcheck(lambda x: z_loss(x, mask_T), (logits_TE,))
    if mask_T is not None:
        poisoned_TE = logits_TE.masked_fill(~mask_T[:, None], torch.nan)  # padding may hold anything
        assert torch.equal(z_loss(poisoned_TE, mask_T), ours)


@MASKS
def test_importance(logits_TE, mask_T):
    def gates(x):
        values_TK, experts_TK = x.topk(K)
        return torch.zeros_like(x).scatter(1, experts_TK, values_TK.softmax(-1))

    ours = losses.variation_squared(gates(logits_TE), mask_T)
    totals = [sum(gates(logits_TE)[t, e].item() for t in real(mask_T)) for e in range(E)]
    mean = sum(totals) / E
    truth = sum((v - mean) ** 2 for v in totals) / E / mean**2 if mean else 0.0
    assert ours.item() == pytest.approx(truth, rel=1e-10)
    if real(mask_T):
        assert gradcheck(lambda x: losses.variation_squared(gates(x), mask_T), (logits_TE,))


def test_load_is_that_expected_when_one_experts_noise_is_drawn_again(logits_TE):
    noise_TE, deviation_TE = torch.randn(T, E).double(), 0.3 + torch.rand(T, E).double()
    noisy_TE = (logits_TE + noise_TE * deviation_TE).detach()
    chances_TE = losses.chosen_with_new_noise(logits_TE, noisy_TE, deviation_TE, K)
    for t in range(T):
        for e in range(E):
            others = sorted((noisy_TE[t, j].item() for j in range(E) if j != e), reverse=True)
            truth = Normal(0.0, 1.0).cdf((logits_TE[t, e] - others[K - 1]) / deviation_TE[t, e])
            torch.testing.assert_close(chances_TE[t, e], truth.double())
    # and by drawing: 40,000 draws are within 0.013 at five standard errors
    drawn = logits_TE[0, 3] + torch.randn(40_000).double() * deviation_TE[0, 3]
    better = (noisy_TE[0, [0, 1, 2, 4]][None] > drawn[:, None]).sum(1) < K
    assert better.double().mean().item() == pytest.approx(chances_TE[0, 3].item(), abs=0.013)
    totals_E = chances_TE.sum(0)
    truth = totals_E.var(correction=0) / totals_E.mean() ** 2
    torch.testing.assert_close(losses.variation_squared(chances_TE), truth)
    assert gradcheck(
        lambda x: losses.variation_squared(losses.chosen_with_new_noise(x, noisy_TE, deviation_TE, K)), (logits_TE,)
    )


@pytest.mark.parametrize("deviation", [0.0, 1e-38, 1e-20])
def test_load_has_a_gradient_where_the_deviation_of_the_noise_underflows(deviation):
    clean_TE = torch.randn(T, E, requires_grad=True)
    deviation_TE = torch.full((T, E), deviation, requires_grad=True)
    chances_TE = losses.chosen_with_new_noise(clean_TE, clean_TE.detach(), deviation_TE, K)
    losses.variation_squared(chances_TE).backward()
    assert clean_TE.grad.isfinite().all() and deviation_TE.grad.isfinite().all()
    is_best_TE = clean_TE >= clean_TE.topk(K).values[:, -1:]
    assert ((chances_TE > 0.5) == is_best_TE).all()


@MASKS
def test_alignment(logits_TE, mask_T):
    inside_TE = (torch.arange(E) < 2) ^ (torch.arange(T) % 2 == 0)[:, None]

    def ours(x):
        probs_TE = x.softmax(-1)
        last_T = probs_TE.masked_fill(~inside_TE, -1).topk(K).values[:, -1]
        return losses.alignment_loss(probs_TE, inside_TE, last_T, mask_T)

    probs_TE = logits_TE.softmax(-1).tolist()
    truth = 0.0
    for t in real(mask_T):
        last = sorted((probs_TE[t][e] for e in range(E) if inside_TE[t, e]), reverse=True)[K - 1]
        truth += sum(max(0.0, probs_TE[t][e] - last) for e in range(E) if not inside_TE[t, e])
    assert ours(logits_TE).item() == pytest.approx(truth / max(len(real(mask_T)), 1), rel=1e-12)
    assert gradcheck(ours, (logits_TE,))


def naive_balance(probs_TE, experts):
    """E sum f P over the experts given, from counting."""
    size = probs_TE.shape[1]
    counts = [sum(e == j for e in experts) for j in range(size)]
    return size * sum(counts[j] / len(experts) * probs_TE[:, j].mean() for j in range(size))


@pytest.mark.parametrize(
    ("settings", "top_k"),
    [
        ({"name": "switch", "jitter": 0.0}, 1),
        ({"name": "gshard"}, 2),
        ({"name": "topk"}, 3),
        ({"name": "topk", "score": "sigmoid"}, 3),
        ({"name": "ktop1"}, 2),
        ({"name": "hierarchical", "groups": 2}, 2),
        ({"name": "dense_to_sparse", "threshold": 0.1}, 1),
    ],
    ids=["switch", "gshard", "topk", "topk-sigmoid", "ktop1", "hierarchical", "dense_to_sparse"],
)
def test_each_gate_balances_what_its_paper_says(settings, top_k):
    gate = build(settings, top_k).train()
    ids_BS, x_TD = batch()
    choices = gate(x_TD, context_of(ids_BS, losses=frozenset({"balance"})))
    logits_TE = x_TD @ gate.weight_ED.T
    probs_TE = logits_TE.softmax(-1)
    if settings.get("score") == "sigmoid":
        probs_TE = logits_TE.sigmoid() / logits_TE.sigmoid().sum(-1, keepdim=True)
    experts_TK = choices.experts_TK
    if settings["name"] == "gshard":
        truth = naive_balance(probs_TE, experts_TK[:, 0].tolist())
    elif settings["name"] == "ktop1":
        truth = sum(
            naive_balance(logits_TE[:, 4 * k : 4 * k + 4].softmax(-1), (experts_TK[:, k] - 4 * k).tolist())
            for k in range(2)
        )
    else:
        truth = naive_balance(probs_TE, [e for e in experts_TK.flatten().tolist() if e >= 0])
    torch.testing.assert_close(choices.losses["balance"], truth)
    ours, theirs = (torch.autograd.grad(v, gate.weight_ED)[0] for v in (choices.losses["balance"], truth))
    torch.testing.assert_close(ours, theirs)
