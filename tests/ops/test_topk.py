"""The choice of the k largest: order, ties, gradient, on both devices."""

import pytest
import torch

from foundry_moe.ops.topk import count_choices, topk


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
