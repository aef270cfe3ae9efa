"""The padded layout on its kernels: against the same in torch's operations, and those against loops.

Shapes: T tokens, K choices, E experts, D model width, F expert width.
"""

import pytest
import torch
from foundry_moe_kernels import padded as kernels

from foundry_moe.ops import expert_mlp, mlp, padded, plan_permute

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KINDS = ["random", "ragged", "all to one", "none chosen"]


def choices(kind, tokens=23, k=3, experts=5):
    experts_TK = torch.stack([torch.randperm(experts)[:k] for _ in range(tokens)])
    if kind == "ragged":
        experts_TK[torch.rand(tokens, k) < 0.4] = -1
    elif kind == "all to one":
        experts_TK[:, 0], experts_TK[:, 1:] = experts - 1, -1
    elif kind == "none chosen":
        experts_TK.fill_(-1)
    return experts_TK.to(DEVICE)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("capacity", [1, 9, 60])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("limited", [False, True])
def test_kernels_assign_the_slots_that_torch_assigns(kind, capacity, weighted, limited):
    experts_TK = choices(kind)
    # few different weights, so that many choices are equal
    weight_A = torch.randint(4, (experts_TK.numel(),), device=DEVICE).float() if weighted else None
    order_A = torch.argsort(weight_A, descending=True, stable=True) if weighted else None
    expert_A = experts_TK.t().reshape(-1)
    sorted_A = plan_permute(expert_A if order_A is None else expert_A[order_A], 5)
    given = (sorted_A.experts_TK, sorted_A.row_TK, sorted_A.offsets_E, order_A, experts_TK.shape, capacity)
    # below the slots that are allocated, where padding has none
    room = torch.tensor(max(1, capacity // 2), dtype=torch.int32, device=DEVICE) if limited else capacity
    for ours, truth in zip(kernels.assign_slots(*given, room), padded.assign_plain(*given, room), strict=True):
        assert torch.equal(ours, truth)


@pytest.mark.parametrize("kind", KINDS)
def test_each_expert_keeps_its_heaviest_choices(kind):
    experts_TK = choices(kind)
    weights_TK = torch.randint(6, experts_TK.shape, device=DEVICE) / 5
    plan = padded.plan_padded(experts_TK, 5, top_k=3, capacity=0.6, weights_TK=weights_TK)
    tokens = experts_TK.shape[0]
    for e in range(5):
        mine = [(t, k) for k in range(3) for t in range(tokens) if experts_TK[t, k] == e]
        heaviest = sorted(mine, key=lambda at: -weights_TK[at].item())[: plan.capacity]  # stable: first choices first
        assert {at for at in mine if plan.row_TK[at] >= 0} == set(heaviest)


@pytest.mark.parametrize(("rows", "width", "k"), [(1, 1, 1), (7, 37, 2), (10, 1030, 3), (0, 8, 1)])
def test_gather_writes_every_place(rows, width, k):
    x_TD = torch.randn(5, width + 3, device=DEVICE)[:, :width]
    source_R = torch.randint(-1, 5 * k, (rows,), dtype=torch.int32, device=DEVICE)
    truth = torch.where((source_R >= 0)[:, None], x_TD[source_R.clamp(min=0).long() // k], 0)
    assert torch.equal(kernels.gather(x_TD, source_R, k), truth)


@pytest.mark.parametrize("capacity", [0.6, "dynamic"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("activation", ["gelu", "silu"])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("weighted", "memory"), [(False, "save"), (True, "save"), (True, "recompute")])
def test_kernels_compute_what_torch_computes_in_outputs_and_every_gradient(
    capacity, kind, activation, gated, weighted, memory, monkeypatch
):
    monkeypatch.setattr(mlp, "on_gpu", lambda *_: lambda x: x.dtype is torch.float32)  # interpreted on a CPU
    experts_TK = choices(kind)
    plan = padded.plan_padded(experts_TK, 5, top_k=3, capacity=capacity)
    shapes = {"x": (23, 6), "w1": (5, 7, 6), "v1": (5, 7, 6), "w2": (5, 6, 7), "weights": (23, 3)}
    drawn = {name: torch.randn(shape, device=DEVICE) for name, shape in shapes.items()}
    direction_TD = torch.randn(23, 6, device=DEVICE)

    def run(dtype, function):
        given = {name: tensor.to(dtype).requires_grad_() for name, tensor in drawn.items()}
        v1 = given["v1"] if gated else None
        weights = given["weights"] if weighted else None
        y_TD = function(given["x"], weights, given["w1"], v1, given["w2"])
        used = [given[n] for n in shapes if (gated or n != "v1") and (weighted or n != "weights")]
        return [y_TD, *torch.autograd.grad(y_TD, used, direction_TD.to(dtype))]

    def function(x, weights, w1, v1, w2):  # fp64, which no kernel takes, in torch
        return expert_mlp(x, weights, plan, w1, v1, w2, activation=activation, memory=memory)

    for ours, truth in zip(run(torch.float32, function), run(torch.float64, function), strict=True):
        # fp32 beside fp64; tf32 is off by default
        torch.testing.assert_close(ours.double(), truth, rtol=1e-4, atol=1e-5)


def test_a_second_backward_is_refused(monkeypatch):
    """The first one has overwritten what the second would read."""
    monkeypatch.setattr(mlp, "on_gpu", lambda *_: lambda x: True)
    plan = padded.plan_padded(choices("random"), 5, top_k=3, capacity=1.0)
    x = torch.randn(23, 6, device=DEVICE, requires_grad=True)
    w1, w2 = torch.randn(5, 7, 6, device=DEVICE), torch.randn(5, 6, 7, device=DEVICE)
    y = expert_mlp(x, None, plan, w1, None, w2, activation="gelu").sum()
    y.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward pass through experts needs"):
        y.backward()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_kernels_in_half_precision_at_real_widths(dtype):
    tokens, width, hidden, experts = 4096, 512, 1024, 16
    experts_TK = torch.multinomial(torch.rand(experts), tokens, replacement=True)[:, None].cuda()
    for capacity, heaviest in ((1.0, False), (1.0, True), ("dynamic", False)):
        weights_TK = torch.rand(tokens, 1, device="cuda")
        plan = padded.plan_padded(
            experts_TK, experts, top_k=1, capacity=capacity, weights_TK=weights_TK if heaviest else None
        )
        given = [torch.randn(tokens, width), torch.randn(experts, hidden, width) / 23, None]
        given.append(torch.randn(experts, width, hidden) / 32)
        direction_TD = torch.randn(tokens, width)
        results = []
        for to in (lambda t: t.to("cuda", dtype), lambda t: t.to("cuda", dtype).double()):
            x, w1, w2 = (to(t).requires_grad_() for t in given if t is not None)
            weights = weights_TK.to(torch.promote_types(x.dtype, torch.float32)).requires_grad_()
            y = expert_mlp(x, weights, plan, w1, None, w2, activation="gelu")
            results.append([y, *torch.autograd.grad(y, (x, weights, w1, w2), to(direction_TD))])
        for ours, truth in zip(*results, strict=True):
            error = (ours.double() - truth).norm() / truth.norm()
            # bf16 has 8 bits: rounding of z, h and the gradients between products
            assert error < 1e-2, (capacity, error)
