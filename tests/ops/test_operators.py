"""Every operator that chooses between a kernel and its plain twin gets the same from both."""

import importlib
import pkgutil
from collections.abc import Sequence
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from foundry_moe_kernels.gate_logits import Jitter
from foundry_moe_kernels.softmax_topk import Rule

from foundry_moe import ops
from foundry_moe.ops.operators import differentiable, operator, take_saved

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOKENS, EXPERTS, WIDTH, K = 37, 5, 24, 3


def operators():
    """All functions that `twins` has made, by module and name."""
    found = {}
    for info in pkgutil.iter_modules(ops.__path__):
        module = importlib.import_module(f"foundry_moe.ops.{info.name}")
        found |= {f"{info.name}.{name}": op for name, op in vars(module).items() if hasattr(op, "plain")}
    return found


def operands():
    """For each operator, and which of its results to compare (None = all): the plain twin may leave some out."""
    experts_TK = torch.stack([torch.randperm(EXPERTS)[:K] for _ in range(TOKENS)])
    experts_TK[torch.rand(TOKENS, K) < 0.3] = -1
    experts_TK[experts_TK == 2] = -1  # an expert without tokens
    experts_TK = experts_TK.to(DEVICE)
    mask_T = torch.rand(TOKENS, device=DEVICE) < 0.7
    plan = ops.plan_permute(experts_TK, EXPERTS)
    rows = (plan.source_R, plan.row_TK, plan.offsets_E)
    x_TD = torch.randn(TOKENS, WIDTH, device=DEVICE)
    y_RD, weights_TK = torch.randn(TOKENS * K, WIDTH, device=DEVICE), torch.rand(TOKENS, K, device=DEVICE)
    scores_TE = torch.randn(TOKENS, EXPERTS, device=DEVICE)
    ranked_TE = scores_TE.abs().masked_fill(torch.rand(TOKENS, EXPERTS, device=DEVICE) < 0.5, -1)
    keys_T = torch.randint(-(2**31), 2**31, (TOKENS,), dtype=torch.int64, device=DEVICE).int()
    weight_ED = torch.randn(EXPERTS, WIDTH, device=DEVICE)
    counts_E = torch.tensor([3, 0, 7, 1, 1], device=DEVICE)
    number_1 = torch.tensor([4], device=DEVICE)
    return {
        "permute._plan": ((experts_TK, EXPERTS), None),
        "permute._gather": ((x_TD, *rows), None),
        "permute._sum": ((y_RD, weights_TK, *rows), None),
        "permute._gradients": ((x_TD, y_RD, weights_TK, *rows), None),
        "select_topk._topk": ((scores_TE, K), None),
        "select_topk.pack": ((ranked_TE, ranked_TE, EXPERTS), None),
        "select_topk._keep_largest": ((ranked_TE.t(), number_1, 0), None),
        "select_topk._count_choices": ((experts_TK, EXPERTS, mask_T), None),
        "softmax_topk._softmax_topk": (
            (scores_TE, Rule(2, True, 2.5, stream=-77, counted=1, with_balance=True), mask_T, keys_T),
            (0, 1, 3, 4, 5, 7),
        ),
        "softmax_topk._balance": ((scores_TE.softmax(-1).mean(0), counts_E), (0,)),
        "gate_logits._gate_logits": ((x_TD, weight_ED, Jitter()), None),
        "noise.uniform": ((keys_T, 7, -5), None),
        "noise.jitter": ((x_TD, keys_T, 0.25, 9), None),
    }


def test_every_operator_with_twins_is_compared_here():
    assert set(operators()) == set(operands())


@pytest.mark.parametrize("name", sorted(operands()))
def test_the_kernel_gives_what_its_plain_twin_gives(name):
    if DEVICE == "cuda" and name == "gate_logits._gate_logits":
        pytest.skip("takes bf16 on a GPU: tests/kernels/test_gate_logits.py")
    op = operators()[name]
    inputs, compared = operands()[name]
    ours, theirs = op.triton(*inputs), op.plain(*inputs)
    ours, theirs = (r if isinstance(r, tuple) else (r,) for r in (ours, theirs))
    for i in compared or range(len(theirs)):
        # fp32 sums of 24 products or of 37 tokens in another order; whole numbers are equal
        torch.testing.assert_close(ours[i], theirs[i], rtol=1e-5, atol=1e-5)


def test_operands_on_a_cpu_take_the_plain_twin(monkeypatch):
    scores_TE = torch.randn(4, 5)
    monkeypatch.setattr(ops.select_topk.kernels, "topk", lambda *_: pytest.fail("a kernel was asked for"))
    assert ops.select_topk.topk(scores_TE, 2)[1].shape == (4, 2)


class Scaling(NamedTuple):
    """A record as an operator takes it: a tensor, and plain values."""

    factor: torch.Tensor
    times: int
    shifts: Sequence[int]


@operator("test_scaled", lambda x, scaling, more: torch.empty_like(x))
def _scaled(x: torch.Tensor, scaling: Scaling, more: torch.Tensor | None) -> torch.Tensor:
    hash(scaling.shifts)  # as it is among what kernels were compiled for
    y = x * scaling.factor * scaling.times + sum(scaling.shifts)
    return y if more is None else y + more


def _save_scaled(ctx, inputs, output):
    _, scaling, more = inputs
    ctx.times, ctx.has_more = scaling.times, more is not None
    ctx.save_for_backward(scaling.factor)


scaled = differentiable(
    _scaled, _save_scaled, lambda ctx, dy: (dy * ctx.saved_tensors[0] * ctx.times, None, dy if ctx.has_more else None)
)


def test_only_a_second_backward_pass_is_told_to_recompute():
    class Context:
        @property
        def saved_tensors(self):
            raise RuntimeError("modified by an inplace operation")

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        take_saved(Context())  # by somebody else
    spent = SimpleNamespace(saved_tensors=(torch.ones(1),))
    assert take_saved(spent) is spent.saved_tensors
    again = Context()
    vars(again).update(spent=spent.spent)
    with pytest.raises(RuntimeError, match="a second backward pass through experts needs `memory: recompute`"):
        take_saved(again)


@operator("test_doubled_", lambda x, y: torch.empty_like(x), mutates=["y"])
def doubled_(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Writes as a kernel does, which autograd does not see."""
    y.data.copy_(2 * x)
    return 3 * x


def test_autograd_sees_that_an_operator_has_written_to_an_argument():
    for call in (doubled_, doubled_.eager, doubled_.operator):
        x, y = torch.ones(3), torch.zeros(3)
        call(x, y)
        assert torch.equal(y, torch.full((3,), 2.0)) and (x._version, y._version) == (0, 1)


def test_an_operator_with_a_record_is_one_node_of_a_graph_with_the_same_gradients():
    x, more, factor = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True), torch.randn(3)

    def model(x, more):
        return scaled(2 * x, Scaling(factor, 3, (1, 2)), None) + scaled(x, Scaling(factor, 2, ()), more)

    results = []
    for call in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        y = call(x, more)
        results.append([y, *torch.autograd.grad(y.square().sum(), (x, more))])
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(eager, compiled)
    torch.testing.assert_close(results[0][0], 8 * x * factor + 3 + more)
