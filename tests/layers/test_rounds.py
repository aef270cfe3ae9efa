"""Experts in rounds compute what they compute at once, and hold no more than a round's rows."""

from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

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

    def mlp(x_QD, weights_QK, plan, *parameters):
        seen.append(plan.num_rows)
        return expert_mlp(x_QD, weights_QK, plan, *parameters, activation="silu", backend="reference")

    rows = int((experts >= 0).sum())
    y, rounds = compute_in_rounds(mlp, tuple(matrices), x, weights, plan_permute(experts, EXPERTS, rows), most_rows)
    forward = list(seen)
    y.sin().sum().backward()
    return y.detach(), [t.grad for t in inputs], rounds, forward, seen[len(forward) :], rows


@pytest.mark.quick
@pytest.mark.parametrize("kind", ["random", "one expert", "gaps"])
@pytest.mark.parametrize("most_rows", [3, 10, 40, 77])
def test_rounds_give_the_same_results_and_gradients(kind, most_rows):
    expected, wanted, one, _, _, _ = run(kind, None)
    y, grads, rounds, forward, again, rows = run(kind, most_rows)
    assert one == 1 and rounds == len(forward) >= -(-rows // (most_rows + CHOICES - 1))
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)
    for grad, want in zip(grads, wanted, strict=True):
        torch.testing.assert_close(grad, want, rtol=1e-10, atol=1e-10)
    assert max(forward) < most_rows + CHOICES and sum(forward) == rows
    assert again == forward[:-1]  # all but the first, which comes last, are computed again


@pytest.mark.quick
def test_an_even_load_is_one_round_and_no_tokens_are_none_more():
    *_, rounds, forward, again, rows = run("random", TOKENS * CHOICES)
    assert rounds == 1 and forward == [rows] and again == []
    x, weights, _, experts = operands("random")
    plan = plan_permute(experts[:0], EXPERTS, 0)
    y, rounds = compute_in_rounds(lambda x_QD, *_: x_QD * 2, (), x[:0], weights[:0], plan, 0)
    assert y.shape == (0, WIDTH) and rounds == 1


def in_rounds(x, weights, *matrices, most_rows, backend="reference"):
    """y of the "gaps" case."""
    experts = operands("gaps")[3]
    plan = plan_permute(experts, EXPERTS, int((experts >= 0).sum()))

    def mlp(x_QD, weights_QK, plan, *parameters):
        return expert_mlp(x_QD, weights_QK, plan, *parameters, activation="silu", backend=backend)

    return compute_in_rounds(mlp, matrices, x, weights, plan, most_rows)[0]


def gradients(call, inputs):
    leaves = [t.detach().requires_grad_() for t in inputs]
    y = call(*leaves)
    return [y.detach(), *torch.autograd.grad(y.sin().sum(), leaves)]


def assert_near(ours, wanted, tolerance):
    for tensor, want in zip(ours, wanted, strict=True):
        assert tensor.dtype == want.dtype
        assert (tensor - want).norm() < tolerance * want.norm()


@pytest.mark.parametrize("context", ["checkpointed", "without gradients", "autocast"])
def test_rounds_in_other_contexts(context):
    x, weights, matrices, _ = operands("gaps")
    inputs = [x, weights, *(0.2 * matrix for matrix in matrices)]  # sines of large numbers would magnify rounding
    if context == "without gradients":
        with torch.no_grad():
            torch.testing.assert_close(in_rounds(*inputs, most_rows=20), in_rounds(*inputs, most_rows=None))
        return
    if context == "autocast":
        inputs = [t.float() for t in inputs]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            ours, wanted = (gradients(partial(in_rounds, most_rows=rows), inputs) for rows in (20, None))
        assert_near(ours, wanted, 2**-8)  # bf16: each round's gradients are rounded by themselves
        return
    again = partial(checkpoint, partial(in_rounds, most_rows=20), use_reentrant=False)
    assert_near(gradients(again, inputs), gradients(partial(in_rounds, most_rows=None), inputs), 1e-13)


@pytest.mark.skipif(torch.cuda.is_available(), reason="operands are on the CPU, for the interpreter")
def test_rounds_on_the_block_sparse_kernels():
    x, weights, matrices, _ = operands("gaps")
    inputs = [t.float() for t in (x, weights, *(0.2 * matrix for matrix in matrices))]
    ours = gradients(partial(in_rounds, most_rows=30, backend="blocksparse"), inputs)
    assert_near(ours, gradients(partial(in_rounds, most_rows=None), inputs), 1e-5)


def test_frozen_experts_and_tokens_get_no_gradient():
    x, weights, (w1, v1, w2), _ = operands("gaps")
    leaf = v1.clone().requires_grad_()
    in_rounds(x, weights, w1, leaf, w2, most_rows=20).sin().sum().backward()
    other = v1.clone().requires_grad_()
    in_rounds(x, weights, w1, other, w2, most_rows=None).sin().sum().backward()
    torch.testing.assert_close(leaf.grad, other.grad)
