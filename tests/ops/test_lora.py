"""LoRA on experts: the dense formula in fp64 with every gradient, on every backend that a CPU runs."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from foundry_moe import MoEConfig, MoELayer
from foundry_moe.config import LoRAConfig
from foundry_moe.ops import Biases, expert_mlp, plan_permute
from foundry_moe.ops.capacity import drop_beyond_capacity
from foundry_moe.ops.lora import Adapter, Adapters
from foundry_moe.ops.unfused import POINTWISE

pytestmark = pytest.mark.quick

E, D, F, L, K = 5, 16, 24, 3, 2


def draw(*shape: int, dtype=torch.float64, grad: bool = True) -> torch.Tensor:
    return (torch.randn(*shape, dtype=torch.float64) * 0.4).to(dtype).requires_grad_(grad)


def problem(tokens: int, targets: str, gated: bool, biased: bool, dtype=torch.float64):
    """Frozen weights, adapters, and choices that leave expert 1 without tokens."""
    torch.manual_seed(tokens)
    new = {"dtype": dtype}
    w1, w2 = draw(E, F, D, grad=False, **new), draw(E, D, F, grad=False, **new)
    v1 = draw(E, F, D, grad=False, **new) if gated else None
    biases = None
    if biased:
        biases = Biases(
            draw(E, F, grad=False, **new), draw(E, F, grad=False, **new) if gated else None, draw(E, D, grad=False)
        )
    wide, narrow = (lambda: Adapter(draw(E, D, L, **new), draw(E, F, L, **new))), (F, D)
    adapters = Adapters(
        wide() if "w1" in targets else None,
        wide() if "v1" in targets and gated else None,
        Adapter(*(draw(E, size, L, **new) for size in narrow)) if "w2" in targets else None,
        scale=1.7,
    )
    x_TD, weights_TK = draw(tokens, D, **new), draw(tokens, K, **new)
    experts_TK = torch.stack([torch.tensor([0, 2, 3, 4])[torch.randperm(4)[:K]] for _ in range(tokens)])
    return x_TD, weights_TK, experts_TK, (w1, v1, w2), biases, adapters


def leaves(x_TD, weights_TK, adapters) -> list[torch.Tensor]:
    factors = [factor for adapter in adapters[:3] if adapter is not None for factor in adapter]
    return [x_TD, weights_TK, *factors]


def merged(weight, adapter, scale):
    if weight is None or adapter is None:
        return weight
    return weight + scale * adapter.b_ENL @ adapter.a_EKL.mT


def formula(x_TD, weights_TK, experts_TK, weights, biases, adapters, activation, kept_TK=None):
    """Token by token with W + scale B A."""
    w1, v1, w2 = (merged(w, a, adapters.scale) for w, a in zip(weights, adapters[:3], strict=True))
    rows = []
    for t, x_D in enumerate(x_TD):
        y_D = torch.zeros_like(x_D)
        for k, e in enumerate(experts_TK[t].tolist()):
            if kept_TK is not None and not kept_TK[t, k]:
                continue
            h_F = POINTWISE[activation](w1[e] @ x_D + (0 if biases is None else biases.w1_EF[e]))
            if v1 is not None:
                h_F = h_F * (v1[e] @ x_D + (0 if biases is None else biases.v1_EF[e]))
            y_D = y_D + weights_TK[t, k] * (w2[e] @ h_F + (0 if biases is None else biases.w2_ED[e]))
        rows.append(y_D)
    return torch.stack(rows)


def compare(ours, theirs, inputs, **tolerance):
    torch.testing.assert_close(ours, theirs, **tolerance)
    direction = torch.randn_like(theirs)
    found = torch.autograd.grad(ours, inputs, direction.to(ours.dtype))
    for a, b in zip(found, torch.autograd.grad(theirs, inputs, direction), strict=True):
        torch.testing.assert_close(a, b, **tolerance)


@pytest.mark.parametrize("memory", ["save", "recompute"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    ("tokens", "targets", "activation", "gated"),
    [
        (13, "w1 v1 w2", "silu", True),
        (1, "w1 v1 w2", "gelu", True),
        (13, "w2", "silu", True),
        (13, "v1", "relu", True),
        (13, "w1 w2", "gelu_tanh", False),
    ],
)
def test_outputs_and_every_gradient_equal_the_dense_formula_in_fp64(tokens, targets, activation, gated, biased, memory):
    x_TD, weights_TK, experts_TK, weights, biases, adapters = problem(tokens, targets, gated, biased)
    y_TD = expert_mlp(
        x_TD, weights_TK, plan_permute(experts_TK, E), *weights,
        activation=activation, biases=biases, adapters=adapters, memory=memory,
    )  # fmt: skip
    truth = formula(x_TD, weights_TK, experts_TK, weights, biases, adapters, activation)
    compare(y_TD, truth, leaves(x_TD, weights_TK, adapters))


@pytest.mark.parametrize("biased", [False, True])
def test_dropped_tokens_equal_the_dense_formula(biased):
    x_TD, weights_TK, experts_TK, weights, biases, adapters = problem(11, "w1 v1 w2", True, biased)
    kept_TK = drop_beyond_capacity(experts_TK, E, top_k=K, factor=0.8)
    assert (kept_TK != experts_TK).any()
    plan = plan_permute(kept_TK, E)
    y_TD = expert_mlp(
        x_TD, weights_TK, plan, *weights, activation="silu", biases=biases, adapters=adapters
    )  # fmt: skip
    truth = formula(x_TD, weights_TK, experts_TK, weights, biases, adapters, "silu", kept_TK >= 0)
    compare(y_TD, truth, leaves(x_TD, weights_TK, adapters))


def test_blocksparse_kernels_equal_the_reference():
    """In Triton's interpreter, or on a GPU."""
    from foundry_moe.ops.backends import blocksparse_available

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not blocksparse_available(device, torch.float32):
        pytest.skip("kernels need a GPU or TRITON_INTERPRET=1")
    parts = problem(13, "w1 v1 w2", True, False, dtype=torch.float32)
    x_TD, weights_TK, experts_TK, weights, _, adapters = parts
    results = []
    for backend in ("reference", "blocksparse"):
        moved = [tensor.detach().to(device).requires_grad_() for tensor in leaves(x_TD, weights_TK, adapters)]
        made = Adapters(*(Adapter(*moved[i : i + 2]) for i in (2, 4, 6)), scale=adapters.scale)
        y_TD = expert_mlp(
            moved[0], moved[1], plan_permute(experts_TK.to(device), E), *(w.to(device) for w in weights),
            activation="silu", backend=backend, adapters=made,
        )  # fmt: skip
        results.append([y_TD, *torch.autograd.grad(y_TD.sin().sum(), moved)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)  # sums of 24 fp32 products in another order


CONFIG = MoEConfig(
    num_experts=E, top_k=K, expert_hidden_size=F, activation="swiglu", init_std=0.4, lora={"r": 4, "alpha": 8}
)


def layer_with(dtype=torch.float64, **keys) -> MoELayer:
    torch.manual_seed(0)
    layer = MoELayer(D, replace(CONFIG, **keys), dtype=dtype)
    with torch.no_grad():
        for name, parameter in layer.experts.named_parameters():
            if "_B_" in name:
                parameter.copy_(torch.randn_like(parameter))
    return layer


def test_base_weights_are_frozen_and_adapters_trained_in_fp32():
    layer = layer_with(dtype=torch.bfloat16)
    layer(torch.randn(7, D, dtype=torch.bfloat16)).sum().backward()
    for name, parameter in layer.experts.named_parameters():
        adapter = "_A_" in name or "_B_" in name
        assert parameter.requires_grad == adapter and (parameter.grad is not None) == adapter, name
        assert parameter.dtype == (torch.float32 if adapter else torch.bfloat16)


def test_factors_have_the_deviation_of_pefts_by_their_inputs():
    config = replace(CONFIG, expert_hidden_size=128, lora={"r": 8, "alpha": 8})
    experts = MoELayer(32, config).experts
    for name, inputs in (("w1_A_EDL", 32), ("v1_A_EDL", 32), ("w2_A_EFL", 128)):
        found = experts.get_parameter(name).std().item()  # E * 256 draws or more: four standard errors
        assert found == pytest.approx((3 * inputs) ** -0.5, rel=4 / math.sqrt(2 * E * 256)), name


def test_recompute_keeps_less_for_the_backward_pass():
    kept = {}
    for memory in ("save", "recompute"):
        layer, numbers = layer_with(memory=memory), []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, n=numbers: n.append(t.numel()) or t, lambda t: t):
            layer(torch.randn(64, D, dtype=torch.float64))
        kept[memory] = sum(numbers)
    assert kept["recompute"] < 0.5 * kept["save"]


