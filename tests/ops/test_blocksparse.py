"""The block-sparse backend against the reference backend in fp64: outputs, every gradient, ragged loads, compiled.

Shapes: T tokens, K choices, E experts, D model width, F expert width.
"""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from foundry_moe.ops import expert_mlp, plan_permute
from foundry_moe.ops.backends import blocksparse_available

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
TOKENS, EXPERTS, K = (515, 5, 3) if CUDA else (13, 5, 3)
D, F = (264, 392) if CUDA else (24, 40)
# fp32 sums of a few hundred products; bf16 and fp16 keep 8 and 11 bits of z, h, dz and of each result
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
DTYPES = [torch.float32] + ([torch.float16, torch.bfloat16] if CUDA else [])


def choices(kind):
    generator = torch.Generator().manual_seed(1)
    scores = torch.rand(TOKENS, EXPERTS, generator=generator)
    if kind == "ragged":  # expert 3 gets nothing, expert 1 one token, some choices are absent
        scores[:, 3] = -1
        scores[1:, 1] = -1
    experts_TK = scores.topk(K).indices
    if kind == "ragged":
        experts_TK[scores.gather(1, experts_TK) < 0] = -1
        experts_TK[2] = -1
    if kind == "one takes all":
        experts_TK = torch.full((TOKENS, K), 2)
    if kind == "none":
        experts_TK = torch.full((TOKENS, K), -1)
    return experts_TK.to(DEVICE)


def leaves(dtype, gated=True, weighted=True, tokens=TOKENS):
    torch.manual_seed(0)
    shapes = {
        "x": ((tokens, D), 1.0),
        "weights": ((tokens, K), 1.0),
        "w1": ((EXPERTS, F, D), D**-0.5),
        "v1": ((EXPERTS, F, D), D**-0.5),
        "w2": ((EXPERTS, D, F), F**-0.5),
    }
    made = {name: (torch.randn(*s, device=DEVICE) * scale).to(dtype) for name, (s, scale) in shapes.items()}
    made["weights"] = torch.rand(tokens, K, device=DEVICE)
    if not gated:
        made["v1"] = None
    if not weighted:
        made["weights"] = None
    return {n: None if t is None else t.requires_grad_() for n, t in made.items()}


def run(leaf, experts_TK, activation="silu", backend="blocksparse", memory="save", call=expert_mlp):
    plan = plan_permute(experts_TK, EXPERTS)
    y = call(
        leaf["x"], leaf["weights"], plan, leaf["w1"], leaf["v1"], leaf["w2"],
        activation=activation, backend=backend, memory=memory,
    )  # fmt: skip
    names = [name for name, tensor in leaf.items() if tensor is not None]
    torch.manual_seed(1)
    direction = torch.randn(y.shape, device=DEVICE).to(y.dtype)
    grads = torch.autograd.grad(y, [leaf[name] for name in names], direction, allow_unused=True)
    return {"y": y, **dict(zip(names, grads, strict=True))}


def doubled(leaf):
    return {n: None if t is None else t.detach().double().requires_grad_() for n, t in leaf.items()}


