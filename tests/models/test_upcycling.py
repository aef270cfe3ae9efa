"""Dense blocks as experts: granular ones, with biases, of models that are not Llama-like; and blocks named by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from foundry_moe import MoEConfig, MoELayer, apply_dmoe
from foundry_moe.layers.moe import MoELayer as Layer

IDS = torch.randint(0, 61, (2, 9), generator=torch.Generator().manual_seed(1))
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 61,
    "initializer_range": 0.3,
}


def llama(**keys: Any) -> LlamaForCausalLM:
    torch.manual_seed(3)
    return LlamaForCausalLM(LlamaConfig(**SIZES, **keys)).double().eval()


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(3)
    sizes: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 48, "vocab_size": 61}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, initializer_range=0.3)).double().eval()


def neox() -> GPTNeoXForCausalLM:
    torch.manual_seed(3)
    return GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES)).double().eval()


def with_random_biases(model: nn.Module) -> Any:
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.5)
    return model


def difference(model: Any, config: MoEConfig, **keys: Any) -> tuple[float, list[Layer]]:
    with torch.no_grad():
        before = model(input_ids=IDS).logits
        layers = apply_dmoe(model, config, **keys)
        return (model(input_ids=IDS).logits - before).abs().max().item(), layers


@pytest.mark.parametrize("top_k", [3, 6])
@pytest.mark.parametrize("gate", [{}, {"score": "sigmoid"}, {"scale": 2.5}])
@pytest.mark.parametrize("build", [llama, lambda: with_random_biases(llama(mlp_bias=True)), neox])
def test_experts_of_a_third_of_the_width_add_up_to_the_dense_block(build: Any, gate: Any, top_k: int) -> None:
    config = MoEConfig(num_experts=6, top_k=top_k, expert_hidden_size=16, init="upcycle", gate={"name": "topk", **gate})
    largest, layers = difference(build(), config)
    assert largest < 1e-11
    assert layers[0].experts.w1_EFD.shape == (6, 16, 32)
    weight_ED = layers[0].gate.weight_ED
    assert torch.equal(weight_ED[0], weight_ED[2]) and not torch.equal(weight_ED[0], weight_ED[3])


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_unnormalised_weights_are_made_up_for_by_the_mean_of_an_untrained_gate(score: str) -> None:
    """With a gate of zeros every probability is 1/E, or 1/2, and the scale of He et al. 2024 is exact."""
    model = llama()
    with torch.no_grad():
        before = model(input_ids=IDS).logits
        gate = {"name": "topk", "normalize": False, "score": score, "scale": 2.5}
        config = MoEConfig(num_experts=6, top_k=3, expert_hidden_size=16, init="upcycle", gate=gate)
        for layer in apply_dmoe(model, config):
            layer.gate.weight_ED.zero_()
        torch.testing.assert_close(model(input_ids=IDS).logits, before, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("build", [gpt2, neox])
def test_blocks_with_biases_are_upcycled_exactly(build: Any) -> None:
    largest, layers = difference(with_random_biases(build()), MoEConfig(num_experts=4, init="upcycle"))
    assert largest < 1e-11 and len(layers) == 2
    assert layers[0].experts.w2_bias_ED.shape == (4, 32)


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_outputs_and_gradients_with_biases_are_those_of_each_expert_by_itself(activation: str) -> None:
    torch.manual_seed(0)
    config = MoEConfig(num_experts=3, top_k=2, expert_hidden_size=10, activation=activation, bias=True, loss={})
    layer = MoELayer(6, config, dtype=torch.float64)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    x_TD = torch.randn(7, 6, dtype=torch.float64, requires_grad=True)
    experts = layer.experts
    logits_TE = x_TD @ layer.gate.weight_ED.t()
    weights_TK, chosen_TK = logits_TE.softmax(-1).topk(2)
    weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
    rows = []
    for t in range(7):
        row = torch.zeros(6, dtype=torch.float64)
        for k in range(2):
            e = int(chosen_TK[t, k])
            h = experts.w1_EFD[e] @ x_TD[t] + experts.w1_bias_EF[e]
            h = nn.functional.silu(h) if activation == "swiglu" else nn.functional.gelu(h)
            if experts.v1_EFD is not None:
                h = h * (experts.v1_EFD[e] @ x_TD[t] + experts.v1_bias_EF[e])
            row = row + weights_TK[t, k] * (experts.w2_EDF[e] @ h + experts.w2_bias_ED[e])
        rows.append(row)
    inputs = [x_TD, *layer.parameters()]
    dy_TD = torch.randn(7, 6, dtype=torch.float64)
    truth = torch.autograd.grad(torch.stack(rows), inputs, dy_TD)
    y_TD = layer(x_TD)
    torch.testing.assert_close(y_TD, torch.stack(rows), rtol=1e-12, atol=1e-12)
    for found, wanted in zip(torch.autograd.grad(y_TD, inputs, dy_TD), truth, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)


class Odd(nn.Module):
    """A model of no known kind, whose blocks have other names."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"ff": nn.ModuleDict({"one": nn.Linear(8, 12), "two": nn.Linear(12, 8)})}) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            ff: Any = layer["ff"]  # type: ignore[index]
            y = ff(x) if isinstance(ff, MoELayer) else ff["two"](nn.functional.gelu(ff["one"](x)))
            x = x + y
        return x


