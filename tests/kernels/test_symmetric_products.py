"""Symmetric products and the element-wise kernels of Muon against torch's operators."""

import pytest
import torch
from foundry_moe_kernels import muon
from foundry_moe_kernels.symmetric_products import symmetric_product

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TILE = {"SIDE": 32, "BK": 16, "num_stages": 2, "num_warps": 4}
NEAR = {"rtol": 2e-3, "atol": 1e-3}  # fp16 results of fp32 sums


@pytest.mark.parametrize(("n", "inner"), [(64, 96), (72, 40), (8, 24)])  # whole tiles, partial ones, less than one
def test_products_equal_torchs_and_are_symmetric_to_the_last_bit(n, inner):
    x = torch.randn(3, n, inner, device=DEVICE, dtype=torch.float16) / inner**0.5
    gram = x.float() @ x.float().mT
    for result in (
        symmetric_product(x, tile=TILE),
        symmetric_product(x.mT.contiguous(), turned=True, tile=TILE),
    ):
        torch.testing.assert_close(result.float(), gram, **NEAR)
        assert torch.equal(result, result.mT)
    a, c = gram.half(), torch.eye(n, device=DEVICE, dtype=torch.float16).repeat(3, 1, 1)
    b = symmetric_product(a, tile=TILE)  # commutes with a but for rounding: a b differs from b a
    result = symmetric_product(a, b, [c, a], scales=(0.5, 2.0, -3.0), tile=TILE)
    torch.testing.assert_close(result.float(), 0.5 * a.float() @ b.float() + 2 * c.float() - 3 * a.float(), **NEAR)
    assert torch.equal(result, result.mT)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("factor", [None, 0.25])
def test_momentum_and_weights_of_part_of_a_stack(nesterov, factor):
    n, rows, columns = 3, 5, 1100  # two programs in a row
    grad, momentum, weight = (torch.randn(n, 2 * rows, columns, device=DEVICE)[:, rows:] for _ in range(3))
    scaled = grad * (factor or 1.0)
    expected = momentum.lerp(scaled, 0.1)
    step = scaled.lerp(expected, 0.9) if nesterov else expected
    out = torch.full((n, rows, columns), torch.nan, device=DEVICE, dtype=torch.bfloat16)
    muon.momentum_(grad, momentum, out, None if factor is None else torch.tensor(factor, device=DEVICE), 0.9, nesterov)
    torch.testing.assert_close(momentum, expected)
    torch.testing.assert_close(out, step.bfloat16(), rtol=8e-3, atol=1e-6)  # rounds the other way here and there
    after = 0.75 * weight - 0.5 * out.float()
    muon.subtract_(weight, out, 0.75, 0.5)
    torch.testing.assert_close(weight, after)
