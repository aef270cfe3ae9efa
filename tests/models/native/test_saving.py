"""`save_pretrained` of converted models, and LLM Foundry's `hf_checkpointer`, write what plain transformers loads."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from composer.models import HuggingFaceModel
from llmfoundry.callbacks.hf_checkpointer import HuggingFaceCheckpointer
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, MixtralForCausalLM

from foundry_moe import MoEConfig, apply_dmoe
from foundry_moe.algorithms.gate_steps import GateSteps
from foundry_moe.layers.lookup import moe_layers
from tests.helpers.exporting import mpt, of_hugging_face
from tests.helpers.families import small
from tests.helpers.training import fit

IDS = torch.randint(0, 60, (2, 9), generator=torch.Generator().manual_seed(3))


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


@pytest.mark.quick
def test_a_native_model_is_saved_bit_for_bit_in_several_files(tmp_path: Path) -> None:
    before = small("mixtral").state_dict()
    model: Any = small("mixtral")
    apply_dmoe(model, MoEConfig(num_experts=5, top_k=2))
    assert isinstance(model, MixtralForCausalLM) and type(model).__name__ == "MixtralForCausalLM"
    model.save_pretrained(tmp_path, max_shard_size="20kB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    after = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_what_is_saved_of_a_tied_mpt_is_mixtral(tmp_path: Path) -> None:
    model = mpt(tie_word_embeddings=True).model
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="np") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118
    there = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(logits(there), logits(model), rtol=1e-4, atol=1e-5)


def test_called_with_a_configuration_the_class_makes_the_family_as_llm_foundry_does(tmp_path: Path) -> None:
    model = mpt().model
    second = type(model)(copy.deepcopy(model.config))
    state = dict(model.state_dict())
    second.load_state_dict(state, assign=True)
    assert not state, "both formats would be in memory at once"
    assert second.config.model_type == "mixtral"
    torch.testing.assert_close(logits(second), logits(model), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_selection_biases_leave_in_fp32_through_a_checkpointer_that_rounds(precision: str, tmp_path: Path) -> None:
    model: Any = of_hugging_face("deepseek_v3")
    for layer in moe_layers(model):
        layer.gate.get_buffer("bias_E").uniform_(4.99, 5.01)
    checkpointer = HuggingFaceCheckpointer(str(tmp_path), save_interval="1ba", precision=precision)
    fit(HuggingFaceModel(model, shift_labels=True), algorithms=[GateSteps()], duration="1ba", callbacks=[checkpointer])
    there = load_file(tmp_path / "huggingface" / "ba1" / "model.safetensors")
    for layer in moe_layers(model):
        gate = f"model.layers.{layer.layer_index}.mlp.gate"
        assert torch.equal(there[f"{gate}.e_score_correction_bias"], layer.gate.get_buffer("bias_E"))
        assert there[f"{gate}.weight"].dtype == getattr(torch, precision)


def test_other_biases_of_a_state_dict_are_saved_as_they_are() -> None:
    model: Any = of_hugging_face("deepseek_v3")
    given = {name: tensor.to(torch.bfloat16) + 1 for name, tensor in model.state_dict().items()}
    second = type(model)(model.config)
    second.load_state_dict(dict(given), assign=True)
    name = "model.layers.1.mlp.gate"
    assert torch.equal(second.state_dict()[f"{name}.e_score_correction_bias"], given[f"{name}.bias_E"])


def test_a_state_dict_that_lacks_experts_is_refused() -> None:
    model = mpt().model
    state = {name: tensor for name, tensor in model.state_dict().items() if ".blocks.1.ffn." not in name}
    with pytest.raises(ValueError, match=r"tensors have experts in layers \[0\], but the model has them in \[0, 1\]"):
        type(model)(model.config).load_state_dict(state, assign=True)


def llama(kind: str) -> Any:
    keys = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = getattr(transformers, kind)(transformers.LlamaConfig(**keys, vocab_size=61, initializer_range=0.3))
    apply_dmoe(model, MoEConfig(num_experts=4, top_k=2))
    return model


@pytest.mark.parametrize("protocol", ["pickle", "deepcopy"])
def test_a_copy_computes_and_saves_the_same(protocol: str, tmp_path: Path) -> None:
    model: Any = llama("LlamaForCausalLM")
    twin = copy.deepcopy(model) if protocol == "deepcopy" else pickle.loads(pickle.dumps(model))
    del model.__class__._converted  # the twin must not depend on the original
    torch.testing.assert_close(logits(twin), logits(model), rtol=0, atol=0)
    twin.save_pretrained(tmp_path)
    there = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(logits(there), logits(twin), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["LlamaForSequenceClassification", "LlamaModel"])
def test_a_model_with_another_head_names_its_class_and_another_way(kind: str, tmp_path: Path) -> None:
    model = llama(kind)
    with pytest.raises(ValueError, match=f"no family of Hugging Face MoE models has a {kind}; save its state_dict"):
        model.save_pretrained(tmp_path)
