"""The choice of the k largest: order, ties, gradient, on both devices."""

import pytest
import torch
from foundry_moe_kernels import permute_plan
from foundry_moe_kernels import select_topk as kernel

from foundry_moe.ops import select_topk as ops_topk
from foundry_moe.ops.select_topk import count_choices, keep_largest, pack, topk

pytestmark = pytest.mark.quick

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def check(device, dtype):
    generator = torch.Generator().manual_seed(0)
    for shape, k in [((37, 5), 2), ((8, 64), 8), ((3, 4, 6), 1), ((5, 7), 7), ((0, 5), 2)]:
        # few distinct values, so that ties abound, and both zeros
        scores = torch.randint(-2, 3, shape, generator=generator).to(dtype)
        scores = torch.where(torch.rand(shape, generator=generator) < 0.2, -0.0, scores)
        scores = scores.to(device).requires_grad_()
        values, experts = topk(scores, k)
        rows = scores.detach().cpu().reshape(-1, shape[-1]).tolist()
        truth = [sorted(range(shape[-1]), key=lambda e, row=row: (-row[e], e))[:k] for row in rows]
        assert experts.reshape(-1, k).tolist() == truth and experts.dtype == torch.int64
        assert torch.equal(values, scores.gather(-1, experts))
        direction = torch.randn_like(values)
        (ours,) = torch.autograd.grad(values, scores, direction)
        assert torch.equal(ours, torch.zeros_like(scores).scatter(-1, experts, direction))


def test_ties_go_to_the_lower_expert_and_gradients_to_the_chosen():
    check("cpu", torch.float64)


@pytest.mark.gpu
def test_ties_go_to_the_lower_expert_and_gradients_to_the_chosen_on_a_gpu():
    check("cuda", torch.float32)


def test_counts_leave_out_what_is_no_choice_and_padding():
    experts_TK = torch.tensor([[0, 2], [2, -1], [1, 2]])
    assert count_choices(experts_TK, 4).tolist() == [1, 1, 3, 0]
    assert count_choices(experts_TK, 4, torch.tensor([True, True, False])).tolist() == [1, 0, 2, 0]


def ragged_case(dtype):
    probs_TE = torch.rand(37, 9).softmax(-1).to(dtype)
    chosen_TE = torch.rand(37, 9) < 0.4
    chosen_TE[3] = False
    chosen_TE[4] = True
    return probs_TE, probs_TE.masked_fill(~chosen_TE, -1)


def test_packing_sorts_each_tokens_choices_by_weight():
    probs_TE, ranked_TE = ragged_case(torch.float64)
    weights_TK, experts_TK = pack(probs_TE, ranked_TE, 9)
    for t, row in enumerate(ranked_TE.tolist()):
        truth = sorted((e for e in range(9) if row[e] >= 0), key=lambda e, row=row: (-row[e], e))
        assert experts_TK[t].tolist() == truth + [-1] * (9 - len(truth))
        assert weights_TK[t].tolist() == [row[e] for e in truth] + [0] * (9 - len(truth))


@pytest.mark.parametrize("columns", [9, 4])
def test_the_packing_kernel_is_its_twin(columns):
    probs_TE, ranked_TE = ragged_case(torch.float32)
    if columns < 9:
        ranked_TE[:, 4:] = -1
    leaf = probs_TE.clone().requires_grad_()
    truth = pack(leaf, ranked_TE, columns)
    ours_leaf = probs_TE.to(DEVICE).requires_grad_()
    # a transposed layout, as `expert_choice` has it
    ours = ops_topk.pack(ours_leaf, ranked_TE.t().contiguous().t().to(DEVICE), columns)
    direction = torch.randn_like(truth[0])
    assert torch.equal(ours[1].cpu(), truth[1]) and torch.equal(ours[0].cpu(), truth[0])
    (grad,) = torch.autograd.grad(ours[0], ours_leaf, direction.to(DEVICE))
    assert torch.equal(grad.cpu(), torch.autograd.grad(truth[0], leaf, direction)[0])


@pytest.mark.parametrize("columns, number", [(50, 7), (50, 50), (50, 0), (1, 1), (20_000, 300)])
@pytest.mark.parametrize("counted", [False, True])
def test_keeping_the_largest_of_each_row(columns, number, counted):
    scores = torch.rand(3, columns)
    scores[1] = torch.randint(3, (columns,)).float() / 4  # ties, zeros among them
    if number < columns // 2:
        scores[2, ::2] = -1  # never kept
    truth = keep_largest(scores.double(), number)
    for row, kept in zip(scores.tolist(), truth.tolist(), strict=True):
        best = sorted((c for c in range(columns) if row[c] >= 0), key=lambda c, row=row: (-row[c], c))[:number]
        assert [c for c in range(columns) if kept[c] >= 0] == sorted(best)
    ours = kernel.keep_largest(scores.to(DEVICE), torch.tensor([number], device=DEVICE) if counted else number)
    assert torch.equal(ours.cpu().double(), truth)


@pytest.mark.parametrize("nan", [float("nan"), -float("nan")])
def test_nan_is_above_all_that_are_kept(nan):
    scores = torch.tensor([[0.2, 0.9, nan, -1.0, 0.5], [nan] * 5, [0.3, -1.0, 0.1, 0.2, 0.4]])
    truth = torch.tensor([[-1, 0.9, nan, -1, -1], [nan, nan, -1, -1, -1], [0.3, -1, -1, -1, 0.4]])
    for kept in (keep_largest(scores, 2), kernel.keep_largest(scores.to(DEVICE), 2).cpu()):
        torch.testing.assert_close(kept, truth, rtol=0, atol=0, equal_nan=True)


def test_nan_is_packed_first():
    scores = torch.tensor([[0.2, torch.nan, -1.0, 0.5], [torch.nan] * 4, [-1.0, -1.0, 0.1, -1.0]])
    best_TK = torch.tensor([[1, 3], [0, 1], [2, -1]])
    for values, experts in (pack(scores, scores, 2), kernel.ranked(scores.to(DEVICE), 2, absent_below_zero=True)):
        assert torch.equal(experts.cpu(), best_TK)
        truth = torch.tensor([[torch.nan, 0.5], [torch.nan, torch.nan], [0.1, 0.0]])
        torch.testing.assert_close(values.cpu(), truth, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("masked", [False, True])
def test_the_counting_kernel_is_its_twin(masked):
    experts_TK = torch.randint(-1, 40, (200, 3))
    mask_T = torch.rand(200) < 0.5 if masked else None
    truth = count_choices(experts_TK, 40, mask_T)
    ours = permute_plan.count_choices(experts_TK.to(DEVICE), 40, None if mask_T is None else mask_T.to(DEVICE))
    assert torch.equal(ours.cpu(), truth) and ours.dtype is torch.int64