def test_adapters_start_at_zero_and_do_not_move_other_weights():
    with_lora, without = MoELayer(D, CONFIG), MoELayer(D, replace(CONFIG, lora=None))
    ours, theirs = dict(with_lora.named_parameters()), dict(without.named_parameters())
    assert all(torch.equal(ours[name], parameter) for name, parameter in theirs.items())
    x_TD = torch.randn(9, D)
    torch.testing.assert_close(with_lora(x_TD), without(x_TD))


@pytest.mark.parametrize("keys", [{}, {"bias": True}, {"capacity": 1.0}, {"activation": "gelu"}, {"loss": {"z": 0.1}}])
def test_a_merged_layer_equals_the_one_with_adapters(keys):
    layer = layer_with(**keys)
    plain = MoELayer(D, replace(layer.config, lora=None), dtype=torch.float64)
    plain.load_state_dict(layer.state_dict(), strict=False)
    with torch.no_grad():
        for target, (a, b) in layer.experts.adapter_names.items():
            weight = plain.experts.get_parameter("w2_EDF" if target == "w2" else f"{target}_EFD")
            weight += 2.0 * layer.experts.get_parameter(b) @ layer.experts.get_parameter(a).mT
    x_TD = torch.randn(9, D, dtype=torch.float64)
    torch.testing.assert_close(layer(x_TD), plain(x_TD))


