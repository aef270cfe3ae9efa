"""The activation's own launches against their twins. Shapes: R rows, F width, Y planes."""

import pytest
import torch
from foundry_moe_kernels import activations, pointwise

from tests.helpers import kernel_twins as reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("activation", activations.NAMES)
@pytest.mark.parametrize("planes", [1, 2])
@pytest.mark.parametrize("weighted", [True, False])
def test_activation_and_its_gradient_stop_at_the_last_row(activation, planes, weighted):
    rows, used, width = 7, 5, 37
    z, dh = torch.randn(planes, rows, width, device=DEVICE), torch.randn(rows, width, device=DEVICE)
    z[:, used:], dh[used:] = 7.0, 9.0
    end = torch.tensor([2, used], dtype=torch.int32, device=DEVICE)
    weights, source = torch.rand(rows, device=DEVICE), torch.randperm(rows, device=DEVICE).int()
    weight = weights[source.long(), None] if weighted else torch.ones(rows, 1, device=DEVICE)
    h_true, dz_true = reference.glu(z.clone(), activation), reference.glu_backward(dh * weight, z, activation)
    dots_true = (dh * h_true).sum(1)
    # fp32 throughout; the approximation of the normal distribution is off by 7.5e-8 at most
    near = {"rtol": 1e-5, "atol": 2e-6}
    torch.testing.assert_close(pointwise.activate(z, end, activation)[:used], h_true[:used], **near)
    dots = pointwise.activation_backward_(dh, z, end, activation, weights if weighted else None, source)
    torch.testing.assert_close(dh[:used], (h_true * weight)[:used], **near)
    torch.testing.assert_close(z[:, :used], dz_true[:, :used], **near)
    assert (z[:, used:] == 7).all() and (dh[used:] == 9).all()
    if weighted:
        torch.testing.assert_close(dots[0, :used], dots_true[:used], rtol=1e-5, atol=1e-5)
