"""Every gate on a GPU, where kernels choose, against itself in fp64 on a CPU: choices, weights, losses, gradients."""

import pytest
import torch

from tests.helpers.gates import GATE_IDS, GATES, batch, build, context_of

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:gate expert_choice")]
CASES = [pytest.param(*case, id=name) for case, name in zip(GATES, GATE_IDS, strict=True) if case[0]["name"] != "base"]


def dense(choices, experts):
    """Combine weights as [T, E], for any number of columns, and whether an expert is chosen."""
    present_TK = choices.experts_TK >= 0
    index_TK = torch.where(present_TK, choices.experts_TK, experts)
    shape = (len(index_TK), experts + 1)
    weights_TE = torch.zeros(shape, dtype=choices.weights_TK.dtype, device=index_TK.device)
    weights_TE = weights_TE.scatter_add(1, index_TK, choices.weights_TK)[:, :experts]
    chosen_TE = torch.zeros(shape, device=index_TK.device).scatter(1, index_TK, 1.0)[:, :experts]
    return weights_TE, chosen_TE


@pytest.mark.parametrize(("settings", "top_k"), CASES)
@pytest.mark.parametrize("masked", [False, True])
def test_a_gate_does_on_a_gpu_what_it_does_on_a_cpu(settings, top_k, masked):
    ids_BS, x_TD = batch(sequences=6, positions=50, vocabulary=10_000)
    mask_BS = torch.ones_like(ids_BS)
    mask_BS[:, 44:] = 0
    direction_TE = torch.randn(300, 8, dtype=torch.float64)
    results = []
    for device, dtype in (("cpu", torch.float64), ("cuda", torch.float32)):
        gate = build(settings, top_k).train()
        wanted = gate.LOSSES - ({"load"} if not getattr(gate.config, "noise", False) else set())
        gate.to(device=device, dtype=dtype)
        context = context_of(ids_BS.to(device), mask_BS.to(device) if masked else None, losses=wanted)
        x = x_TD.to(device=device, dtype=dtype).requires_grad_()
        choices = gate(x, context)
        weights_TE, chosen_TE = dense(choices, 8)
        loss = (weights_TE * direction_TE.to(weights_TE)).sum() + sum(choices.losses.values())
        leaves = [x, *gate.parameters()]
        grads = torch.autograd.grad(loss, leaves, allow_unused=True) if loss.requires_grad else []
        losses = {name: value.detach() for name, value in choices.losses.items()}
        results.append((chosen_TE, weights_TE.detach(), losses, [g for g in grads if g is not None]))
    (chosen, weights, losses, grads), (chosen_gpu, weights_gpu, losses_gpu, grads_gpu) = results
    assert torch.equal(chosen_gpu.cpu(), chosen) and losses.keys() == losses_gpu.keys()
    near = {"rtol": 1e-4, "atol": 1e-5}  # fp32 beside fp64
    torch.testing.assert_close(weights_gpu.cpu().double(), weights.double(), **near)
    for name, value in losses.items():
        torch.testing.assert_close(losses_gpu[name].cpu().double(), value.double(), **near, msg=name)
    assert len(grads) == len(grads_gpu)
    for ours, truth in zip(grads_gpu, grads, strict=True):
        assert (ours.cpu().double() - truth).norm() < 1e-4 * truth.norm().clamp(min=1e-6)


@pytest.mark.parametrize(("settings", "top_k"), CASES)
def test_a_gate_gives_the_same_bits_twice(settings, top_k):
    ids_BS, x_TD = batch(sequences=6, positions=50, vocabulary=10_000)
    gate = build(settings, top_k).train().to(device="cuda", dtype=torch.bfloat16)
    wanted = gate.LOSSES - ({"load"} if not getattr(gate.config, "noise", False) else set())
    x = x_TD.to(device="cuda", dtype=torch.bfloat16).requires_grad_()
    results = []
    for _ in range(2):
        choices = gate(x, context_of(ids_BS.cuda(), losses=wanted))
        loss = choices.weights_TK.square().sum() + sum(choices.losses.values())
        grads = torch.autograd.grad(loss, [x, *gate.parameters()], allow_unused=True) if loss.requires_grad else []
        results.append([choices.experts_TK, choices.weights_TK, *(g for g in grads if g is not None)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
