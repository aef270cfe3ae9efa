"""A gate's logits: fp32 for every precision of the input, with their gradients."""

import pytest
import torch

from foundry_moe.ops.gate_logits import gate_logits


def test_bf16_inputs_give_fp32_scores_under_autocast():
    x_TD, w_ED = torch.randn(64, 32).bfloat16(), torch.randn(8, 32)
    with torch.autocast("cpu", torch.bfloat16):
        ours = gate_logits(x_TD, w_ED)
    truth = x_TD.double() @ w_ED.double().T
    assert ours.dtype is torch.float32 and (ours - truth).abs().max() < 1e-5 * truth.abs().max()


@pytest.mark.gpu
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [0, 1, 777])
def test_tensor_cores_give_fp32_scores_and_gradients(weight_dtype, tokens):
    torch.manual_seed(0)
    x_TD = torch.randn(tokens, 512, device="cuda").bfloat16().requires_grad_()
    w_ED = torch.randn(40, 512, device="cuda").to(weight_dtype).requires_grad_()
    direction_TE = torch.randn(tokens, 40, device="cuda")
    ours = gate_logits(x_TD, w_ED)
    assert ours.dtype is torch.float32
    dx_TD, dw_ED = torch.autograd.grad(ours, (x_TD, w_ED), direction_TE)
    truth_TE = x_TD.double() @ w_ED.double().T
    truth_dx, truth_dw = direction_TE.double() @ w_ED.double(), direction_TE.double().T @ x_TD.double()
    if tokens:
        # sums of 512 products in fp32; bf16 scores would be off by 2^-9
        assert (ours - truth_TE).abs().max() < 3e-6 * truth_TE.abs().max()
        # results are bf16 where the operand is: half a unit in the last place of 8 bits
        torch.testing.assert_close(dx_TD.double(), truth_dx, rtol=2**-8, atol=1e-4)
        tight = weight_dtype is torch.float32
        torch.testing.assert_close(dw_ED.double(), truth_dw, rtol=1e-5 if tight else 2**-8, atol=3e-4)
    assert dw_ED.shape == w_ED.shape and dw_ED.dtype is weight_dtype
