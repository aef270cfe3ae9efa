"""Every pair of features of a layer, in outputs and all gradients against a loop over tokens in fp64."""

import itertools

import pytest
import torch
from torch.nn import functional as F

from foundry_moe.config import MoEConfig
from foundry_moe.layers import losses
from foundry_moe.layers.context import BatchContext
from foundry_moe.layers.moe import MoELayer
from foundry_moe.layers.schedule import Progress
from foundry_moe.ops.capacity import capacity_of
from foundry_moe.ops.softmax_topk import z_loss
from tests.helpers.gates import batch, build, context_of
from tests.layers.test_capacity import naive_places

pytestmark = pytest.mark.quick

GATE_KEYS = {
    "sigmoid": {"score": "sigmoid"},
    "unnormalized": {"normalize": False},
    "scale": {"scale": 2.5},
    "balancing bias": {"bias_balance": True},
}
FEATURES = {
    "biases": {"bias": True},
    "capacity": {"capacity": 0.5},
    "shared": {"shared_expert_hidden_size": 4, "shared_expert_gate": True},
    "no GLU": {"activation": "gelu"},
    "one expert": {"num_experts": 1, "top_k": 1},
}


def loop(layer: MoELayer, x_TD: torch.Tensor, gate: dict, capacity: float | None) -> torch.Tensor:
    logits_TE = x_TD @ layer.gate.weight_ED.T
    scores_TE = logits_TE.sigmoid() if gate.get("score") == "sigmoid" else logits_TE.softmax(-1)
    biased_TE = scores_TE if layer.gate.bias_E is None else scores_TE + layer.gate.bias_E
    experts_TK = biased_TE.topk(layer.config.top_k).indices
    weights_TK = scores_TE.gather(1, experts_TK)
    if gate.get("normalize", True):
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
    weights_TK = weights_TK * gate.get("scale", 1.0)
    tokens, experts = logits_TE.shape
    room = tokens if capacity is None else capacity_of(capacity, tokens, layer.config.top_k, experts)
    kept_TK = naive_places(experts_TK, experts, room)
    ffn, shared, rows = layer.experts, layer.shared_expert, []
    for t in range(tokens):
        y_D = torch.zeros_like(x_TD[t])
        if shared is not None:
            hidden_F = shared.w1.weight @ x_TD[t]
            hidden_F = F.gelu(hidden_F) if shared.v1 is None else F.silu(hidden_F) * (shared.v1.weight @ x_TD[t])
            y_D = (shared.gate.weight @ x_TD[t]).sigmoid() * (shared.w2.weight @ hidden_F)
        for k, e in enumerate(experts_TK[t].tolist()):
            if not kept_TK[t, k]:
                continue
            b1_EF, c1_EF, b2_ED = (
                0 * like if bias is None else bias
                for bias, like in [
                    (ffn.w1_bias_EF, ffn.w1_EFD[..., 0]),
                    (ffn.v1_bias_EF, ffn.w1_EFD[..., 0]),
                    (ffn.w2_bias_ED, ffn.w2_EDF[..., 0]),
                ]
            )
            hidden_F = ffn.w1_EFD[e] @ x_TD[t] + b1_EF[e]
            if ffn.v1_EFD is None:
                hidden_F = F.gelu(hidden_F)
            else:
                hidden_F = F.silu(hidden_F) * (ffn.v1_EFD[e] @ x_TD[t] + c1_EF[e])
            y_D = y_D + weights_TK[t, k] * (ffn.w2_EDF[e] @ hidden_F + b2_ED[e])
        rows.append(y_D)
    return torch.stack(rows)


@pytest.mark.parametrize("pair", itertools.combinations([*GATE_KEYS, *FEATURES], 2), ids=" and ".join)
def test_a_layer_with_two_features_equals_the_loop_in_outputs_and_every_gradient(pair):
    gate, keys = {"name": "topk"}, {}
    for feature in pair:
        gate |= GATE_KEYS.get(feature, {})
        keys |= FEATURES.get(feature, {})
    base = {"num_experts": 5, "top_k": 2, "expert_hidden_size": 7, "activation": "swiglu", "init_std": 0.5, "loss": {}}
    config = MoEConfig(**{**base, "gate": gate, **keys})
    layer = MoELayer(6, config, layer_index=1, num_layers=3, context=BatchContext(), dtype=torch.float64)
    layer.reset_parameters()
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if "bias" in name:
                parameter.normal_()
        if layer.gate.bias_E is not None:
            layer.gate.bias_E.normal_()
    x_TD = torch.randn(14, 6, dtype=torch.float64, requires_grad=True)
    y_TD, truth_TD = layer.eval()(x_TD), loop(layer, x_TD, gate, config.capacity)
    torch.testing.assert_close(y_TD, truth_TD)
    inputs, direction = [x_TD, *layer.parameters()], torch.randn_like(y_TD)
    ours = torch.autograd.grad(y_TD, inputs, direction, materialize_grads=True)
    theirs = torch.autograd.grad(truth_TD, inputs, direction, materialize_grads=True)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_z_loss_is_that_of_the_logits_without_noise(score):
    gate = build({"name": "topk", "noise": True, "score": score}, 2).train()
    ids_BS, x_TD = batch()
    ours = gate(x_TD, context_of(ids_BS, losses=frozenset({"z"}))).losses["z"]
    truth = z_loss(x_TD @ gate.weight_ED.T)
    torch.testing.assert_close(ours, truth)
    for one, other in zip(*(torch.autograd.grad(value, gate.weight_ED) for value in (ours, truth)), strict=True):
        torch.testing.assert_close(one, other)


def test_the_balancing_bias_of_a_bf16_gate_moves_by_small_steps():
    gate = build({"name": "topk", "bias_balance": True, "bias_step": 1e-3}, 2, dtype=torch.bfloat16)
    gate.bias_E.fill_(1.0)  # 1.001 is 1 in bf16
    gate.after_step(torch.tensor([0] * 7 + [8]), Progress(ba=1))
    torch.testing.assert_close(gate.bias_E, torch.tensor([1.001] * 7 + [0.999]))


@pytest.mark.parametrize("settings", [{"name": "topk"}, {"name": "topk", "score": "sigmoid"}])
def test_a_sequence_of_padding_alone_changes_no_gradient(settings):
    gate = build(settings, 2).train()
    ids_BS, x_TD = batch()
    mask_BS = torch.ones_like(ids_BS)
    mask_BS[1] = 0
    only = frozenset({"balance", "z"})

    def gradients(rows: list[int]) -> list[torch.Tensor]:
        x = x_TD.view(4, 8, -1)[rows].flatten(0, 1)
        context = context_of(ids_BS[rows], mask_BS[rows], losses=only, balance_over="sequence")
        found = gate(x, context).losses
        return [torch.autograd.grad(found[name], gate.weight_ED, retain_graph=True)[0] for name in sorted(only)]

    for ours, theirs in zip(gradients([0, 1, 2, 3]), gradients([0, 2, 3]), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_the_entropy_of_one_expert_is_zero():
    assert losses.gate_entropy(torch.randn(5, 1)).item() == 0
