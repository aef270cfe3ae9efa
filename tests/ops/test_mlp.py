"""Every backend against a loop over tokens in fp64; the choice of backend and its errors."""

import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from foundry_moe.ops import POINTWISE, expert_mlp, plan_permute
from foundry_moe.ops.mlp import Biases

pytestmark = pytest.mark.quick
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def naive(x_TD, weights_TK, experts_TK, w1, v1, w2, act):
    out = []
    for t in range(x_TD.shape[0]):
        y_D = torch.zeros_like(x_TD[t])
        for k, e in enumerate(experts_TK[t].tolist()):
            if e >= 0:
                h_F = act(w1[e] @ x_TD[t]) * (1 if v1 is None else v1[e] @ x_TD[t])
                y_D = y_D + weights_TK[t, k] * (w2[e] @ h_F)
        out.append(y_D)
    return torch.stack(out)


@pytest.mark.parametrize("activation", list(POINTWISE))
@pytest.mark.parametrize("gated", [True, False])
def test_reference_equals_a_loop_over_tokens_in_outputs_and_every_gradient(activation, gated):
    experts_TK = torch.tensor([[0, 3], [3, 0], [3, -1], [-1, -1], [3, 1]])  # expert 2 is empty, token 3 has none
    leaves = [torch.randn(5, 6), torch.rand(5, 2), torch.randn(4, 7, 6), torch.randn(4, 7, 6), torch.randn(4, 6, 7)]
    x, weights, w1, v1, w2 = (leaf.double().requires_grad_() for leaf in leaves)
    v1 = v1 if gated else None
    inputs = [t for t in (x, weights, w1, v1, w2) if t is not None]
    y = expert_mlp(x, weights, plan_permute(experts_TK, 4), w1, v1, w2, activation=activation, backend="reference")
    truth = naive(x, weights, experts_TK, w1, v1, w2, POINTWISE[activation])
    torch.testing.assert_close(y, truth)
    direction = torch.randn_like(y)
    for ours, theirs in zip(
        torch.autograd.grad(y, inputs, direction), torch.autograd.grad(truth, inputs, direction), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("gated", [True, False])
def test_biases_are_those_of_the_choices_that_are_some(gated, weighted):
    """Weights of choices that are none count for nothing, whatever they are."""
    experts_TK = torch.tensor([[0, 3], [3, 0], [3, -1], [-1, -1], [-1, 0]])
    leaves = [torch.randn(5, 6), torch.rand(5, 2) + 1, torch.randn(4, 7, 6), torch.randn(4, 7, 6), torch.randn(4, 6, 7)]
    x, weights, w1, v1, w2 = (leaf.double().requires_grad_() for leaf in leaves)
    biases = [torch.randn(4, size, dtype=torch.float64, requires_grad=True) for size in (7, 7, 6)]
    b1, c1, b2 = biases
    rows = []
    for t, chosen in enumerate(experts_TK.tolist()):
        y_D = 0 * x[t]
        for k, e in enumerate(chosen):
            if e >= 0:
                h_F = POINTWISE["silu"](w1[e] @ x[t] + b1[e]) * (v1[e] @ x[t] + c1[e] if gated else 1)
                y_D = y_D + (weights[t, k] if weighted else 1) * (w2[e] @ h_F + b2[e])
        rows.append(y_D)
    given = weights if weighted else None
    y = expert_mlp(
        x, given, plan_permute(experts_TK, 4), w1, v1 if gated else None, w2,
        activation="silu", backend="reference", biases=Biases(b1, c1 if gated else None, b2),
    )  # fmt: skip
    truth, inputs = torch.stack(rows), [x, w1, w2, b1, b2, *[v1, c1] * gated, *[weights] * weighted]
    torch.testing.assert_close(y, truth)
    direction = torch.randn_like(y)
    for ours, theirs in zip(
        torch.autograd.grad(y, inputs, direction), torch.autograd.grad(truth, inputs, direction), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_activations_are_the_formulas_of_their_names():
    x = torch.linspace(-6, 6, 101, dtype=torch.float64)
    truth = {
        "silu": x / (1 + (-x).exp()),
        "gelu": x * torch.special.ndtr(x),
        "gelu_tanh": x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
        "relu": x.clamp(min=0),
        "relu2": x.clamp(min=0) ** 2,
    }
    assert truth.keys() == POINTWISE.keys()
    for name, expected in truth.items():
        torch.testing.assert_close(POINTWISE[name](x), expected)


def test_expert_with_no_tokens_gets_zero_gradient():
    w = [torch.randn(3, 4, 4, requires_grad=True) for _ in range(2)]
    plan = plan_permute(torch.tensor([[0], [2]]), 3)
    expert_mlp(torch.randn(2, 4), None, plan, w[0], None, w[1], activation="gelu", backend="reference").sum().backward()
    for parameter in w:
        assert parameter.grad[1].abs().sum() == 0 < parameter.grad[0].abs().sum()


@pytest.mark.parametrize(
    ("backend", "memory"), [("blocksparse", "save"), ("blocksparse", "recompute"), ("reference", "save")]
)
def test_second_derivatives_are_refused_and_activation_checkpointing_is_not(backend, memory):
    def leaf(*shape):
        return torch.randn(*shape, device=DEVICE, requires_grad=True)

    x, weights, w1, v1, w2 = leaf(6, 16), leaf(6, 2), leaf(3, 16, 16), leaf(3, 16, 16), leaf(3, 16, 16)
    plan = plan_permute(torch.rand(6, 3, device=DEVICE).argsort(1)[:, :2], 3)

    def run(x):
        return expert_mlp(x, weights, plan, w1, v1, w2, activation="silu", backend=backend, memory=memory).sin().sum()

    with pytest.raises(ValueError, match=r"create_graph \(True\): MoE layers have no second derivatives"):
        torch.autograd.grad(run(x), x, create_graph=True)
    leaves = (x, weights, w1, v1, w2)
    expected = torch.autograd.grad(run(x), leaves)
    for reentrant in (True, False):
        checkpoint(run, x, use_reentrant=reentrant).backward()
        for one, gradient in zip(leaves, expected, strict=True):
            torch.testing.assert_close(one.grad, gradient)
            one.grad = None


def test_autocast_computes_in_its_dtype_and_leaves_gradients_in_the_parameters():
    x, w1, w2 = torch.randn(4, 8), torch.randn(2, 8, 8, requires_grad=True), torch.randn(2, 8, 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = expert_mlp(x, None, plan_permute(torch.tensor([0, 1, 1, 0]), 2), w1, None, w2, activation="relu")
    assert y.dtype is torch.bfloat16
    y.sum().backward()
    assert w1.grad.dtype is torch.float32


def test_autocast_leaves_fp64_as_it_is_like_a_linear_layer():
    x, w1, w2 = (torch.randn(*shape, dtype=torch.float64) for shape in ((4, 8), (2, 8, 8), (2, 8, 8)))
    arguments = (x, None, plan_permute(torch.tensor([0, 1, 1, 0]), 2), w1, None, w2)
    expected = expert_mlp(*arguments, activation="relu")
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.nn.functional.linear(x, w1[0]).dtype is torch.float64
        y = expert_mlp(*arguments, activation="relu")
    assert torch.equal(y, expected)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"x": torch.randn(3, 5)}, r"x_TD \(3, 5\) must be \[tokens, 4\]"),
        ({"x": torch.randn(2, 4)}, r"x_TD \(2, 4\) must be \[3, D\]: the plan is for 3 tokens"),
        ({"x": torch.randn(4, 4)}, r"x_TD \(4, 4\) must be \[3, D\]"),
        ({"x": torch.randn(1, 3, 4)}, r"x_TD \(1, 3, 4\) must be \[3, D\]"),
        ({"weights": torch.rand(2, 1)}, r"weights_TK \(2, 1\) must be \(3, 1\)"),
        ({"weights": torch.rand(3, 2)}, r"weights_TK \(3, 2\) must be \(3, 1\)"),
        ({"weights": torch.rand(3)}, r"weights_TK \(3,\) must be \(3, 1\)"),
        ({"w2": torch.randn(2, 4, 4)}, r"w2 \(2, 4, 4\) must be \(2, 4, 6\)"),
        ({"v1": torch.randn(2, 6, 5)}, "must have the shape of w1"),
        ({"experts": 3}, "the plan is for 3 experts, the weights for 2"),
        ({"experts": 1}, "the plan is for 1 experts, the weights for 2"),
        ({"activation": "swish"}, "activation 'swish' is not one of"),
        ({"backend": "grouped"}, "backend grouped needs bf16 on a CUDA device"),
        ({"biases": ((2, 6), (2, 6), (2, 4))}, r"the bias of v1 must be None, not \[2, 6\]"),
        ({"biases": ((2, 6), None, (2, 4)), "v1": torch.randn(2, 6, 4)}, r"of v1 must be \[2, 6\], not None"),
        ({"biases": ((2, 1), None, (2, 4))}, r"the bias of w1 must be \[2, 6\], not \[2, 1\]"),
        ({"biases": ((2, 6), None, (2, 1))}, r"the bias of w2 must be \[2, 4\], not \[2, 1\]"),
    ],
)
def test_wrong_use_is_named(change, sentence):
    experts = change.get("experts", 2)
    plan = plan_permute(torch.tensor([0, 1, 1]).clamp(max=experts - 1), experts)
    shapes = change.get("biases")
    biases = None if shapes is None else Biases(*(None if shape is None else torch.randn(shape) for shape in shapes))
    with pytest.raises(ValueError, match=sentence):
        expert_mlp(
            change.get("x", torch.randn(3, 4)),
            change.get("weights"),
            plan,
            torch.randn(2, 6, 4),
            change.get("v1"),
            change.get("w2", torch.randn(2, 4, 6)),
            activation=change.get("activation", "relu"),
            backend=change.get("backend", "reference"),
            biases=biases,
        )


