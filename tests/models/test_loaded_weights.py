"""Loaded weights are never replaced, nor left out of a file, without a message."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from foundry_moe import MoEConfig, apply_dmoe
from foundry_moe.layers.lookup import moe_layers
from foundry_moe.models.pretrained import SafetensorsFolder, read_pretrained
from tests.helpers.families import small

SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 31,
    "initializer_range": 0.3,
}
IDS = torch.randint(0, 31, (2, 7), generator=torch.Generator().manual_seed(1))


def fresh() -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**SIZES))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    fresh().save_pretrained(path)
    return path


def test_a_loaded_dense_model_is_upcycled_by_default(folder: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(folder).double()
    with torch.no_grad():
        before = model(input_ids=IDS).logits
        apply_dmoe(model, MoEConfig(num_experts=2))
        torch.testing.assert_close(model(input_ids=IDS).logits, before, rtol=1e-12, atol=1e-12)


def test_a_loaded_dense_model_that_cannot_be_upcycled_is_not_made_random(folder: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(folder)
    with pytest.raises(
        ValueError,
        match=r"init \(auto\): .* would not be used, .*: expert_hidden_size \(7\) must be .* write init: random",
    ):
        apply_dmoe(model, MoEConfig(num_experts=2, expert_hidden_size=7))
    assert not moe_layers(model)


def test_whoever_asks_for_random_experts_gets_them_and_a_line(folder: Path) -> None:
    with pytest.warns(UserWarning, match="feed-forward weights of .* are not used"):
        assert len(apply_dmoe(LlamaForCausalLM.from_pretrained(folder), MoEConfig(num_experts=2, init="random"))) == 3


def test_upcycling_and_fresh_models_go_without_a_word(folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        apply_dmoe(fresh(), MoEConfig(num_experts=2))
        apply_dmoe(LlamaForCausalLM.from_pretrained(folder), MoEConfig(num_experts=2, init="upcycle"))
        config = LlamaConfig.from_pretrained(folder)  # names a source, and the model has nothing from it
        apply_dmoe(LlamaForCausalLM(config), MoEConfig(num_experts=2), loaded=False)


def test_weights_that_came_another_way_can_be_declared() -> None:
    model = fresh()
    dense = model.model.layers[0].mlp.up_proj.weight
    layer = apply_dmoe(model, MoEConfig(num_experts=2), loaded=True)[0]
    assert torch.equal(layer.experts.v1_EFD[1], dense)


def mixed() -> Qwen3MoeForCausalLM:
    torch.manual_seed(4)
    keys = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "norm_topk_prob": True}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **keys, head_dim=8, mlp_only_layers=[0])).double()


def test_dense_blocks_beside_moe_blocks_stay_what_they_are() -> None:
    model = mixed()
    with torch.no_grad():
        before = model(input_ids=IDS).logits
        layers = apply_dmoe(model, MoEConfig(num_experts=4, top_k=2, expert_hidden_size=12, loss={}))
        assert [layer.layer_index for layer in layers] == [1, 2]
        # Hugging Face rounds the gate's weights to fp32
        torch.testing.assert_close(model(input_ids=IDS).logits, before, rtol=2e-5, atol=2e-6)


def test_a_dense_block_beside_moe_blocks_cannot_be_named() -> None:
    with pytest.raises(ValueError, match=r"layers \(\[0, 1\]\): 0 of this model are dense beside MoE blocks"):
        apply_dmoe(mixed(), MoEConfig(num_experts=4, top_k=2, expert_hidden_size=12, layers=(0, 1)))


def test_a_converted_model_is_saved_as_one_that_can_be_read_back(tmp_path: Path) -> None:
    model = fresh()
    apply_dmoe(model, MoEConfig(num_experts=2))
    for number, one in enumerate((model, copy.deepcopy(model))):
        one.save_pretrained(tmp_path / str(number))
        again = AutoModelForCausalLM.from_pretrained(tmp_path / str(number), torch_dtype="auto")
        assert again.config.model_type == "mixtral"
        torch.testing.assert_close(again(input_ids=IDS).logits, one(input_ids=IDS).logits, rtol=2e-5, atol=2e-6)
    with pytest.raises(ValueError, match="save_pretrained: this LlamaModel is a part"):
        model.model.save_pretrained(tmp_path / "part")


def test_a_converted_model_that_no_family_computes_is_not_saved(tmp_path: Path) -> None:
    model = fresh()
    apply_dmoe(model, MoEConfig(num_experts=2, gate={"name": "topk", "score": "sigmoid"}))
    with pytest.raises(ValueError, match=r"save_pretrained: gate.score \(sigmoid\)"):
        model.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.quick
def test_a_folder_may_hold_a_tied_head_and_no_tensor_that_the_model_lacks(tmp_path: Path) -> None:
    there = small("olmoe", tie_word_embeddings=True).state_dict()
    assert "lm_head.weight" in there
    save_file({name: tensor.clone() for name, tensor in there.items()}, tmp_path / "model.safetensors")
    model = small("olmoe", seed=6, tie_word_embeddings=True)
    layers = apply_dmoe(model, MoEConfig(num_experts=5, top_k=2))
    read_pretrained(model, SafetensorsFolder(tmp_path))
    assert torch.equal(model.lm_head.weight, there["lm_head.weight"])
    assert torch.equal(layers[1].gate.weight_ED, there["model.layers.1.mlp.gate.weight"])
    (tmp_path / "model.safetensors").rename(tmp_path / "weights.safetensors")  # else only this one is read
    save_file({"model.layers.1.mlp.bias": torch.zeros(1)}, tmp_path / "more.safetensors")
    with pytest.raises(ValueError, match=r"has a tensor model\.layers\.1\.mlp\.bias, which this OlmoeForCausalLM does"):
        read_pretrained(model, SafetensorsFolder(tmp_path))


@pytest.mark.quick
def test_the_files_of_a_folder_are_those_that_transformers_reads(tmp_path: Path) -> None:
    model = small("olmoe")
    there = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.save_pretrained(tmp_path)
    others = {name: torch.zeros_like(tensor) for name, tensor in there.items()}
    save_file(others, tmp_path / "model_backup.safetensors")
    index = {"weight_map": dict.fromkeys(there, "model_backup.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    ours = small("olmoe", seed=6)
    layers = apply_dmoe(ours, MoEConfig(num_experts=5, top_k=2))
    read_pretrained(ours, SafetensorsFolder(tmp_path))
    for model in (plain, ours):
        assert torch.equal(model.lm_head.weight, there["lm_head.weight"])
    assert torch.equal(layers[1].gate.weight_ED, there["model.layers.1.mlp.gate.weight"])
    (tmp_path / "model.safetensors").rename(tmp_path / "weights.safetensors")
    read_pretrained(ours, SafetensorsFolder(tmp_path))  # those of the index
    assert not ours.lm_head.weight.any()
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(ValueError, match=r"weights.safetensors and model_backup.safetensors both hold lm_head.weight"):
        SafetensorsFolder(tmp_path)
