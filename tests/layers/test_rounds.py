"""A layer in rounds computes what it computes at once, and keeps nothing of later rounds."""

from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from foundry_moe.layers.rounds import _add_gradient, compute_in_rounds
from foundry_moe.ops import expert_mlp, plan_permute

TOKENS, CHOICES, EXPERTS, WIDTH, HIDDEN = 50, 3, 4, 8, 12
ROUNDS = [slice(0, 13), slice(13, 40), slice(40, 40), slice(40, 50)]  # one of them is empty
EMPTY_FIRST = [slice(0, 0), slice(0, 50)]


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


def in_rounds(x, weights, *matrices, rounds=None, kind="gaps", backend="reference", seen=None):
    """y; as one if `rounds` is None. `seen` gets the tokens of each round that is computed."""
    experts = operands(kind)[3]

    def compute(number, x, weights, *parameters):
        tokens = slice(None) if rounds is None else rounds[number]
        if seen is not None:
            seen.append(tokens)
        part = experts[tokens]
        plan = plan_permute(part, EXPERTS, int((part >= 0).sum()))
        return expert_mlp(x, weights, plan, *parameters, activation="silu", backend=backend)

    if rounds is None:
        return compute(0, x, weights, *matrices)
    return compute_in_rounds(compute, rounds, x, weights, matrices)


def gradients(call, inputs):
    leaves = [t.detach().requires_grad_() for t in inputs]
    y = call(*leaves)
    return [y.detach(), *torch.autograd.grad(y.sin().sum(), leaves)]


def assert_near(ours, wanted, tolerance):
    for tensor, want in zip(ours, wanted, strict=True):
        assert tensor.dtype == want.dtype
        assert (tensor - want).norm() < tolerance * want.norm()


@pytest.mark.quick
@pytest.mark.parametrize("kind", ["random", "one expert", "gaps"])
@pytest.mark.parametrize("rounds", [ROUNDS, EMPTY_FIRST])
def test_rounds_give_the_same_results_and_gradients(kind, rounds):
    x, weights, matrices, _ = operands(kind)
    inputs, seen = [x, weights, *matrices], []
    wanted = gradients(partial(in_rounds, kind=kind), inputs)
    ours = gradients(partial(in_rounds, kind=kind, rounds=rounds, seen=seen), inputs)
    for tensor, want in zip(ours, wanted, strict=True):
        torch.testing.assert_close(tensor, want, rtol=1e-10, atol=1e-10)
    # later rounds come first, as they keep nothing, and are computed again after the first one's backward pass
    assert seen == [*rounds[1:], rounds[0], *rounds[1:]]


@pytest.mark.quick
def test_gradients_of_results_are_not_overwritten():
    """Others may use them: a sum gives the same tensor to each of its terms."""
    x, weights, matrices, _ = operands("gaps")
    x.requires_grad_()
    y = in_rounds(x, weights, *matrices, rounds=ROUNDS)
    dy = torch.randn_like(y)
    kept = dy.clone()
    y.backward(dy)
    assert torch.equal(dy, kept)


@pytest.mark.parametrize("context", ["checkpointed", "without gradients", "autocast"])
def test_rounds_in_other_contexts(context):
    x, weights, matrices, _ = operands("gaps")
    inputs = [x, weights, *(0.2 * matrix for matrix in matrices)]  # sines of large numbers would magnify rounding
    if context == "without gradients":
        with torch.no_grad():
            torch.testing.assert_close(in_rounds(*inputs, rounds=ROUNDS), in_rounds(*inputs))
        return
    if context == "autocast":
        inputs = [t.float() for t in inputs]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            ours, wanted = (gradients(partial(in_rounds, rounds=rounds), inputs) for rounds in (ROUNDS, None))
        assert_near(ours, wanted, 2**-8)  # bf16: each round's gradients are rounded by themselves
        return
    again = partial(checkpoint, partial(in_rounds, rounds=ROUNDS), use_reentrant=False)
    assert_near(gradients(again, inputs), gradients(in_rounds, inputs), 1e-13)


@pytest.mark.skipif(torch.cuda.is_available(), reason="operands are on the CPU, for the interpreter")
def test_rounds_on_the_block_sparse_kernels():
    x, weights, matrices, _ = operands("gaps")
    inputs = [t.float() for t in (x, weights, *(0.2 * matrix for matrix in matrices))]
    ours = gradients(partial(in_rounds, rounds=ROUNDS, backend="blocksparse"), inputs)
    assert_near(ours, gradients(in_rounds, inputs), 1e-5)


def test_frozen_experts_and_tokens_get_no_gradient():
    x, weights, (w1, v1, w2), _ = operands("gaps")
    leaf = v1.clone().requires_grad_()
    in_rounds(x, weights, w1, leaf, w2, rounds=ROUNDS).sin().sum().backward()
    other = v1.clone().requires_grad_()
    in_rounds(x, weights, w1, other, w2).sin().sum().backward()
    torch.testing.assert_close(leaf.grad, other.grad)


def test_a_gradient_of_a_later_round_is_freed_once_it_is_added():
    leaf, place = torch.ones(3, requires_grad=True), torch.full((3,), 2.0)
    _add_gradient(leaf, place)
    (3 * leaf).sum().backward()
    assert torch.equal(place, torch.full((3,), 5.0)) and leaf.grad is None