@pytest.mark.gpu
@pytest.mark.parametrize("gated", [True, False])
def test_grouped_equals_the_fp64_reference_as_closely_as_bf16_allows(gated):
    experts, width, hidden, tokens, choices = 8, 128, 256, 500, 2
    experts_TK = torch.randint(0, experts - 1, (tokens, choices), device="cuda")  # the last expert is empty
    experts_TK[::7, 1] = -1
    leaves = [
        torch.randn(tokens, width),
        torch.rand(tokens, choices),
        torch.randn(experts, hidden, width) / width**0.5,
        torch.randn(experts, hidden, width) / width**0.5 if gated else None,
        torch.randn(experts, width, hidden) / hidden**0.5,
    ]
    ours = [t.cuda().bfloat16().requires_grad_() if t is not None else None for t in leaves]
    truth = [t.detach().double().requires_grad_() if t is not None else None for t in ours]
    plan = plan_permute(experts_TK, experts)
    outputs = [
        expert_mlp(x, w, plan, w1, v1, w2, activation="silu", backend=backend)
        for (x, w, w1, v1, w2), backend in ((ours, "grouped"), (truth, "reference"))
    ]
    direction = torch.randn_like(outputs[0])
    pairs = [(outputs[0], outputs[1])]
    outputs[0].backward(direction)
    outputs[1].backward(direction.double())
    pairs += [(o.grad, t.grad) for o, t in zip(ours, truth, strict=True) if o is not None]
    for mine, wanted in pairs:
        # bf16 has 8 bits of mantissa: 2^-8 a rounding, a few roundings on the way
        assert (mine.double() - wanted).norm() <= 1.5e-2 * wanted.norm()
