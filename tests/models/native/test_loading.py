"""`load_state_dict` of converted models takes what `save_pretrained` wrote, as Hugging Face's Trainer reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.modeling_utils import load_sharded_checkpoint

from foundry_moe import MoEConfig, apply_dmoe
from tests.helpers.exporting import MODEL_KINDS, Wrapped, mpt, of_hugging_face
from tests.helpers.families import small

ROWS = [
    {"input_ids": ids, "labels": ids}
    for ids in torch.randint(0, 60, (8, 9), generator=torch.Generator().manual_seed(3))
]


def converted() -> nn.Module:
    model = small("mixtral")
    apply_dmoe(model, MoEConfig(num_experts=5, top_k=2, loss={}))
    return model


def scrambled(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            if tensor.is_floating_point():
                tensor.uniform_(-1, 1)
    return model


def assert_same(model: nn.Module, state: dict[str, torch.Tensor]) -> None:
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[name]), name


def trainer(folder: Path, **keys: Any) -> Trainer:
    settings: dict[str, Any] = {
        **{"per_device_train_batch_size": 2, "learning_rate": 1e-2, "save_steps": 1, "save_strategy": "steps"},
        **{"report_to": [], "use_cpu": True, "disable_tqdm": True, "max_steps": 3, "seed": 1},
    }
    arguments = TrainingArguments(output_dir=str(folder), **{**settings, **keys})
    return Trainer(model=converted(), args=arguments, train_dataset=ROWS, eval_dataset=ROWS)  # type: ignore[arg-type]


def test_trainer_resumes_with_the_weights_that_it_saved(tmp_path: Path) -> None:
    undisturbed = trainer(tmp_path)
    undisturbed.train()
    resumed = trainer(tmp_path)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_same(resumed.model, undisturbed.model.state_dict())


def test_trainer_ends_with_its_best_model(tmp_path: Path) -> None:
    best = trainer(
        tmp_path,
        **{"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 1},
        **{"metric_for_best_model": "eval_loss", "greater_is_better": True},  # so that it is not the last
    )
    best.train()
    step = Path(str(best.state.best_model_checkpoint)).name
    assert step == "checkpoint-1"
    saved = converted()
    saved.load_state_dict(load_file(tmp_path / step / "model.safetensors"))
    assert best.evaluate()["eval_loss"] == best.state.best_metric
    assert_same(best.model, saved.state_dict())


@pytest.mark.parametrize("kind", MODEL_KINDS)
def test_files_of_a_family_are_loaded_part_by_part(kind: str, tmp_path: Path) -> None:
    model: Any = of_hugging_face(kind)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.save_pretrained(tmp_path, max_shard_size="6kB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    load_sharded_checkpoint(scrambled(model), str(tmp_path), strict=False)
    assert_same(model, state)


@pytest.mark.quick
def test_strict_names_and_a_wrapper_of_the_model_work_too() -> None:
    theirs = small("deepseek_v3").state_dict()
    model = Wrapped(of_hugging_face("deepseek_v3"))
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    scrambled(model).load_state_dict({f"model.{name}": tensor for name, tensor in theirs.items()})
    assert_same(model, state)
    expert = "model.layers.1.mlp.experts.3.up_proj.weight"
    del theirs[expert]
    with pytest.raises(RuntimeError, match=f"Missing key.*{expert}"):
        model.model.load_state_dict(theirs)
    assert model.model.load_state_dict(theirs, strict=False).missing_keys == [expert]


def test_an_mpt_takes_back_what_leaves_as_mixtral(tmp_path: Path) -> None:
    model = mpt().model
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.save_pretrained(tmp_path)
    scrambled(model).load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert_same(model, state)


def test_experts_that_have_no_place_are_an_error_without_strict_names() -> None:
    others = small("mixtral", num_local_experts=6).state_dict()
    with pytest.raises(RuntimeError, match=r"experts\.5\.w1\.weight and 8 more tensors have no place.*"):
        converted().load_state_dict(others, strict=False)
    wide = small("mixtral", intermediate_size=40).state_dict()
    with pytest.raises(RuntimeError, match=r"size mismatch for .*w1.weight: \(40, 32\), and the model has \(44, 32\)"):
        converted().load_state_dict(wide, strict=False)
    refused = mpt(moe={"gate": {"name": "ktop1"}}).model
    with pytest.raises(RuntimeError, match=r"no place in the model's dMoE layers: gate.name \(ktop1\)"):
        refused.load_state_dict({"transformer.blocks.0.ffn.up_proj.weight": torch.zeros(3)}, strict=False)