def assert_close(ours, truth, tolerance):
    assert ours.keys() == truth.keys()
    for name, tensor in ours.items():
        assert torch.isfinite(tensor).all(), name
        error = (tensor.double() - truth[name].double()).norm() / truth[name].double().norm().clamp(min=1e-20)
        assert error < tolerance, (name, float(error))


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """Uninitialised memory holds NaN: what no kernel writes shows."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize("kind", ["ragged", "one takes all", "none"])
@pytest.mark.parametrize("gated, activation", [(True, "silu"), (True, "gelu"), (False, "gelu"), (False, "relu2")])
@pytest.mark.parametrize("memory", ["save", "recompute"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_outputs_and_every_gradient_are_the_references(kind, gated, activation, memory, dtype):
    leaf, experts_TK = leaves(dtype, gated), choices(kind)
    ours = run(leaf, experts_TK, activation, memory=memory)
    truth = run(doubled(leaf), experts_TK, activation, backend="reference")
    assert_close(ours, truth, TOLERANCE[dtype])


@pytest.mark.quick
def test_without_weights_rows_are_summed():
    leaf, experts_TK = leaves(DTYPES[-1], weighted=False), choices("ragged")
    assert_close(run(leaf, experts_TK), run(doubled(leaf), experts_TK, backend="reference"), TOLERANCE[DTYPES[-1]])


@pytest.mark.quick
def test_fewer_rows_than_choices_where_the_host_knows():
    leaf, experts_TK = leaves(DTYPES[-1]), choices("ragged")
    present = int((experts_TK >= 0).sum())
    everything = run(leaf, experts_TK)
    plan = plan_permute(experts_TK, EXPERTS, rows=present + 1)
    y = expert_mlp(
        leaf["x"], leaf["weights"], plan, leaf["w1"], leaf["v1"], leaf["w2"], activation="silu", backend="blocksparse"
    )
    assert torch.equal(y, everything["y"])
    torch.manual_seed(1)
    grads = torch.autograd.grad(y, list(leaf.values()), torch.randn(y.shape, device=DEVICE).to(y.dtype))
    for name, grad in zip(leaf, grads, strict=True):
        assert torch.equal(grad, everything[name]), name


def test_no_tokens_at_all_gives_zero_gradients():
    leaf = leaves(torch.float32, tokens=0)
    out = run(leaf, torch.zeros(0, K, dtype=torch.long, device=DEVICE))
    assert out["y"].shape == (0, D) and out["x"].shape == (0, D)
    assert all((out[name] == 0).all() for name in ("w1", "v1", "w2"))


@pytest.mark.quick
def test_expert_with_no_tokens_gets_zero_gradient():
    out = run(leaves(DTYPES[-1]), choices("ragged"))
    for name in ("w1", "v1", "w2"):
        assert (out[name][3] == 0).all()
        assert out[name][1].abs().sum() > 0


def test_same_input_gives_the_same_bits():
    leaf, experts_TK = leaves(DTYPES[-1]), choices("ragged")
    first, second = run(leaf, experts_TK), run(leaf, experts_TK)
    for name in first:
        assert torch.equal(first[name], second[name]), name


def test_recompute_gives_the_bits_of_save():
    leaf, experts_TK = leaves(DTYPES[-1]), choices("ragged")
    save, recompute = run(leaf, experts_TK), run(leaf, experts_TK, memory="recompute")
    for name in save:
        assert torch.equal(save[name], recompute[name]), name


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing_changes_no_bit(use_reentrant):
    leaf, experts_TK = leaves(DTYPES[-1]), choices("ragged")

    def checkpointed(*args, **kwargs):
        return checkpoint(lambda x: expert_mlp(x, *args[1:], **kwargs), args[0], use_reentrant=use_reentrant)

    if use_reentrant:  # it takes backward alone

        def gradients(call):
            for tensor in leaf.values():
                tensor.grad = None
            plan = plan_permute(experts_TK, EXPERTS)
            y = call(
                leaf["x"],
                leaf["weights"],
                plan,
                leaf["w1"],
                leaf["v1"],
                leaf["w2"],
                activation="silu",
                backend="blocksparse",
            )
            y.sum().backward()
            return {name: tensor.grad.clone() for name, tensor in leaf.items()}

        first, second = gradients(expert_mlp), gradients(checkpointed)
    else:
        first, second = run(leaf, experts_TK), run(leaf, experts_TK, call=checkpointed)
    for name in first:
        assert torch.equal(first[name], second[name]), name


def test_second_backward_through_one_graph_is_refused_or_right():
    leaf = leaves(torch.float32)
    plan = plan_permute(choices("ragged"), EXPERTS)
    args = (leaf["x"], leaf["weights"], plan, leaf["w1"], leaf["v1"], leaf["w2"])
    y = expert_mlp(*args, activation="silu", backend="blocksparse")
    y.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"second backward pass through experts needs `memory: recompute`"):
        y.sum().backward()
    y = expert_mlp(*args, activation="silu", backend="blocksparse", memory="recompute")
    first, second = (torch.autograd.grad(y.sum(), leaf["w2"], retain_graph=True) for _ in range(2))
    assert torch.equal(first[0], second[0])


@pytest.mark.parametrize("memory", ["save", "recompute"])
def test_surrounding_model_compiles_without_a_graph_break(memory):
    leaf, experts_TK = leaves(DTYPES[-1]), choices("ragged")
    plan = plan_permute(experts_TK, EXPERTS)

    def model(x, weights, w1, v1, w2):
        y = expert_mlp(2 * x, weights, plan, w1, v1, w2, activation="silu", backend="blocksparse", memory=memory)
        return torch.tanh(y)

    inputs = list(leaf.values())
    # eager and AOT autograd alone on a CPU: the graph is what is tested, inductor's C++ would take a minute
    compiled = torch.compile(model, fullgraph=True, backend="inductor" if CUDA else "aot_eager")
    results = []
    for call in (model, compiled):
        y = call(*inputs)
        results.append([y, *torch.autograd.grad(y.float().square().sum(), inputs)])
    for ours, theirs in zip(*results, strict=True):
        # inductor keeps 2 * x and tanh in fp32 where eager rounds to the dtype: a rounding or two of 2^-9
        error = (theirs - ours).float().norm() / ours.float().norm()
        assert error < (1e-2 if CUDA else 1e-6), float(error)


@pytest.mark.parametrize("memory", ["save", "recompute"])
@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_gives_fp32_weights_the_gradients_of_their_copies_unrounded(memory, compiled):
    dtype = DTYPES[-1] if CUDA else torch.float16
    leaf, experts_TK = leaves(torch.float32), choices("ragged")

    def cast(*args, **keys):
        with torch.autocast(DEVICE, dtype):
            return expert_mlp(*args, **keys)

    call = torch.compile(cast, backend="aot_eager", fullgraph=True) if compiled else cast
    ours = run(leaf, experts_TK, memory=memory, call=call)
    copies = {n: t.detach().to(t.dtype if n == "weights" else dtype).requires_grad_() for n, t in leaf.items()}
    rounded = run(copies, experts_TK, memory=memory)
    for name in ("w1", "v1", "w2"):
        assert ours[name].dtype is torch.float32
        assert torch.equal(ours[name].to(dtype), rounded[name])
        assert not torch.equal(ours[name], rounded[name].float())


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("width, hidden", [(21, 37), (24, 37), (20, 40)])
def test_widths_that_8_does_not_divide_are_those_of_the_reference(gated, width, hidden, monkeypatch):
    monkeypatch.setitem(globals(), "D", width)
    monkeypatch.setitem(globals(), "F", hidden)
    leaf, experts_TK = leaves(torch.float32, gated), choices("ragged")
    truth = run(doubled(leaf), experts_TK, backend="reference")
    assert_close(run(leaf, experts_TK), truth, TOLERANCE[torch.float32])


def test_wrong_use_names_what_does_not_fit():
    leaf = leaves(torch.float32)
    args = (leaf["x"], leaf["weights"], plan_permute(choices("ragged"), EXPERTS), leaf["w1"], leaf["v1"])
    with pytest.raises(ValueError, match="save or recompute"):
        expert_mlp(*args, leaf["w2"], activation="silu", backend="blocksparse", memory="none")
    with pytest.raises(ValueError, match=r"w2 is torch.float16"):
        expert_mlp(*args, leaf["w2"].half(), activation="silu", backend="blocksparse")
    assert not blocksparse_available(torch.device("cpu"), torch.float64)