def test_blocks_are_named_by_hand() -> None:
    torch.manual_seed(0)
    model, x = Odd().double(), torch.randn(3, 5, 8, dtype=torch.float64)
    with torch.no_grad():
        before = model(x)
        parts = {"w1": "one", "w2": "two", "activation": "gelu"}
        layers = apply_dmoe(model, MoEConfig(num_experts=4, init="upcycle"), blocks={"layers.*.ff": parts})
        assert len(layers) == 2
        torch.testing.assert_close(model(x), before, rtol=1e-12, atol=1e-12)


def test_known_blocks_are_named_by_hand_too() -> None:
    layers = apply_dmoe(llama(), MoEConfig(num_experts=4), blocks={"model.layers.1.mlp": None})
    assert len(layers) == 1 and layers[0].experts.w1_EFD.shape == (4, 48, 32)


def test_a_block_with_other_parameters_is_refused_by_their_names() -> None:
    """A whole encoder layer would lose its attention and its norms."""
    layer = nn.TransformerEncoderLayer(16, 2, 32)
    with pytest.raises(ValueError, match=r"layers\.0 \(TransformerEncoderLayer\) also holds self_attn\.in_proj_weight"):
        apply_dmoe(
            nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
            MoEConfig(num_experts=4),
            blocks={"layers.*": {"w1": "linear1", "w2": "linear2", "activation": "relu"}},
        )


@pytest.mark.parametrize(
    ("blocks", "sentence"),
    [
        ({"layers.*.fff": None}, r"blocks: layers.\*.fff names no module of Odd; did you mean 'layers.\d.ff'\?"),
        ({"layers.*.ff": None}, r"layers.0.ff \(ModuleDict\) is not a feed-forward block that is known; say what"),
        ({"layers.*.ff": {"w1": "one", "w2": "three"}}, r"layers.0.ff \(ModuleDict\): one, three are not all linear"),
        ({"layers.*.ff": {"w1": "one"}}, r"layers.0.ff \(w1\) must have w1 and w2"),
        ({"layers.*.ff": {"w9": "one"}}, r"layers.0.ff \(w9\) must have w1 and w2, and may have v1"),
        ({"layers.*.ff": {"w1": "one", "w2": "two"}}, r"activation \(auto\): that of layers.0.ff is not one of"),
    ],
)
def test_names_that_do_not_fit_are_told(blocks: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        apply_dmoe(Odd(), MoEConfig(num_experts=4), blocks=blocks)


def test_a_layer_on_its_own_takes_three_lines() -> None:
    layer = MoELayer(32, MoEConfig(num_experts=4, expert_hidden_size=48, activation="swiglu"))
    y = layer(torch.randn(2, 5, 32))
    assert y.shape == (2, 5, 32) and y.isfinite().all()
    y.sum().backward()
    with pytest.raises(ValueError, match=r"expert_hidden_size \(auto\): a layer on its own has no FFN"):
        MoELayer(32, MoEConfig(num_experts=4))
