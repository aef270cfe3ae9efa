"""Sizes beyond 2^31 elements: addresses are 64-bit. Needs tens of GB on the device.

Shapes: R rows, D model width, F expert width, E experts.
"""

import pytest
import torch
from foundry_moe_kernels import expert_products as ep
from foundry_moe_kernels import permute, products
from foundry_moe_kernels.topology import topology_from_offsets

pytestmark = pytest.mark.gpu


def relative(actual, truth):
    return float((actual.double() - truth).norm() / truth.norm())


def test_values_beyond_two_to_the_31_elements():
    rows, d, f, experts = 600_000, 64, 4096, 8  # R x F = 2.46e9
    loads = [rows // experts] * experts
    loads[0] -= 77
    offsets_E = torch.tensor(loads, device="cuda").cumsum(0).int()
    x = torch.randn(rows, d, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(experts, f, d, device="cuda", dtype=torch.bfloat16) / 8
    ragged = ep.ragged_rows(offsets_E, rows)
    z = ep.rows_product(x[None], (w,), ragged, transposed=True)
    last = int(offsets_E[-1])
    for span, expert in ((slice(0, 50), 0), (slice(last - 50, last), experts - 1)):
        assert relative(z[span], x[span].double() @ w[expert].double().T) < 4e-3  # one rounding to bf16
    back = ep.rows_product(z[None], (w,), ragged, transposed=False)
    span = slice(last - 50, last)
    assert relative(back[span], z[span].double() @ w[-1].double()) < 4e-3
    s = products.sdd(
        x,
        w,
        topology_from_offsets(offsets_E, rows, [f] * experts, 128),
        trans_b=True,
    )
    assert relative(s[span], z[span].double()) < 4e-3
    del s, back, z


def test_permutation_beyond_two_to_the_31_elements():
    tokens, d = 300_000, 8192  # R x D = 2.46e9
    x = torch.randn(tokens, d, device="cuda", dtype=torch.bfloat16)
    row_TK = torch.randperm(tokens, device="cuda", dtype=torch.int32)[:, None].contiguous()
    end = torch.tensor([tokens], device="cuda", dtype=torch.int32)
    x_RD = permute.permute(x, row_TK, end)
    assert torch.equal(x_RD[row_TK[-1, 0]], x[-1])
    assert torch.equal(permute.unpermute(x_RD, None, row_TK), x)


def test_error_is_at_most_a_tenth_more_than_that_of_torch_grouped_mm():
    experts, d, f, rows = 16, 1024, 1536, 8192
    loads = torch.randint(0, 2 * rows // experts, (experts,), device="cuda")
    loads[3] = 0
    offsets_E = loads.cumsum(0).clamp(max=rows).int()
    offsets_E[-1] = rows
    x, dh = (torch.randn(rows, n, device="cuda", dtype=torch.bfloat16) for n in (d, f))
    w = torch.randn(experts, f, d, device="cuda", dtype=torch.bfloat16)
    ragged = ep.ragged_rows(offsets_E, rows)
    owner = torch.searchsorted(offsets_E, torch.arange(rows, device="cuda"), right=True)
    spans = [owner == e for e in range(experts)]
    forward = torch.cat([x[s].double() @ w[e].double().T for e, s in enumerate(spans)])
    backward = torch.cat([dh[s].double() @ w[e].double() for e, s in enumerate(spans)])
    inner = torch.stack([dh[s].double().T @ x[s].double() for s in spans])
    pairs = [
        (ep.rows_product(x[None], (w,), ragged, transposed=True), torch._grouped_mm(x, w.mT, offs=offsets_E), forward),
        (ep.rows_product(dh[None], (w,), ragged, transposed=False), torch._grouped_mm(dh, w, offs=offsets_E), backward),
        (ep.weight_gradient(dh[None], x, ragged)[0], torch._grouped_mm(dh.t(), x, offs=offsets_E), inner),
    ]
    for ours, theirs, truth in pairs:
        assert relative(ours, truth) <= 1.1 * relative(theirs, truth)
