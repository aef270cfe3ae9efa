"""Models in which feed-forward blocks become experts: what stays the same, what moves, and what is refused."""

import pytest
import torch
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PhimoeConfig,
    PhimoeForCausalLM,
)

from foundry_moe import MoEConfig, apply_dmoe
from foundry_moe.layers.lookup import moe_layers
from foundry_moe.models.block_plans import find_blocks

pytestmark = pytest.mark.quick

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 61,
    "initializer_range": 0.3,
}
IDS = torch.randint(0, 61, (2, 9), generator=torch.Generator().manual_seed(1))


def llama(**keys) -> LlamaForCausalLM:
    torch.manual_seed(3)
    return LlamaForCausalLM(LlamaConfig(**SIZES, **keys)).double()


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("shared", [0, 16])
def test_upcycled_model_computes_the_dense_one_exactly(score, shared):
    model = llama()
    with torch.no_grad():
        dense = model(input_ids=IDS).logits
        config = MoEConfig(
            num_experts=4,
            top_k=3,
            init="upcycle",
            gate={"name": "topk", "score": score},
            shared_expert_hidden_size=shared,
        )
        assert len(apply_dmoe(model, config)) == 3
        upcycled = model(input_ids=IDS).logits
    # weights that sum to one times equal outputs: only the sum's rounding remains, 1e-16 relative a layer
    torch.testing.assert_close(upcycled, dense, rtol=1e-12, atol=1e-12)


def test_upcycled_experts_part_ways_once_trained():
    model = llama()
    layer = apply_dmoe(model, MoEConfig(num_experts=4, init="upcycle"))[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(input_ids=IDS, labels=IDS).loss.backward()
    optimizer.step()
    assert not torch.equal(layer.experts.w1_EFD[0], layer.experts.w1_EFD[1])


@pytest.mark.parametrize(("layers", "expected"), [("all", [0, 1, 2]), ({"every": 2}, [1]), ([0, 2], [0, 2])])
def test_only_chosen_layers_change(layers, expected):
    model = llama()
    config = MoEConfig(num_experts=2, layers=tuple(layers) if isinstance(layers, list) else layers)
    assert [layer.layer_index for layer in apply_dmoe(model, config)] == expected
    kinds = [type(block.mlp).__name__ for block in model.model.layers]
    assert [i for i, kind in enumerate(kinds) if kind == "MoELayer"] == expected


def test_optimizer_gets_the_new_parameters_in_the_old_ones_group():
    model = llama()
    ffn = [p for n, p in model.named_parameters() if ".mlp." in n]
    rest = [p for n, p in model.named_parameters() if ".mlp." not in n]
    optimizer = torch.optim.AdamW([{"params": rest, "lr": 1.0}, {"params": ffn, "lr": 2.0}])
    layers = apply_dmoe(model, MoEConfig(num_experts=2), optimizer)
    assert {id(p) for g in optimizer.param_groups for p in g["params"]} == {id(p) for p in model.parameters()}
    assert {id(p) for p in optimizer.param_groups[1]["params"]} == {id(p) for x in layers for p in x.parameters()}


def test_of_several_groups_that_held_old_parameters_the_first_gets_the_new_ones():
    model = llama()
    gates = [p for n, p in model.named_parameters() if "gate_proj" in n]
    others = [p for n, p in model.named_parameters() if "gate_proj" not in n]
    optimizer = torch.optim.AdamW([{"params": gates}, {"params": others}])
    layers = apply_dmoe(model, MoEConfig(num_experts=2), optimizer)
    first, second = ({id(p) for p in group["params"]} for group in optimizer.param_groups)
    assert first == {id(p) for layer in layers for p in layer.parameters()}
    assert first | second == {id(p) for p in model.parameters()}


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 4)
        self.act_fn = nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def test_blocks_whose_names_begin_alike_are_all_found():
    model = nn.Sequential(*(MLP() for _ in range(12)))
    found = find_blocks(model, None)
    assert [(block.name, block.layer) for block in found] == [(str(index), index) for index in range(12)]


def test_an_optimizer_that_has_stepped_keeps_no_state_of_the_old_blocks_and_steps_on():
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        model(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()

    step()
    kept = [id(parameter) for name, parameter in model.named_parameters() if ".mlp." not in name]
    apply_dmoe(model, MoEConfig(num_experts=2), optimizer)
    assert sorted(id(parameter) for parameter in optimizer.state) == sorted(kept)
    step()
    assert {id(parameter) for parameter in optimizer.state} == {id(parameter) for parameter in model.parameters()}


def test_an_optimizer_that_keeps_biases_apart_is_left_no_parameter_of_the_old_blocks():
    model = llama(mlp_bias=True)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}])
    apply_dmoe(model, MoEConfig(num_experts=2, bias=True), optimizer)
    held = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in model.parameters())
    names = {id(p): name for name, p in model.named_parameters()}
    decayed, others = ([names[id(p)] for p in group["params"]] for group in optimizer.param_groups)
    assert not any("bias" in name for name in decayed)
    assert sum("_bias_" in name for name in others) == 3 * 3 and all("bias" in n or "norm" in n for n in others)


