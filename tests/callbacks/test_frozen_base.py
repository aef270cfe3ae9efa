"""`save_frozen: false`: checkpoints hold what is trained, and a resume wants the same frozen weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from composer.optim import DecoupledAdamW

from foundry_moe.callbacks.elastic_checkpoint import ElasticCheckpoint
from foundry_moe.checkpoint import open_store
from foundry_moe.checkpoint.codec import inline_tensors
from foundry_moe.checkpoint.errors import MismatchError
from foundry_moe.checkpoint.ledger import Ledger
from foundry_moe.models import frozen_weights
from foundry_moe.models.frozen_weights import _sum, digest, frozen_names
from tests.helpers.commands import export
from tests.helpers.training import MOE, fit, mpt

pytestmark = pytest.mark.quick


def run(folder: Path, duration: str, *, add: float = 0.0, save_frozen: bool = False):
    """A model with adapters, trained to `duration`, from where the folder's newest checkpoint is."""
    model = mpt(moe={**MOE, "lora": {"r": 2, "alpha": 4}})
    with torch.no_grad():
        model.get_parameter("model.transformer.blocks.0.ffn.experts.w1_EFD")[1, 2, 3] += add
    optimizer = DecoupledAdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    callback = ElasticCheckpoint(folder=str(folder), interval="100ba", save_frozen=save_frozen)
    fit(model, optimizer=optimizer, duration=duration, callbacks=[callback], run_name="adapters")
    return model


def saved(folder: Path):
    (found,) = [choice.found for choice in [Ledger(open_store(str(folder))).choose("auto")]]
    assert found is not None
    return found.manifest


def test_a_resume_is_bit_equal_and_checkpoints_hold_no_frozen_weights(tmp_path: Path) -> None:
    run(tmp_path / "parts", "2ba")
    manifest = saved(tmp_path / "parts")
    assert manifest.info["frozen"]["tensors"] == 4
    names = {*manifest.tensors, *inline_tensors(manifest.values)}
    assert not [name for name in names if name.endswith(("w1_EFD", "w2_EDF"))]
    assert len([name for name in names if name.startswith("model.") and name.endswith("w1_A_EDL")]) == 2
    resumed, whole = run(tmp_path / "parts", "4ba"), run(tmp_path / "whole", "4ba", save_frozen=True)
    assert len(frozen_names(whole)) == 4
    for (name, ours), theirs in zip(resumed.named_parameters(), whole.parameters(), strict=True):
        assert torch.equal(ours, theirs), name


def test_another_base_is_refused(tmp_path: Path) -> None:
    run(tmp_path, "2ba")
    with pytest.raises(MismatchError, match="leaves out 4 frozen tensors"):
        run(tmp_path, "4ba", add=1e-6)


def test_a_checkpoint_with_frozen_weights_is_read_with_the_key_too(tmp_path: Path) -> None:
    first = run(tmp_path, "2ba", save_frozen=True)
    second = run(tmp_path, "3ba", add=1.0)  # overwritten by the checkpoint's
    name = "model.transformer.blocks.0.ffn.experts.w1_EFD"
    assert torch.equal(first.get_parameter(name), second.get_parameter(name))
    assert "frozen" in saved(tmp_path).info


def test_a_whole_export_names_what_is_missing(tmp_path: Path, capsys) -> None:
    run(tmp_path / "run", "1ba")
    assert export(tmp_path / "run", tmp_path / "out", "--merge") == 2
    assert "leaves out the frozen weights" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_digest_of_parts_adds_up_to_that_of_the_whole(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = torch.randn(4, 6, 5).to(dtype)
    parts = 0
    for e in range(0, 4, 2):
        for row in range(0, 6, 3):
            box = ((e, row, 0), (2, 3, 5))
            parts += _sum(whole[e : e + 2, row : row + 3], box, (4, 6, 5))
    expected = _sum(whole, ((0, 0, 0), (4, 6, 5)), (4, 6, 5))
    with monkeypatch.context() as patch:
        patch.setattr(frozen_weights, "_CHUNK", 30)  # a row at a time
        assert _sum(whole, ((0, 0, 0), (4, 6, 5)), (4, 6, 5)) % 2**64 == expected % 2**64
    assert parts % 2**64 == expected % 2**64
    other = torch.randn(4, 6, 5).to(dtype)
    assert digest({"a": whole, "b": other}) == digest({"b": other, "a": whole}) != digest({"a": other, "b": whole})
    swapped = whole.clone()
    swapped[0], swapped[1] = whole[1], whole[0]
    assert _sum(swapped, ((0, 0, 0), (4, 6, 5)), (4, 6, 5)) % 2**64 != expected % 2**64
