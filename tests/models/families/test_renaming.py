"""`foundry-moe checkpoints import` of a Hugging Face folder: the names and layouts of a run that takes it over."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from foundry_moe import MoEConfig, apply_dmoe
from foundry_moe.checkpoint import open_store
from foundry_moe.checkpoint.ledger import Ledger
from foundry_moe.models.configurations import check_configuration
from foundry_moe.models.families import family_of
from foundry_moe.models.pretrained import renaming_of
from tests.helpers.commands import tool
from tests.helpers.families import MODEL_TYPES, small


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_an_imported_folder_has_the_tensors_of_a_run(model_type: str, tmp_path: Path) -> None:
    model = small(model_type)
    model.save_pretrained(tmp_path)
    rename = renaming_of(tmp_path)
    assert rename is not None
    found = rename(load_file(tmp_path / "model.safetensors"))
    blocks = family_of(model.config.model_type).read(model.config)
    apply_dmoe(model, MoEConfig(num_experts=blocks.num_experts, top_k=blocks.top_k))
    truth = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    assert found.keys() == truth.keys()
    assert all(torch.equal(tensor, truth[name]) for name, tensor in found.items())


@pytest.mark.quick
@pytest.mark.parametrize("model_type", ["deepseek_v3", "granitemoe"])
def test_tensors_of_a_folder_in_bf16_have_the_dtypes_of_a_run(model_type: str, tmp_path: Path) -> None:
    model = small(model_type).bfloat16()
    model.save_pretrained(tmp_path)
    found = renaming_of(tmp_path)(load_file(tmp_path / "model.safetensors"))
    blocks = family_of(model.config.model_type).read(model.config)
    apply_dmoe(model, MoEConfig(num_experts=blocks.num_experts, top_k=blocks.top_k))
    assert {name.removeprefix("model."): tensor.dtype for name, tensor in found.items()} == {
        name: tensor.dtype for name, tensor in model.state_dict().items()
    }


@pytest.mark.quick
@pytest.mark.parametrize("tied", [True, False])
def test_only_a_tied_model_has_its_embeddings_as_its_head(tied: bool, tmp_path: Path) -> None:
    small("olmoe", tie_word_embeddings=tied).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert tied or tensors.pop("lm_head.weight") is not None  # a folder that is not complete
    found = renaming_of(tmp_path)(tensors)
    head = found.get("model.lm_head.weight")
    assert (head is found["model.model.embed_tokens.weight"]) if tied else head is None


def test_the_command_commits_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small("mixtral").save_pretrained(tmp_path / "hf")
    assert tool("import", tmp_path / "run", tmp_path / "hf") == 0
    ledger = Ledger(open_store(str(tmp_path / "run")))
    tensors = ledger.open(ledger.newest_first()[0]).manifest.tensors
    assert tensors["model.model.model.layers.0.block_sparse_moe.experts.w1_EFD"].shape == (5, 44, 32)
    (tmp_path / "hf" / "config.json").write_text("[")
    assert tool("import", tmp_path / "other", tmp_path / "hf") == 1
    assert "config.json cannot be read" in capsys.readouterr().err
    small("mixtral", num_local_experts=6).config.save_pretrained(tmp_path / "hf")
    assert tool("import", tmp_path / "third", tmp_path / "hf") == 1
    assert "where its configuration has [6, 32]" in capsys.readouterr().err


VALUES = (-1, 0, 10**9, 10**30, "auto", 1.5, [1], {}, True, float("nan"))
KEYS = {
    "mixtral": ("num_local_experts", "num_experts_per_tok", "num_hidden_layers", "num_attention_heads"),
    "qwen3_moe": ("num_experts", "num_experts_per_tok", "num_key_value_heads", "hidden_size", "moe_intermediate_size"),
    "deepseek_v3": ("n_routed_experts", "n_group", "topk_group", "first_k_dense_replace", "n_shared_experts"),
    "dbrx": ("n_layers", "n_heads", "d_model", "ffn_config", "attn_config"),
}


@pytest.mark.parametrize("model_type", KEYS)
def test_a_forged_configuration_is_a_sentence_in_time(model_type: str, tmp_path: Path, capsys: Any) -> None:
    small(model_type).save_pretrained(tmp_path / "hf")
    path = tmp_path / "hf" / "config.json"
    good = json.loads(path.read_text())
    for number, (key, value) in enumerate((key, value) for key in KEYS[model_type] for value in VALUES):
        path.write_text(json.dumps({**good, key: value}))
        began_s = time.monotonic()
        code = tool("import", tmp_path / str(number), tmp_path / "hf")
        printed = capsys.readouterr().err
        assert time.monotonic() - began_s < 30, (key, value)
        assert "Traceback" not in printed, (key, value, printed)
        if (key, value) not in (("attn_config", {}), ("first_k_dense_replace", True)):  # which say what holds anyway
            assert code == 1 and printed.startswith("error: ") and len(printed) < 1000, (key, value, code, printed)


@pytest.mark.parametrize("key", ["hidden_size", "num_attention_heads", "vocab_size", "n_layers", "rms_norm_eps"])
def test_a_size_that_a_model_needs_is_not_null(key: str) -> None:
    check_configuration({"model_type": "mixtral", "head_dim": None, "num_local_experts": None}, "config.json")
    with pytest.raises(ValueError, match=rf"config.json.{key} \(None\) must be a"):
        check_configuration({"model_type": "mixtral", key: None}, "config.json")


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"num_experts_per_tok": 6}, "6 of 5 experts for a token: there must be 1 to 5"),
        ({"num_attention_heads": 16, "num_key_value_heads": 16}, "16 heads would make"),
        ({"num_attention_heads": 3, "num_key_value_heads": 2}, r"must divide the 3 heads"),
        ({"num_key_value_heads": 1}, "1 heads would make"),
    ],
)
def test_heads_and_choices_that_the_tensors_cannot_have_are_refused(keys, words, tmp_path: Path, capsys: Any) -> None:
    small("mixtral").save_pretrained(tmp_path / "hf")
    path = tmp_path / "hf" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "head_dim": 8, **keys}))
    assert tool("import", tmp_path / "run", tmp_path / "hf") == 1
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("model_type", ["llama", "mixtral\x1b[2J", 3, None])
def test_an_unknown_model_type_is_said(model_type: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    small("mixtral").save_pretrained(tmp_path / "hf")
    path = tmp_path / "hf" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": model_type}))
    assert tool("import", tmp_path / "run", tmp_path / "hf") == 0
    assert "is no MoE family that is taken over" in caplog.text and "the tensors keep their names" in caplog.text
    assert "\x1b" not in caplog.text
