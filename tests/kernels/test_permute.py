"""Planning, permutation, un-permutation and top-k against their twins.

Shapes: T tokens, K choices, R rows, E experts, D width.
"""

import pytest
import torch
from foundry_moe_kernels import permute, permute_plan
from foundry_moe_kernels.select_topk import spread, topk

from tests.helpers import kernel_twins as reference

pytestmark = pytest.mark.quick

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def choices(kind, tokens, k, experts):
    experts_TK = torch.randint(-1 if kind == "some absent" else 0, experts, (tokens, k), device=DEVICE)
    if kind == "one takes all":
        experts_TK.fill_(experts - 1)
    if kind == "none chosen":
        experts_TK.fill_(-1)
    return experts_TK


KINDS = ["random", "some absent", "one takes all", "none chosen"]


@pytest.mark.parametrize("summed_from", [0, 16384])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens, k, experts", [(1, 1, 1), (300, 2, 5), (129, 3, 40), (5000, 1, 3), (0, 2, 4)])
def test_plan_is_a_stable_sort_by_expert(kind, tokens, k, experts, summed_from, monkeypatch):
    monkeypatch.setattr(permute_plan, "_SUMMED_FROM", summed_from)
    experts_TK = choices(kind, tokens, k, experts)
    for ours, truth in zip(
        permute_plan.plan_permute(experts_TK, experts), reference.plan_permute(experts_TK, experts), strict=True
    ):
        assert torch.equal(ours, truth)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens, k, width", [(37, 3, 40), (5, 1, 17), (0, 2, 8), (9, 20, 24)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_permute_and_combine_and_their_gradients(kind, tokens, k, width, dtype):
    experts_TK = choices(kind, tokens, k, 4)
    _, _, offsets_E, _, row_TK = permute_plan.plan_permute(experts_TK, 4)
    x = torch.randn(tokens, width, dtype=dtype, device=DEVICE)
    x_RD = permute.permute(x, row_TK, offsets_E)
    assert torch.equal(x_RD, reference.permute(x, row_TK))
    y = torch.randn_like(x_RD)
    y[int(offsets_E[-1]) :] = float("nan")
    weights = torch.rand(tokens, k, device=DEVICE)
    # sums of three products, in another order
    near = {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(permute.unpermute(y, weights, row_TK), reference.unpermute(y, weights, row_TK), **near)
    torch.testing.assert_close(permute.unpermute(y, None, row_TK), reference.unpermute(y, None, row_TK), **near)
    ours = permute.unpermute_backward(x, y, weights, row_TK, offsets_E)
    for a, b in zip(ours, reference.unpermute_backward(x, y, weights, row_TK), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_fewer_rows_than_choices_where_many_are_absent():
    experts_TK = torch.tensor([[0, -1], [-1, -1], [1, 0], [-1, 1]], device=DEVICE)
    _, _, offsets_E, _, row_TK = permute_plan.plan_permute(experts_TK, 2)
    x = torch.randn(4, 8, device=DEVICE)
    x_RD = permute.permute(x, row_TK, offsets_E, 5)
    assert torch.equal(x_RD, reference.permute(x, row_TK)[:5])
    assert (x_RD[4] == 0).all()
    torch.testing.assert_close(
        permute.unpermute(x_RD, None, row_TK), torch.tensor([[1.0], [0], [2], [1]]).to(DEVICE) * x
    )


def test_permute_takes_a_slice_of_columns():
    row_TK = permute_plan.plan_permute(choices("random", 20, 2, 4), 4)[4]
    x = torch.randn(20, 32, device=DEVICE)
    offsets = torch.tensor([40], device=DEVICE, dtype=torch.int32)
    out = permute.permute(x[:, 8:24], row_TK, offsets)
    assert torch.equal(out, reference.permute(x, row_TK)[:, 8:24])


def test_a_contiguous_matrix_of_one_column_is_taken_whatever_its_strides():
    x_TD = torch.randn(1, 8, device=DEVICE).t().contiguous()
    assert x_TD.is_contiguous() and x_TD.stride(1) != 1
    _, _, offsets_E, _, row_TK = permute_plan.plan_permute(choices("some absent", 8, 2, 3), 3)
    x_RD = permute.permute(x_TD, row_TK, offsets_E)
    assert torch.equal(x_RD, reference.permute(x_TD, row_TK))
    strided_RD = x_RD.t().contiguous().t()
    assert torch.equal(permute.unpermute(strided_RD, None, row_TK), permute.unpermute(x_RD, None, row_TK))


def test_dots_of_absent_choices_are_zero():
    row_TK = torch.tensor([[1, -1], [0, 2]], dtype=torch.int32, device=DEVICE)
    dots = torch.tensor([[1.0, 2.0, 3.0, float("nan")], [10.0, 20.0, 30.0, float("nan")]], device=DEVICE)
    out = permute.gather_dots(dots, row_TK, torch.float32)
    assert out.tolist() == [[22.0, 0.0], [11.0, 33.0]]


@pytest.mark.parametrize("kind", ["random", "some absent", "none chosen"])
@pytest.mark.parametrize("tokens, k, experts", [(37, 3, 5), (5, 1, 9), (9, 20, 33)])
def test_dots_and_spreads_are_their_twins(kind, tokens, k, experts):
    row_TK = permute_plan.plan_permute(choices(kind, tokens, k, experts), experts)[4]
    dots = torch.randn(3, tokens * k, device=DEVICE)
    # sums of three numbers, in another order
    ours, truth = (module.gather_dots(dots, row_TK, torch.float32) for module in (permute, reference))
    torch.testing.assert_close(ours, truth, rtol=1e-5, atol=1e-6)
    # an expert at most once per token, as top-k gives them
    order_TE = torch.rand(tokens, experts, device=DEVICE).argsort(1)[:, : min(k, experts)].int()
    experts_TK = torch.where(torch.rand(order_TE.shape, device=DEVICE) < 0.3, -1, order_TE).contiguous()
    values_TK = torch.randn(experts_TK.shape, device=DEVICE)
    assert torch.equal(spread(values_TK, experts_TK, experts), reference.spread(values_TK, experts_TK, experts))


@pytest.mark.parametrize("experts, k", [(1, 1), (8, 2), (60, 8), (128, 4), (200, 6)])
def test_topk_with_ties_towards_the_lower_expert(experts, k):
    scores = torch.randn(33, experts, device=DEVICE)
    scores[1] = 0.0
    scores[2, ::2] = -0.0
    scores[3] = torch.randint(-2, 2, (experts,), device=DEVICE).float()
    scores[4] = -1e30
    values, chosen = topk(scores, k)
    values_true, chosen_true = torch.sort(scores, dim=-1, descending=True, stable=True)
    assert torch.equal(chosen, chosen_true[:, :k])
    assert torch.equal(values, values_true[:, :k])
