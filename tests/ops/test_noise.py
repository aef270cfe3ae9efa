"""Random numbers from keys: their distribution, and what they depend on."""

import math

import pytest
import torch

from foundry_moe.ops import noise

pytestmark = pytest.mark.quick

KEYS = noise.token_keys(torch.arange(20_000).view(20, 1000))
STREAM = noise.stream_of(17, 3, 100, 1)


def test_uniform_numbers_pass_a_chi_squared_test():
    u = noise.uniform(KEYS, 8, STREAM).flatten()
    assert u.min() > 0 and u.max() < 1
    assert noise.uniform(torch.zeros(1, dtype=torch.int32), 1, 0).item() == 2.0**-24, "all bits zero: finite logarithms"
    observed = torch.histc(u, 64, 0, 1).double()
    expected = u.numel() / 64
    # 63 degrees of freedom: mean 63, deviation 11.2; five deviations
    assert ((observed - expected) ** 2 / expected).sum().item() < 63 + 5 * 11.3


@pytest.mark.parametrize("shift", [(0, 1), (1, 0), (1, 1)])
def test_neighbours_are_uncorrelated(shift):
    u_TN = noise.uniform(KEYS, 64, STREAM).double() - 0.5
    a, b = u_TN[: -shift[0] or None, : -shift[1] or None], u_TN[shift[0] :, shift[1] :]
    correlation = 12 * (a * b).mean().item()
    assert abs(correlation) < 5 / math.sqrt(a.numel())


def test_streams_and_tokens_are_independent():
    streams = [noise.stream_of(*key) for key in [(17, 3, 100, 1), (17, 3, 101, 1), (17, 4, 100, 1), (18, 3, 100, 1)]]
    drawn = torch.stack([noise.uniform(KEYS, 4, s).flatten().double() - 0.5 for s in streams])
    correlation = 12 * (drawn @ drawn.T) / drawn.shape[1]
    assert (correlation - torch.eye(4).double()).abs().max() < 0.03  # 80,000 draws: eight standard errors
    assert KEYS.unique().numel() > 19_990
    assert len({noise.stream_of(seed) for seed in (5, 5 + 2**32, -5, 2**63 + 5)}) == 4, "all 64 bits of a seed count"


def test_a_tokens_key_depends_on_its_sequence_and_position_alone():
    ids_BS = torch.randint(50, (6, 9), generator=torch.Generator().manual_seed(0))
    keys_BS = noise.token_keys(ids_BS).view(6, 9)
    assert torch.equal(noise.token_keys(ids_BS[[4, 1]]).view(2, 9), keys_BS[[4, 1]])
    ids_BS[2, 3] += 1
    changed_BS = noise.token_keys(ids_BS).view(6, 9) != keys_BS
    assert changed_BS[2].all() and changed_BS.sum() == 9
    forward_S, swapped_S = noise.token_keys(torch.tensor([[4, 5, 6, 7], [5, 4, 6, 7]])).view(2, 4)
    assert not (forward_S == swapped_S).any(), "the order of ids counts"


def test_normal_and_gumbel_have_their_moments():
    normal, gumbel = noise.normal(KEYS, 8, STREAM).double(), noise.gumbel(KEYS, 8, STREAM).double()
    n = math.sqrt(normal.numel())
    assert normal.mean().item() == pytest.approx(0, abs=5 / n) and normal.var().item() == pytest.approx(1, abs=7 / n)
    assert gumbel.mean().item() == pytest.approx(0.5772, abs=7 / n)
    assert gumbel.var().item() == pytest.approx(math.pi**2 / 6, rel=0.03)
    assert torch.isfinite(normal).all() and torch.isfinite(gumbel).all()


@pytest.mark.parametrize("amount", [0.01, 0.5, 0.999])
def test_jitter_stays_within_its_amount_and_leaves_the_mean_alone(amount):
    change_TD = noise.jitter(torch.ones(256, 1000, dtype=torch.float64), KEYS[:256], amount, STREAM) - 1
    levels = change_TD.unique()
    assert len(levels) == 256 and levels.abs().max() <= amount and torch.equal(levels, -levels.flip(0))
    # uniform: a deviation of amount / sqrt(3); `amount` is cut to 8 bits
    assert change_TD.std().item() == pytest.approx(amount / math.sqrt(3), rel=0.01)
    assert abs(change_TD.mean().item()) < 5 * amount / math.sqrt(3 * change_TD.numel())


def test_a_compiled_graph_draws_the_same_jitter():
    def double(x_TD):
        return noise.jitter(2 * x_TD, KEYS[:64], 0.1, STREAM)

    x_TD = torch.randn(64, 10)
    assert torch.equal(torch.compile(double, fullgraph=True, backend="aot_eager")(x_TD), double(x_TD))


def test_jitters_factors_are_uniform_and_uncorrelated():
    factor_TD = noise.jitter(torch.ones(len(KEYS), 64, dtype=torch.float64), KEYS, 0.5, STREAM)
    assert factor_TD.min() >= 0.5 and factor_TD.max() < 1.5
    observed = torch.histc(factor_TD, 64, 0.5, 1.5).double()
    expected = factor_TD.numel() / 64
    assert ((observed - expected) ** 2 / expected).sum().item() < 63 + 5 * 11.3
    for rows_N in (factor_TD.t(), factor_TD[:64]):  # columns of many tokens, tokens of all columns
        correlation = torch.corrcoef(rows_N).fill_diagonal_(0)
        # the largest of 2016 pairs, in standard errors
        assert correlation.abs().max().item() * math.sqrt(rows_N.shape[1]) < 5


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_jitter_on_a_gpu_equals_that_on_a_cpu(dtype):
    x_TD = torch.randn(200, 1500).to(dtype)
    direction_TD = torch.randn_like(x_TD)
    results = []
    for device in ("cpu", "cuda"):
        x = x_TD.to(device).requires_grad_()
        y = noise.jitter(x, KEYS[:200].to(device), 0.3, STREAM)
        (dx,) = torch.autograd.grad(y, x, direction_TD.to(device))
        results.append((y.cpu(), dx.cpu()))
    for cpu, gpu in zip(*results, strict=True):
        # a factor and a product: three roundings, or two where they are fused
        torch.testing.assert_close(gpu, cpu, rtol=4e-7 if dtype is torch.float32 else 8e-3, atol=0)
