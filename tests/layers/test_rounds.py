"""Experts in rounds compute what they compute at once, and hold no more than a round's rows."""

import pytest
import torch

from foundry_moe.layers.rounds import compute_in_rounds
from foundry_moe.ops import expert_mlp, plan_permute

TOKENS, CHOICES, EXPERTS, WIDTH, HIDDEN = 50, 3, 4, 8, 12


def operands(kind):
    torch.manual_seed(5)
    x = torch.randn(TOKENS, WIDTH, dtype=torch.float64)
    weights = torch.rand(TOKENS, CHOICES, dtype=torch.float64)
    matrices = [torch.randn(EXPERTS, HIDDEN, WIDTH, dtype=torch.float64) for _ in range(2)]
    matrices.append(torch.randn(EXPERTS, WIDTH, HIDDEN, dtype=torch.float64))
    experts = torch.randint(-1, EXPERTS, (TOKENS, CHOICES))
    if kind == "one expert":
        experts.fill_(2)
    elif kind == "gaps":  # tokens without choices at both ends and in the middle
        experts[:7], experts[20:31], experts[-3:] = -1, -1, -1
    return x, weights, matrices, experts.int()


def run(kind, most_rows):
    x, weights, matrices, experts = operands(kind)
    inputs = [t.requires_grad_() for t in (x, weights, *matrices)]
    seen = []

    def mlp(x_QD, weights_QK, plan):
        seen.append(plan.num_rows)
        return expert_mlp(x_QD, weights_QK, plan, *matrices, activation="silu", backend="reference")

    rows = int((experts >= 0).sum())
    y, rounds = compute_in_rounds(mlp, x, weights, plan_permute(experts, EXPERTS, rows), most_rows)
    forward = list(seen)
    y.sin().sum().backward()
    return y.detach(), [t.grad for t in inputs], rounds, forward, seen[len(forward) :], rows


@pytest.mark.quick
@pytest.mark.parametrize("kind", ["random", "one expert", "gaps"])
@pytest.mark.parametrize("most_rows", [3, 10, 40, 77])
def test_rounds_give_the_same_results_and_gradients(kind, most_rows):
    expected, wanted, one, _, _, _ = run(kind, None)
    y, grads, rounds, forward, again, rows = run(kind, most_rows)
    assert one == 1 and rounds == len(forward) >= -(-rows // most_rows)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)
    for grad, want in zip(grads, wanted, strict=True):
        torch.testing.assert_close(grad, want, rtol=1e-10, atol=1e-10)
    assert max(forward) <= most_rows and sum(forward) == rows
    assert sorted(again) == sorted(forward[1:])  # all but the first are computed again


@pytest.mark.quick
def test_an_even_load_is_one_round_and_no_tokens_are_none_more():
    *_, rounds, forward, again, rows = run("random", TOKENS * CHOICES)
    assert rounds == 1 and forward == [rows] and again == []
    x, weights, _, experts = operands("random")
    plan = plan_permute(experts[:0], EXPERTS, 0)
    y, rounds = compute_in_rounds(lambda x_QD, *_: x_QD * 2, x[:0], weights[:0], plan, 0)
    assert y.shape == (0, WIDTH) and rounds == 1
