"""Experts of different widths: kernels and plain torch against one expert after another in fp64, gradients too."""

import gc

import pytest
import torch
from torch.nn import functional as F

from foundry_moe.ops.mlp import expert_mlp
from foundry_moe.ops.permute import plan_permute
from tests.helpers.live_bytes import LiveBytes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ACT = {"silu": F.silu, "gelu": F.gelu, "relu2": lambda z: F.relu(z).square()}
# no width a multiple of the block, an expert of one unit, a wide one
WIDTHS = (24, 1, 40, 16, 7, 72)


def operands(widths=WIDTHS, tokens=37, width=20, choices=3, dtype=torch.float64, gated=True):
    total = sum(widths)
    x = torch.randn(tokens, width, dtype=dtype, device=DEVICE, requires_grad=True)
    matrices = [torch.randn(total, width, dtype=dtype, device=DEVICE) / width**0.5 for _ in range(3)]
    w1, v1, w2 = (matrix.requires_grad_() for matrix in matrices)
    weights = torch.rand(tokens, choices, dtype=dtype, device=DEVICE).requires_grad_()
    experts = torch.argsort(torch.rand(tokens, len(widths), device=DEVICE), dim=1)[:, :choices].int()
    experts[0] = -1
    experts[1, 1:] = -1
    experts[experts == 3] = 2  # expert 3 has no tokens, and some choose expert 2 twice
    return x, w1, v1 if gated else None, w2, weights, experts


def truth(x, w1, v1, w2, weights, experts, widths, activation):
    """One token and one choice after another."""
    ends = torch.tensor([0, *widths]).cumsum(0).tolist()
    rows = []
    for t in range(x.shape[0]):
        y = torch.zeros_like(x[0])
        for k in range(experts.shape[1]):
            e = int(experts[t, k])
            if e >= 0:
                part = slice(ends[e], ends[e + 1])
                h = ACT[activation](w1[part] @ x[t])
                y = y + weights[t, k] * ((h if v1 is None else h * (v1[part] @ x[t])) @ w2[part])
        rows.append(y)
    return torch.stack(rows)


def gradients(y, tensors):
    torch.sin(y).sum().backward()
    found = [y.detach(), *(t.grad for t in tensors if t is not None)]
    for t in tensors:
        if t is not None:
            t.grad = None
    return found


def compare(backend, dtype, tolerance, memory="save", activation="silu", gated=True, **sizes):
    x, w1, v1, w2, weights, experts = operands(gated=gated, **sizes)
    widths = sizes.get("widths", WIDTHS)
    tensors = (x, w1, v1, w2, weights)
    expected = gradients(truth(*tensors, experts, widths, activation), tensors)
    cast = [None if t is None else t.detach().to(dtype).requires_grad_() for t in tensors]
    y = expert_mlp(
        cast[0], cast[4], plan_permute(experts, len(widths)), cast[1], cast[2], cast[3],
        widths=widths, activation=activation, backend=backend, memory=memory,
    )  # fmt: skip
    for measured, wanted in zip(gradients(y, cast), expected, strict=True):
        assert (measured.double() - wanted).abs().max() <= tolerance * wanted.abs().max()


@pytest.mark.quick
@pytest.mark.parametrize("gated", [True, False], ids=["glu", "mlp"])
def test_plain_torch_equals_one_expert_after_another(gated):
    compare("reference", torch.float64, 1e-12, gated=gated)


@pytest.mark.parametrize("memory", ["save", "recompute"])
@pytest.mark.parametrize(("gated", "activation"), [(True, "silu"), (True, "gelu"), (False, "relu2")])
def test_kernels_equal_one_expert_after_another(memory, gated, activation):
    # fp32 products of some tens of terms; gelu's own approximation is 7.5e-8
    compare("blocksparse", torch.float32, 5e-6, memory=memory, gated=gated, activation=activation)


@pytest.mark.parametrize("widths", [(16, 48, 16, 80, 32, 16), (32, 64, 32, 96, 64, 32)], ids=["of 16", "of 32"])
def test_kernels_for_widths_that_16_divides(widths):
    """Kernels get this as a constant, and leave out masks that tiles of such widths do not need."""
    compare("blocksparse", torch.float32, 5e-6, widths=widths)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-6), (torch.bfloat16, 3e-2)])
def test_kernels_at_widths_above_a_block_on_a_gpu(dtype, tolerance):
    compare("blocksparse", dtype, tolerance, widths=(512, 128, 640, 1024, 72, 256), tokens=700, width=256)


@pytest.fixture
def collected_at_once():
    """Interpreters of some Triton versions (3.3, 3.9) make cycles that hold operands until garbage is collected."""
    usual = gc.get_threshold()
    gc.set_threshold(20, 1, 1)
    yield
    gc.set_threshold(*usual)


