"""The ragged permutation: held to a loop over assignments, on the worst loads."""

import pytest
import torch

from foundry_moe.ops import permute, plan_permute, unpermute

pytestmark = pytest.mark.quick

LOADS = {
    "uneven, one expert empty": torch.tensor([[0, 3], [3, 0], [3, 1], [0, 3], [3, 0]]),
    "all to one expert": torch.full((6, 1), 2),
    "ragged choices": torch.tensor([[0, -1], [-1, -1], [3, 2], [-1, 0]]),
    "one token": torch.tensor([[1, 3]]),
    "no token": torch.zeros(0, 2, dtype=torch.int64),
    "no choice at all": torch.full((3, 2), -1),
}


@pytest.fixture(params=LOADS, ids=lambda name: name.replace(" ", "-"))
def experts_TK(request):
    return LOADS[request.param]


def test_routes_sort_assignments_by_expert_and_keep_their_order(experts_TK):
    plan = plan_permute(experts_TK, 4)
    flat = experts_TK.flatten().tolist()
    wanted = [a for e in range(4) for a, chosen in enumerate(flat) if chosen == e]
    assert plan.source_R.tolist() == wanted + [-1] * (len(flat) - len(wanted))
    assert plan_permute(experts_TK, 4, len(wanted)).source_R.tolist() == wanted  # as many rows as the host knows of
    assert plan.tokens_per_expert_E.tolist() == [flat.count(e) for e in range(4)]
    assert plan.offsets_E.tolist() == torch.tensor([flat.count(e) for e in range(4)]).cumsum(0).tolist()
    rows = plan.row_TK.flatten().tolist()
    assert [rows[a] for a in wanted] == list(range(len(wanted)))
    assert all(rows[a] == -1 for a, chosen in enumerate(flat) if chosen == -1)


def test_permute_and_combine_equal_a_loop_in_values_and_gradients(experts_TK):
    tokens, choices = experts_TK.shape
    x_TD = torch.randn(tokens, 5, dtype=torch.float64, requires_grad=True)
    weights_TK = torch.rand(tokens, choices, dtype=torch.float64, requires_grad=True)
    scale_E = torch.tensor([1.0, -2.0, 3.0, 0.5], dtype=torch.float64)
    plan = plan_permute(experts_TK, 4)
    x_RD = permute(x_TD, plan)
    expert_R = experts_TK.flatten()[plan.source_R.clamp(min=0)].clamp(min=0) if len(x_RD) else plan.source_R.long()
    y_TD = unpermute(x_RD * scale_E[expert_R][:, None], weights_TK, plan)

    wanted = [
        sum((weights_TK[t, k] * scale_E[e] * x_TD[t] for k, e in enumerate(row) if e >= 0), torch.zeros_like(x_TD[t]))
        for t, row in enumerate(experts_TK.tolist())
    ]
    wanted_TD = (torch.stack(wanted) if wanted else x_TD) + 0 * x_TD + 0 * weights_TK.sum()
    torch.testing.assert_close(y_TD, wanted_TD)  # fp64 defaults: rounding only
    direction = torch.randn_like(y_TD)
    ours = torch.autograd.grad(y_TD, (x_TD, weights_TK), direction)
    theirs = torch.autograd.grad(wanted_TD, (x_TD, weights_TK), direction)
    for mine, truth in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, truth)


def test_second_derivatives_are_those_of_plain_torch_and_refused_on_kernels(monkeypatch):
    plan = plan_permute(LOADS["ragged choices"], 4)
    x_TD, weights_TK = torch.randn(4, 8, requires_grad=True), torch.rand(4, 2, requires_grad=True)
    outputs = {
        "permute": lambda: permute(x_TD, plan).sin(),
        "unpermute": lambda: unpermute(permute(x_TD.detach(), plan) * x_TD.sum(), weights_TK, plan).sin(),
    }
    for output in outputs.values():
        (first,) = torch.autograd.grad(output().sum(), x_TD, create_graph=True)
        assert torch.autograd.grad(first.sum(), x_TD)[0].any()
    if torch.cuda.is_available():
        plan = plan_permute(LOADS["ragged choices"].cuda(), 4)
        x_TD, weights_TK = (tensor.detach().cuda().requires_grad_() for tensor in (x_TD, weights_TK))
    else:
        monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    for output in outputs.values():
        with pytest.raises(ValueError, match=r"create_graph \(True\): MoE layers have no second derivatives"):
            torch.autograd.grad(output().sum(), x_TD, create_graph=True)
        torch.autograd.grad(output().sum(), x_TD)


def test_rows_past_the_end_are_zero_and_never_read():
    plan = plan_permute(torch.tensor([[0, -1], [1, -1]]), 2)
    x_TD = torch.ones(2, 3, requires_grad=True)
    x_RD = permute(x_TD, plan)
    assert x_RD[2:].abs().sum() == 0
    poisoned_RD = x_RD.clone()
    poisoned_RD[2:] = float("nan")
    unpermute(poisoned_RD, torch.ones(2, 2), plan).sum().backward()
    assert torch.isfinite(x_TD.grad).all()


def test_combine_accumulates_bf16_in_fp32():
    """256 + 1 is not a bf16 number: a sum kept in bf16 would lose each of the ones."""
    plan = plan_permute(torch.zeros(1, 9, dtype=torch.int64), 1)
    y_RD = torch.tensor([256.0] + [1.0] * 8, dtype=torch.bfloat16)[:, None]
    assert unpermute(y_RD, None, plan).item() == 264.0


@pytest.mark.parametrize("bad", [torch.zeros(2, 2), torch.zeros(2, 2, 2, dtype=torch.int64)])
def test_experts_of_another_kind_are_refused(bad):
    with pytest.raises(ValueError, match="must be integers of shape"):
        plan_permute(bad, 4)


def test_an_expert_that_does_not_exist_is_refused_on_a_cpu():
    with pytest.raises(ValueError, match="experts_TK has expert 4, and num_experts is 4"):
        plan_permute(torch.tensor([[0, 4], [3, -1]]), 4)


def test_tensors_of_another_size_than_the_plans_are_refused():
    plan = plan_permute(torch.tensor([[0, 1], [1, -1]]), 2, rows=3)
    with pytest.raises(ValueError, match=r"^x_TD \(3, 8\) must be \[2, D\]: the plan is for 2 tokens and 3 rows$"):
        permute(torch.zeros(3, 8), plan)
    with pytest.raises(ValueError, match=r"^y_RD \(2, 8\) must be \[3, D\]: the plan is for 2 tokens and 3 rows$"):
        unpermute(torch.zeros(2, 8), None, plan)
    with pytest.raises(ValueError, match=r"^weights_TK \(2, 1\) must be \(2, 2\), as the plan's choices are$"):
        unpermute(torch.zeros(3, 8), torch.ones(2, 1), plan)
