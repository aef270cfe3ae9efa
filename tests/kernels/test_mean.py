"""The mean over ranks of numbers in bf16, summed in fp32, against fp64. Shapes: P ranks, N numbers."""

import pytest
import torch
from foundry_moe_kernels import mean

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("rows", [1, 2, 3, 8])
@pytest.mark.parametrize("numbers", [1, 2048, 5003])
def test_a_mean_of_rows_is_summed_in_fp32(rows, numbers):
    rows_PN = torch.randn(rows, numbers, device=DEVICE).bfloat16()
    out_N = torch.full((numbers + 1,), 7.0, device=DEVICE)
    mean.mean(*rows_PN.flatten().tensor_split([numbers]), out_N[:-1])  # as received, the second at any address
    exact_N = rows_PN.double().mean(0)
    assert out_N[-1] == 7
    torch.testing.assert_close(out_N[:-1].double(), exact_N, rtol=1e-6, atol=1e-6)
    if rows == 2:
        assert torch.equal(out_N[:-1], exact_N.float()), "two numbers of bf16 have one sum in fp32"