def test_width_activation_device_and_dtype_are_those_of_the_block():
    model = llama(hidden_act="gelu").bfloat16()
    layer = apply_dmoe(model, MoEConfig(num_experts=2))[0]
    assert (layer.config.expert_hidden_size, layer.config.activation) == (48, "geglu")
    assert {p.dtype for p in layer.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("training", [True, False])
def test_layers_are_in_the_mode_of_their_blocks(training):
    model = llama().train(training)
    layers = apply_dmoe(model, MoEConfig(num_experts=2, init="upcycle"))
    assert {module.training for layer in layers for module in layer.modules()} == {training}


def test_blocks_on_meta_become_layers_on_meta():
    with torch.device("meta"):
        model = llama()
    assert {p.device.type for layer in apply_dmoe(model, MoEConfig(num_experts=2)) for p in layer.parameters()} == {
        "meta"
    }


@pytest.mark.parametrize(
    ("make", "layers", "sentence"),
    [
        (lambda: nn.Sequential(nn.Linear(2, 2)), "all", r"Sequential has no feed-forward block .*blocks=\.\.\.\)$"),
        (llama, {"every": 7}, r"layers \({'every': 7}\) selects none of the 3 feed-forward blocks"),
    ],
)
def test_a_model_in_which_nothing_matches_is_refused(make, layers, sentence):
    with pytest.raises(ValueError, match=sentence):
        apply_dmoe(make(), MoEConfig(num_experts=2, layers=layers))


@pytest.mark.parametrize(
    ("keys", "config", "sentence"),
    [
        ({}, {"layers": (1, 3)}, r"layers \(\[1, 3\]\): the model has 3, so use 0 to 2"),
        ({"mlp_bias": True}, {"init": "upcycle", "bias": False}, r"bias \(false\): .* has biases, which init: upcycle"),
        ({}, {"init": "upcycle", "expert_hidden_size": 64}, r"\(64\) must be that of model.layers.0.mlp \(48\)"),
        ({}, {"init": "upcycle", "expert_hidden_size": 16, "top_k": 1}, r"num_experts \(2\) must be a multiple of 3"),
        (
            {},
            {"init": "upcycle", "num_experts": 6, "expert_hidden_size": 16},
            r"top_k \(2\) must be a multiple of 3 .* cut into 3 experts of 16",
        ),
        ({}, {"init": "upcycle", "activation": "relu"}, r"activation \(relu\) must be that of .* \(swiglu\)"),
    ],
)
def test_what_cannot_be_taken_over_is_named(keys, config, sentence):
    with pytest.raises(ValueError, match=sentence):
        apply_dmoe(llama(**keys), MoEConfig(**{"num_experts": 2, **config}))


def test_upcycling_weights_that_do_not_exist_yet_is_refused():
    with torch.device("meta"):
        model = llama()
    with pytest.raises(ValueError, match="use init_device: cpu"):
        apply_dmoe(model, MoEConfig(num_experts=2, init="upcycle"))


def test_applying_twice_is_refused():
    model = llama()
    apply_dmoe(model, MoEConfig(num_experts=2))
    with pytest.raises(ValueError, match="has dMoE layers already"):
        apply_dmoe(model, MoEConfig(num_experts=2))


def test_blocks_of_experts_of_an_unknown_family_are_refused():
    model = PhimoeForCausalLM(PhimoeConfig(**SIZES, num_experts_per_tok=2, num_local_experts=5))
    with pytest.raises(ValueError, match="is an MoE block of a model whose family is not known"):
        apply_dmoe(model, MoEConfig(num_experts=5))


def test_layers_share_one_context():
    model = llama()
    apply_dmoe(model, MoEConfig(num_experts=2))
    assert len({id(layer.context) for layer in moe_layers(model)}) == 1
    layer, seen = moe_layers(model)[2], []
    layer.register_forward_hook(lambda *_: seen.append(layer.context.for_tokens(IDS.numel()).token_ids_BS))
    model(input_ids=IDS, attention_mask=torch.ones_like(IDS))
    assert torch.equal(seen[0], IDS)
