"""`foundry-moe checkpoints import` of a Hugging Face folder: the names and layouts of a run that takes it over."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from foundry_moe import MoEConfig, apply_dmoe
from foundry_moe.checkpoint.ledger import Ledger
from foundry_moe.checkpoint.stores import open_store
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
    assert "where its configuration says [6, 32]" in capsys.readouterr().err
