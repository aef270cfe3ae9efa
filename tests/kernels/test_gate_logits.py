"""The gate's product and its gradients, with jitter inside, against fp64.

Shapes: T tokens, D model width, E experts.
"""

import pytest
import torch
from foundry_moe_kernels import gate_logits
from foundry_moe_kernels.gate_logits import Jitter

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
DTYPE = torch.bfloat16 if CUDA else torch.float32


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Uninitialised memory holds NaN: what no kernel writes shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)


def factors(jitter, shape):
    """From `foundry_moe.ops.noise`, the twin of these hashes, on the CPU."""
    if jitter.keys_T is None:
        return torch.ones(shape, dtype=torch.float64)
    from foundry_moe.ops import noise

    ones_TD = torch.ones(shape, dtype=torch.float64)
    return noise.jitter(ones_TD, jitter.keys_T.cpu(), jitter.amount, jitter.stream)


@pytest.mark.parametrize("jittered", [False, True])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16] if CUDA else [torch.float32])
@pytest.mark.parametrize("tokens, width, experts", [(1, 8, 1), (70, 40, 5), (1030, 40, 130), (77, 144, 6), (0, 16, 4)])
def test_scores_and_gradients_with_jitter_inside(tokens, width, experts, weight_dtype, jittered):
    x_TD = torch.randn(tokens, width).to(DTYPE)
    w_ED = torch.randn(experts, width).to(weight_dtype)
    d_TE = torch.randn(tokens, experts)
    keys_T = torch.randint(-(2**31), 2**31, (tokens,)).int()
    jitter = Jitter(keys_T=keys_T.to(DEVICE), amount=0.25, stream=-5) if jittered else Jitter()
    factor_TD = factors(jitter, (tokens, width))
    # the product's operand is rounded as `noise.jitter`'s result is
    xj_TD = (x_TD.double() * factor_TD).to(DTYPE).double()
    x, w, d = (t.to(DEVICE) for t in (x_TD, w_ED, d_TE))

    scores_TE = gate_logits.gate_logits(x, w, jitter)
    assert scores_TE.dtype is torch.float32
    truth_TE = xj_TD @ w_ED.double().T
    dx_TD, dw_ED = gate_logits.gradients(d, x, w, jitter, (True, True))
    for needs in ((True, False), (False, True)):
        alone = gate_logits.gradients(d, x, w, jitter, needs)
        for gradient, whole, needed in zip(alone, (dx_TD, dw_ED), needs, strict=True):
            assert torch.equal(gradient, whole) if needed else gradient.numel() == 0
    truth_dx = (d_TE.double() @ w_ED.double()) * factor_TD
    truth_dw = d_TE.double().T @ xj_TD
    assert dx_TD.dtype is DTYPE and dw_ED.dtype is weight_dtype
    half_unit = 2**-8  # of a result in bf16
    # jittered operands may round the other way than fp64's: half a unit of one of `width` products
    loose = jittered and CUDA
    for ours, truth, rounded in (
        (scores_TE, truth_TE, loose),
        (dx_TD, truth_dx, DTYPE is torch.bfloat16),
        (dw_ED, truth_dw, loose or weight_dtype is torch.bfloat16),
    ):
        assert ours.shape == truth.shape
        if truth.numel():
            error = (ours.cpu().double() - truth).abs().max() / truth.abs().max().clamp(min=1e-20)
            assert error < (half_unit if rounded else 5e-6), float(error)
