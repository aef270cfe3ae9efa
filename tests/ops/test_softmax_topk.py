"""The fused choice of experts against the same in torch, fp64: results, statistics and gradients, on the kernels.

Shapes: T tokens, E experts, K choices.
"""

import pytest
import torch
from foundry_moe_kernels import softmax_topk as kernels

from foundry_moe.ops import noise
from foundry_moe.ops import softmax_topk as ops
from foundry_moe.ops.softmax_topk import balance, softmax_topk

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """Uninitialised memory holds NaN: what no kernel writes shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)


def by_kernel(logits_TE, k, normalize, scale, second, counted, mask_T):
    keys_T, stream = second or (None, None)
    rule = kernels.Rule(k, normalize, scale, stream, counted or k, statistics=True, with_balance=True)
    out = ops._softmax_topk.triton(logits_TE, rule, mask_T, keys_T)
    return ops.Selection(experts_TK=out[1], weights_TK=out[0], mean_E=out[3], counts_E=out[4], z=out[5], balance=out[7])


CASES = [
    {"k": 1},
    {"k": 3, "normalize": True, "scale": 2.5},
    {"k": 3, "masked": True},
    {"k": 2, "normalize": True, "counted": 1, "random": True, "masked": True},
    {"k": 5, "experts": 5, "tokens": 1},
    {"k": 8, "experts": 70, "tokens": 77, "normalize": True},
]


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(f"{k}={v}" for k, v in case.items()))
def test_the_kernel_chooses_weighs_and_counts_as_torch_does(case, at_once, monkeypatch):
    if not at_once:  # many programs sum, as for sizes beyond a test's
        monkeypatch.setattr(kernels, "_SUMMED_AT_ONCE", 0)
    tokens, experts, k = case.get("tokens", 45), case.get("experts", 12), case["k"]
    logits_TE = 2 * torch.randn(tokens, experts)
    logits_TE[0] = 0.5  # ties go to the lower expert
    mask_T = torch.rand(tokens) < 0.7 if case.get("masked") else None
    second = (noise.mix(torch.arange(tokens, dtype=torch.int32)), -77) if case.get("random") else None
    rest = {"normalize": case.get("normalize", False), "scale": case.get("scale", 1.0), "counted": case.get("counted")}
    true_TE = logits_TE.double().requires_grad_()
    rest["with_balance"] = True
    truth = softmax_topk(true_TE, k, second_by_chance=second, mask_T=mask_T, **rest)

    logits_TE = logits_TE.to(DEVICE).requires_grad_()
    mask, draw = mask_T, second
    if DEVICE == "cuda":
        mask = None if mask_T is None else mask_T.cuda()
        draw = None if second is None else (second[0].cuda(), second[1])
    ours = by_kernel(logits_TE, k, rest["normalize"], rest["scale"], draw, rest["counted"], mask)
    assert torch.equal(ours.experts_TK.cpu(), truth.experts_TK) and ours.experts_TK.dtype is torch.int64
    if case.get("random"):
        assert (truth.experts_TK < 0).any() and (truth.experts_TK[:, 1] >= 0).any()
    assert torch.equal(ours.counts_E.cpu(), truth.counts_E)
    directions = [
        torch.randn(t.shape, dtype=torch.float64) for t in (truth.weights_TK, truth.mean_E, truth.z, truth.balance)
    ]
    for name in ("weights_TK", "mean_E", "z", "balance"):
        torch.testing.assert_close(getattr(ours, name).cpu().double(), getattr(truth, name), rtol=1e-5, atol=1e-7)
    results = []
    for got, leaf in ((ours, logits_TE), (truth, true_TE)):
        outputs = [got.weights_TK, got.mean_E, got.z, got.balance]
        pairs = zip(outputs, directions, strict=True)
        (grad,) = torch.autograd.grad(sum((o * d.to(o)).sum() for o, d in pairs), leaf, retain_graph=True)
        (alone,) = torch.autograd.grad((got.weights_TK * directions[0].to(got.weights_TK)).sum(), leaf)
        results.append((grad.cpu().double(), alone.cpu().double()))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)
    # losses alone, one at a time
    for name in ("mean_E", "z", "balance"):
        grads = [
            torch.autograd.grad(getattr(got, name).square().sum(), leaf)[0].cpu().double()
            for got, leaf in (
                (by_kernel(logits_TE, k, rest["normalize"], rest["scale"], draw, rest["counted"], mask), logits_TE),
                (softmax_topk(true_TE, k, second_by_chance=second, mask_T=mask_T, **rest), true_TE),
            )
        ]
        torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-7)


def test_no_tokens_give_no_choices_and_even_statistics():
    out = by_kernel(torch.zeros(0, 6, device=DEVICE, requires_grad=True), 2, False, 1.0, None, None, None)
    assert out.experts_TK.shape == (0, 2) and not out.mean_E.any() and not out.counts_E.any()
    assert out.z == 0 and out.balance == 0


def test_balance_and_its_slope():
    mean_E = torch.rand(7, device=DEVICE).requires_grad_()
    counts_E = torch.tensor([3, 0, 1, 9, 2, 2, 4], device=DEVICE)
    loss, slope_E = kernels.balance(mean_E.detach(), counts_E)
    true_E = mean_E.detach().cpu().double().requires_grad_()
    truth = balance(true_E, counts_E.cpu())
    truth.backward()
    torch.testing.assert_close(loss.cpu().double(), truth.detach(), rtol=1e-6, atol=0)
    torch.testing.assert_close(slope_E.cpu().double(), true_E.grad, rtol=1e-6, atol=0)
    (grad,) = torch.autograd.grad(3 * ops._balance.triton(mean_E, counts_E)[0], mean_E)
    torch.testing.assert_close(grad, 3 * slope_E)


@pytest.mark.gpu
def test_on_a_gpu_select_takes_the_kernel():
    logits_TE = torch.randn(300, 64, device="cuda", requires_grad=True)
    out = softmax_topk(logits_TE, 8)
    assert "Eager" in type(out.weights_TK.grad_fn).__name__

    def loss(logits_TE):
        return softmax_topk(logits_TE, 8).weights_TK.square().sum()

    grads = [torch.autograd.grad(f(logits_TE), logits_TE)[0] for f in (loss, torch.compile(loss, fullgraph=True))]
    torch.testing.assert_close(*grads)
