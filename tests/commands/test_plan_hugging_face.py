"""`foundry-moe plan` of Hugging Face models, dense ones and MoE families, from a folder with a configuration alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from foundry_moe import flops_per_token, num_active_params
from foundry_moe.commands.plan.planner import Machine, plan_run, search_meshes
from foundry_moe.commands.plan.shape import read_shape
from foundry_moe.config import MoEConfig
from foundry_moe.layers.lookup import moe_layers
from foundry_moe.models.conversion import apply_dmoe
from foundry_moe.models.families import family_of
from foundry_moe.schema import from_mapping
from tests.helpers.families import MODEL_TYPES, small

ROOT = Path(__file__).parents[2]
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
}
EXPERTS = {"num_experts": 4, "top_k": 2, "shared_expert_hidden_size": 24}
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # weights that are loaded, and so copied, biases among them
    "gpt2": ({"n_inner": 48, "tie_word_embeddings": False}, {"num_experts": 4, "top_k": 2, "init": "upcycle"}),
    "llama": ({"intermediate_size": 48}, {**EXPERTS, "layers": {"every": 2}}),
    "qwen3": ({"intermediate_size": 40, "head_dim": 16}, {**EXPERTS, "gate": {"name": "hash"}, "top_k": 1}),
    "mixtral": ({"intermediate_size": 48, "num_local_experts": 4}, {"num_experts": 4, "top_k": 2}),
    "olmoe": ({"intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 3}, {"num_experts": 8, "top_k": 3}),
    "qwen3_moe": (
        {"intermediate_size": 40, "moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}
        | {"mlp_only_layers": [0, 2], "head_dim": 16, "tie_word_embeddings": True},
        {"num_experts": 4, "top_k": 2},
    ),
}


def folder_of(kind: str, tmp_path: Path) -> Path:
    """A folder with a configuration and nothing else."""
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": kind, "vocab_size": 96, **SIZES, **FAMILIES[kind][0]})
    )
    return tmp_path


def run_of(folder: Path, experts: dict[str, Any], **model: Any) -> dict[str, Any]:
    return {
        "model": {"name": "hf_causal_lm", "pretrained_model_name_or_path": str(folder), **model},
        "algorithms": {"dmoe": {**experts, "mesh": {"expert": 2}}},
        "fsdp_config": {},
        "max_seq_len": 16,
        "global_train_batch_size": 8,
        "device_train_microbatch_size": 2,
    }


@pytest.mark.parametrize("kind", FAMILIES)
def test_parameters_are_those_of_the_model_that_training_makes(kind: str, tmp_path: Path) -> None:
    run = run_of(folder_of(kind, tmp_path), FAMILIES[kind][1])
    experts = from_mapping(MoEConfig, FAMILIES[kind][1], "algorithms.dmoe")
    shape = read_shape(run)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    apply_dmoe(model, experts, loaded=False)
    assert shape.num_params == sum(parameter.numel() for parameter in model.parameters())
    assert num_active_params(model) == num_active_params(run)
    assert flops_per_token(model, 32) == flops_per_token(run, 32)
    layers = moe_layers(model)
    assert shape.experts == sum(p.numel() for layer in layers for p in layer.experts.parameters())
    assert (shape.layers, shape.moe_layers) == (4, len(layers)) and len(layers) == (
        4 if kind == "olmoe" else len(layers)
    )
    assert 0 < shape.num_active_params < shape.num_params and (shape.looked_up == 0) == (kind == "qwen3_moe")


@pytest.mark.parametrize("kind", MODEL_TYPES)
def test_every_moe_family_is_planned_from_its_configuration_alone(kind: str, tmp_path: Path) -> None:
    model = small(kind)
    model.config.save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.iterdir() if "generation" not in path.name] == ["config.json"]
    blocks = family_of(model.config.model_type).read(model.config)
    run = run_of(tmp_path, {"num_experts": blocks.num_experts, "top_k": blocks.top_k})
    run["algorithms"]["dmoe"]["mesh"] = {"expert": 1}
    plan = plan_run(run, Machine(gpus=2, gpus_per_node=2, gpu_bytes=80e9))
    shape = plan.shape
    layers = apply_dmoe(model, MoEConfig(num_experts=blocks.num_experts, top_k=blocks.top_k))
    assert shape.num_params == sum(parameter.numel() for parameter in model.parameters())
    assert shape.experts == sum(p.numel() for layer in layers for p in layer.experts.parameters())
    assert shape.moe_layers == len(blocks.layers) and plan.step_s > 0
    # four heads of 8; DeepSeek's keys and values have as many, the others' two
    assert (shape.query_width, shape.key_width) == (32, 32 if kind == "deepseek_v3" else 16)


def test_an_upcycled_dense_model_is_planned_with_every_mesh(tmp_path: Path) -> None:
    run = run_of(folder_of("llama", tmp_path), {"num_experts": 4, "top_k": 2, "init": "upcycle"}, pretrained=True)
    run["max_duration"] = "10ba"
    plans, invalid = search_meshes(run, Machine(gpus=4, gpus_per_node=4, gpu_bytes=80e9))
    assert len(plans) == 6 and not invalid and plans[0].fits


def test_plan_of_a_local_folder_takes_overrides_after_gpus(tmp_path: Path) -> None:
    """As a user types it, with a whole run's YAML; nothing but the configuration is there."""
    folder = folder_of("llama", tmp_path)
    run = ["yamls/pretrain/1gpu.yaml", "--gpus", "4", "--gpus-per-node", "4"]
    model = f"model={{name: hf_causal_lm, pretrained: false, pretrained_model_name_or_path: {folder}}}"
    experts = "algorithms.dmoe={num_experts: 4, mesh: {expert: 4}}"
    done = subprocess.run(
        [sys.executable, "-m", "foundry_moe.cli", "plan", *run, model, experts, "global_train_batch_size=8"],
        cwd=ROOT,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "replicate 1 x shard 1 x expert 4 = 4 GPUs" in done.stdout and "(4 of 4 layers)" in done.stdout


def test_config_overrides_count(tmp_path: Path) -> None:
    folder, experts = folder_of("llama", tmp_path), FAMILIES["llama"][1]
    plan = plan_run(
        run_of(folder, experts, config_overrides={"num_hidden_layers": 6}),
        Machine(gpus=2, gpus_per_node=2, gpu_bytes=80e9),
    )
    assert plan.shape.layers == 6 and plan.shape.moe_layers == 3 and plan.shape.key_width == 16
    assert {message.name for message in plan.messages} > {"all-gather dense", "all-to-all tokens (flat)"}


@pytest.mark.parametrize(
    ("model", "experts", "sentence"),
    [
        ({"pretrained_model_name_or_path": "/not/there"}, {}, r"\(/not/there\): its configuration cannot be read"),
        ({"pretrained_model_name_or_path": 3}, {}, r"pretrained_model_name_or_path \(3\) must name a folder"),
        ({}, {"num_experts": 8}, r"num_experts \(8\): .* is an MoE block already, with 4"),
        ({}, {"layers": (0, 9)}, r"layers \(\[0, 9\]\): the model has 4, so use 0 to 3"),
    ],
)
def test_what_cannot_be_planned_is_one_sentence(model, experts, sentence: str, tmp_path: Path) -> None:
    run = run_of(folder_of("mixtral", tmp_path), {**FAMILIES["mixtral"][1], **experts}, **model)
    with pytest.raises(ValueError, match=sentence):
        plan_run(run, Machine(gpus=2, gpus_per_node=2, gpu_bytes=80e9))