@pytest.mark.parametrize("target", ["v1", "w2"])
def test_dropout_is_of_training_alone_and_right_on_average(target):
    layer = layer_with(lora={"r": 4, "alpha": 8, "dropout": 0.5, "targets": [target]})
    x_TD = torch.randn(1, D, dtype=torch.float64)
    whole = layer.eval()(x_TD)
    assert torch.equal(layer(x_TD), whole)
    layer.train()
    drawn = layer(x_TD.expand(4000, D)).detach()
    # the product is linear in what is dropped: the mean of n draws is within five deviations / sqrt(n)
    assert ((drawn.mean(0) - whole).abs() <= 5 * drawn.std(0) / math.sqrt(len(drawn))).all()
    assert (drawn.std(0) > 0.01).all()
    with torch.no_grad():
        layer.experts.get_parameter(layer.experts.adapter_names[target][1]).zero_()
    torch.testing.assert_close(layer(x_TD), layer(x_TD), msg="inputs of weights lose nothing")


def test_scales_of_both_kinds():
    assert LoRAConfig(r=16, alpha=32).scale == 2.0
    assert LoRAConfig(r=16, alpha=32, rslora=True).scale == 8.0


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"lora": {"rank": 8}}, "lora.rank is not a key of lora"),
        ({"lora": {"r": 0}}, r"lora.r \(0\) must be 1 or more"),
        ({"lora": {"dropout": 1.0}}, r"lora.dropout \(1.0\) must be at least 0 and below 1"),
        ({"lora": {"targets": ["w3"]}}, "lora.targets: 'w3' is not one of w1, v1, w2"),
        ({"lora": {"targets": []}}, "must be different matrices"),
        ({"lora": {"targets": ["v1"]}, "activation": "gelu"}, r"lora.targets \(v1\): experts with activation \(gelu\)"),
        ({"expert_hidden_size": (4, 8, 4, 8, 4)}, "lora does not support experts of different widths"),
    ],
)
def test_a_mistake_is_one_sentence(keys, sentence):
    with pytest.raises(ValueError, match=sentence):
        replace(CONFIG, **keys)