@pytest.mark.usefixtures("collected_at_once")
@pytest.mark.parametrize("memory", ["save", "recompute"])
def test_a_step_never_holds_pre_activations_twice(memory):
    """Nor them and their gradient: the latter takes the former's place."""
    widths, tokens, width, choices = (64, 128), 512, 32, 2
    x, w1, v1, w2, weights, experts = operands(widths, tokens, width, choices)
    x, w1, v1, w2, weights = (t.detach().float().requires_grad_() for t in (x, w1, v1, w2, weights))
    plan = plan_permute(experts, len(widths))
    with LiveBytes() as live:
        expert_mlp(
            x, weights, plan, w1, v1, w2, widths=widths, activation="silu", backend="blocksparse", memory=memory
        ).sum().backward()
    pre_activations = 2 * tokens * choices * max(widths) * x.itemsize
    assert live.peak < 2 * pre_activations


def test_second_backward_through_one_graph_is_refused_or_right():
    x, w1, v1, w2, weights, experts = operands()
    x, w1, v1, w2, weights = (t.detach().float().requires_grad_() for t in (x, w1, v1, w2, weights))
    call = {"widths": WIDTHS, "activation": "silu", "backend": "blocksparse"}
    tensors = (x, weights, plan_permute(experts, len(WIDTHS)), w1, v1, w2)
    y = expert_mlp(*tensors, **call)
    y.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"second backward pass through experts needs `memory: recompute`"):
        y.sum().backward()
    y = expert_mlp(*tensors, **call, memory="recompute")
    first, second = (torch.autograd.grad(y.sum(), w2, retain_graph=True) for _ in range(2))
    assert torch.equal(first[0], second[0])


def test_no_tokens_give_zeros():
    x, w1, v1, w2, weights, experts = operands()
    x, w1, v1, w2, weights = (t.detach().float().requires_grad_() for t in (x, w1, v1, w2, weights))
    for none in (torch.full_like(experts, -1), experts[:0]):
        plan = plan_permute(none, len(WIDTHS))
        y = expert_mlp(x[: len(none)], weights[: len(none)], plan, w1, v1, w2, widths=WIDTHS, activation="silu")
        y.sum().backward()
        assert not y.any() and w1.grad is not None and not w1.grad.any() and not w2.grad.any()


@pytest.mark.parametrize("backend", ["reference", "blocksparse"])
def test_equal_widths_give_what_experts_of_one_width_do(backend):
    dtype = torch.float32
    x, w1, v1, w2, weights, experts = (t if t is None else t.detach() for t in operands((16,) * 6))
    x, w1, v1, w2, weights = (t.to(dtype) for t in (x, w1, v1, w2, weights))
    plan = plan_permute(experts, 6)
    keys = {"activation": "silu", "backend": backend}
    ours = expert_mlp(x, weights, plan, w1, v1, w2, widths=(16,) * 6, **keys)
    stacked = [w.view(6, 16, -1) for w in (w1, v1, w2)]
    one = expert_mlp(x, weights, plan, stacked[0], stacked[1], stacked[2].mT, **keys)
    torch.testing.assert_close(ours, one, rtol=1e-5, atol=1e-5)


@pytest.mark.quick
def test_what_does_not_fit_is_refused():
    x, w1, v1, w2, weights, experts = operands()
    plan = plan_permute(experts, len(WIDTHS))
    with pytest.raises(ValueError, match=r"w1 \(159, 20\) must be \(160, 20\) to fit x_TD .* experts of widths"):
        expert_mlp(x, weights, plan, w1[1:], v1, w2, widths=WIDTHS, activation="silu")
    with pytest.raises(ValueError, match="experts of one width"):
        expert_mlp(x, weights, plan, w1, v1, w2, widths=WIDTHS, activation="silu", backend="grouped")


@pytest.mark.parametrize("memory", ["save", "recompute"])
def test_a_compiled_model_computes_the_same(memory):
    x, w1, v1, w2, weights, experts = operands()
    inputs = [t.detach().float().requires_grad_() for t in (x, w1, v1, w2, weights)]
    plan = plan_permute(experts, len(WIDTHS))

    def model(x, w1, v1, w2, weights):
        call = {"widths": WIDTHS, "activation": "silu", "backend": "blocksparse", "memory": memory}
        return torch.tanh(expert_mlp(2 * x, weights, plan, w1, v1, w2, **call))

    results = []
    for call in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        y = call(*inputs)
        results.append([y, *torch.autograd.grad(y.square().sum(), inputs)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(theirs, ours, rtol=1e-6, atol=1e-6)
