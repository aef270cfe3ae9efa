"""Experts with LoRA on the Hopper kernels against the products of autograd: outputs and every gradient.

On a CPU the interpreter runs the kernels in fp32 with small tiles, and twins take those in Gluon; on Hopper they run in
bf16.

Shapes: T tokens, K choices, R rows, E experts, D model width, F expert width.
"""

from __future__ import annotations

import pytest
import torch
from foundry_moe_kernels import expert_products as ep
from foundry_moe_kernels import low_rank as kernels
from foundry_moe_kernels.launch import INTERPRETED

from foundry_moe.ops import plan_permute
from foundry_moe.ops.lora import Adapter, Adapters, lora_mlp
from foundry_moe.ops.unfused import unfused_mlp

if not ep.descriptors.GLUON:
    pytest.skip("the Hopper kernels need Triton 3.6", allow_module_level=True)
CUDA = torch.cuda.is_available()
HOPPER = CUDA and ep.descriptors.device_supported(torch.device("cuda"))
DEVICE, DTYPE = ("cuda", torch.bfloat16) if CUDA else ("cpu", torch.float32)
E, K = 5, 2
SIZES = (264, 392, 300) if CUDA else (40, 72, 23)  # D, F and tokens
pytestmark = [
    pytest.mark.quick,
    pytest.mark.skipif(not (HOPPER or INTERPRETED), reason="kernels need Hopper or TRITON_INTERPRET=1"),
]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    if not CUDA:
        from tests.helpers import hopper_twin

        hopper_twin.stand_in(monkeypatch)
        monkeypatch.setattr(kernels, "PROJECT", kernels.ProgramSize(rows=16, columns=16))
        for sizes in ("OUTER", "OUTER_PROJECTED", "PLANES_OUTER"):
            monkeypatch.setattr(kernels, sizes, kernels.ProgramSize(rows=16, columns=32))
        monkeypatch.setattr(kernels, "HIDDEN", kernels.ProgramSize(rows=16, columns=32))


def problem(rank: int, gated: bool, weighted: bool, dims=SIZES, dtype=DTYPE):
    """x, combine weights, choices that leave expert 1 without tokens, frozen weights and adapters of w1, v1 and w2."""
    d, f, tokens = dims
    torch.manual_seed(rank)

    def new(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, device=DEVICE) * scale).to(dtype)

    weights = new(E, f, d, scale=d**-0.5), new(E, f, d, scale=d**-0.5) if gated else None, new(E, d, f, scale=f**-0.5)
    shapes = ((d, f), *(((d, f),) if gated else ()), (f, d))
    factors = [(0.3 * torch.randn(E, size, rank, device=DEVICE)).requires_grad_() for pair in shapes for size in pair]
    x_TD = new(tokens, d).requires_grad_()
    weights_TK = torch.rand(tokens, K, device=DEVICE).to(dtype).requires_grad_() if weighted else None
    chosen = torch.tensor([0, 2, 3, 4])
    experts_TK = torch.stack([chosen[torch.randperm(4)[:K]] for _ in range(tokens)]).to(DEVICE)
    return x_TD, weights_TK, experts_TK, weights, factors


def adapters_of(factors, gated: bool) -> Adapters:
    pairs = [Adapter(*factors[i : i + 2]) for i in range(0, len(factors), 2)]
    return Adapters(pairs[0], pairs[1] if gated else None, pairs[-1], scale=0.7)


def error(ours: torch.Tensor, truth: torch.Tensor) -> float:
    return float((ours.double() - truth.double()).norm() / truth.double().norm().clamp(min=1e-30))


@pytest.mark.parametrize("memory", ["save", "recompute"])
@pytest.mark.parametrize(
    ("rank", "activation", "gated", "weighted"),
    [(3, "silu", True, True), (16, "gelu", True, False), (5, "relu2", False, True), (24, "silu", True, True)],
)
def test_outputs_and_every_gradient_equal_plain_products(rank, activation, gated, weighted, memory):
    x_TD, weights_TK, experts_TK, weights, factors = problem(rank, gated, weighted)
    leaves = [leaf for leaf in (x_TD, weights_TK, *factors) if leaf is not None]
    plan = plan_permute(experts_TK, E)
    adapters = adapters_of(factors, gated)
    y_TD = lora_mlp(x_TD, weights_TK, plan, weights, adapters, activation=activation, memory=memory)
    dy_TD = torch.randn_like(y_TD)
    ours = [y_TD, *torch.autograd.grad(y_TD, leaves, dy_TD)]
    high = [leaf.detach().double().requires_grad_() for leaf in leaves]
    exact = iter(high)
    x_64, w_64 = next(exact), next(exact) if weighted else None
    truth_TD = unfused_mlp(
        x_64, w_64, plan, tuple(None if w is None else w.double() for w in weights),
        activation=activation, backend="reference", adapters=adapters_of(list(exact), gated),
    )  # fmt: skip
    truth = [truth_TD, *torch.autograd.grad(truth_TD, high, dy_TD.double())]
    # bf16: z, h, dz and their like are rounded once each to 2^-9; fp32: sums of at most 400 products
    tolerance = 2e-2 if CUDA else 3e-6
    for found, expected in zip(ours, truth, strict=True):
        assert error(found, expected) < tolerance
    assert all(not grad[1].any() for grad in ours[2 if weighted else 1 :][1:])  # the expert without tokens
