"""Families as data: configurations go both ways, and parts are all tensors of a block, each element once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import PhimoeConfig

from foundry_moe import apply_dmoe
from foundry_moe.config import MoEConfig
from foundry_moe.layers.context import BatchContext
from foundry_moe.layers.moe import MoELayer
from foundry_moe.models.blocks import Blocks, blocks_of
from foundry_moe.models.families import FAMILIES, family_of
from tests.helpers.families import MODEL_TYPES, small


def layer_of(blocks: Blocks) -> MoELayer:
    config = MoEConfig(**blocks.settings())
    return MoELayer(
        blocks.d_model, config, layer_index=0, num_layers=blocks.num_layers, context=BatchContext(), device="meta"
    )


def test_every_family_is_tried() -> None:
    assert set(MODEL_TYPES) == set(FAMILIES)


@pytest.mark.quick
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_parts_are_all_tensors_of_a_block_each_element_once(model_type: str) -> None:
    model = small(model_type)
    family = family_of(model.config.model_type)
    blocks = family.read(model.config)
    theirs = {name: tensor.shape for name, tensor in model.state_dict().items()}
    ours = {name: torch.zeros(tensor.shape) for name, tensor in layer_of(blocks).state_dict().items()}
    for layer in range(blocks.num_layers):
        prefix = family.block_name(layer) + "."
        below = {name.removeprefix(prefix): torch.zeros(s) for name, s in theirs.items() if name.startswith(prefix)}
        if layer not in blocks.layers:
            assert not any(part.theirs in below for part in family.parts(blocks))
            continue
        for part in family.parts(blocks):
            assert below[part.theirs].shape == part.their_shape, part
            below[part.theirs][part.box()] += 1
            (ours[part.ours] if part.expert is None else ours[part.ours][part.expert]).add_(torch.ones(part.shape))
        assert all((count == 1).all() for count in below.values()) and below
    assert all((count == len(blocks.layers)).all() for count in ours.values())


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_piece_of_a_part_is_a_box_of_theirs(model_type: str) -> None:
    blocks = family_of(model_type).read(config := small(model_type).config)
    for part in family_of(config.model_type).parts(blocks):
        if len(part.shape) != 2:
            continue
        theirs = torch.randn(part.their_shape)
        whole = theirs[part.box()]
        whole = whole.reshape(part.shape[::-1]).t() if part.transposed else whole.reshape(part.shape)
        begin, sizes = (part.shape[0] // 2, 1), (part.shape[0] - part.shape[0] // 2, 3)
        piece = theirs[part.box(begin, sizes)]
        piece = piece.reshape(sizes[::-1]).t() if part.transposed else piece.reshape(sizes)
        assert torch.equal(piece, whole[begin[0] :, 1:4])


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_what_is_read_of_a_configuration_writes_it_again(model_type: str) -> None:
    config = small(model_type).config
    family = family_of(config.model_type)
    blocks = family.read(config)
    again = type(config)(**family.write(blocks))
    assert family.read(again) == blocks
    layers, num_layers = blocks.layers, blocks.num_layers
    ours = blocks_of(MoEConfig(**blocks.settings()), d_model=32, layers=layers, num_layers=num_layers)
    assert family.write(ours) == family.write(blocks)


@pytest.mark.quick
@pytest.mark.parametrize(("limit", "written"), [(0, (1, 1)), (2, (4, 2)), (4, (1, 1))])
def test_a_token_of_a_written_deepseek_chooses_from_a_group_or_more(limit: int, written: tuple[int, int]) -> None:
    family = family_of("deepseek_v3")
    blocks = family.read(small("deepseek_v3").config)
    keys = family.write(replace(blocks, gate={**blocks.gate, "groups": 4, "group_limit": limit}))
    assert (keys["n_group"], keys["topk_group"]) == written


@pytest.mark.parametrize(
    ("model_type", "keys", "layers"),
    [
        ("qwen3_moe", {"mlp_only_layers": [0]}, (1, 2)),
        ("qwen3_moe", {"mlp_only_layers": [], "decoder_sparse_step": 2}, (1,)),
        ("qwen2_moe", {"mlp_only_layers": [2], "decoder_sparse_step": 1}, (0, 1)),
        ("deepseek_v3", {"first_k_dense_replace": 2}, (2,)),
        ("mixtral", {}, (0, 1, 2)),
    ],
)
def test_layers_that_a_configuration_leaves_dense_are_known(model_type: str, keys: Any, layers: Any) -> None:
    config = small(model_type, **keys).config
    assert family_of(config.model_type).read(config).layers == layers


@pytest.mark.parametrize(
    ("model_type", "keys", "sentence"),
    [
        ("mixtral", {"hidden_act": "tanh"}, r"Mixtral: hidden_act \(tanh\) is not one of silu"),
        (
            "dbrx",
            {"moe_normalize_expert_weights": 2.0},
            r"moe_normalize_expert_weights \(2.0\) divides by another norm",
        ),
        ("deepseek_v3", {"n_routed_experts": 4, "num_experts_per_tok": 2}, r"n_group \(4\) leaves groups of fewer"),
    ],
)
def test_what_our_layers_do_not_compute_is_named(model_type: str, keys: Any, sentence: str) -> None:
    config = small(model_type, **keys).config
    with pytest.raises(ValueError, match=sentence):
        family_of(config.model_type).read(config)


@pytest.mark.parametrize(
    ("model_type", "keys", "sentence"),
    [
        ("mixtral", {"gate": {"name": "topk", "normalize": False}}, r"gate.normalize \(false\): .* use true"),
        ("olmoe", {"gate": {"name": "topk", "score": "sigmoid"}}, r"gate.score \(sigmoid\): OLMoE .* use softmax"),
        ("olmoe", {"gate": {"name": "base"}}, r"gate.name \(base\): .* use topk"),
        ("olmoe", {"activation": "gelu"}, r"activation \(gelu\): experts of OLMoE are GLUs; use swiglu"),
        ("qwen3_moe", {"shared_expert_hidden_size": 8}, r"shared_expert_hidden_size \(8\): Qwen3-MoE .* use 0"),
        ("deepseek_v3", {"shared_expert_hidden_size": 8}, r"gate.score \(softmax\): DeepSeek-V3"),
        ("granitemoe", {"capacity": 1.25}, r"capacity \(1.25\) drops tokens.* use null"),
        ("olmoe", {"bias": True}, r"bias \(true\): .* use false"),
        ("mixtral", {"layers": (0, 2)}, r"layers: \[1\] are dense, and Mixtral has no dense layers; use layers: all"),
    ],
)
def test_a_model_that_a_family_cannot_say_is_refused_with_what_would_do(
    model_type: str, keys: Any, sentence: str
) -> None:
    config = MoEConfig(**{"num_experts": 4, "expert_hidden_size": 8, "activation": "swiglu", **keys})
    layers = tuple(layer for layer in range(3) if config.selects(layer))
    with pytest.raises(ValueError, match=sentence):
        FAMILIES[model_type].write(blocks_of(config, d_model=16, layers=layers, num_layers=3))


def test_other_models_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"model_type \(phimoe\) cannot .* these families can: Mixtral, OL"):
        family_of(PhimoeConfig().model_type)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v3"])
def test_a_model_whose_layers_are_all_dense_is_refused_in_a_sentence(model_type: str) -> None:
    keys = {"first_k_dense_replace": 3} if model_type == "deepseek_v3" else {"mlp_only_layers": [0, 1, 2]}
    with pytest.raises(ValueError, match=r"all layers of this .* model are dense by its configuration"):
        apply_dmoe(small(model_type, **keys), MoEConfig(num_experts=4, top_k=2))
