"""`plan` of a run with LoRA: adapters are counted, and frozen experts have neither gradient nor optimizer state."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from foundry_moe.commands.plan.planner import Machine, plan_run
from foundry_moe.commands.plan.step import GIB

pytestmark = pytest.mark.quick
ROOT = Path(__file__).parents[2]


def plan(**moe: Any) -> Any:
    run = OmegaConf.to_container(OmegaConf.load(ROOT / "yamls/pretrain/1gpu.yaml"), resolve=True)
    assert isinstance(run, dict)
    run = copy.deepcopy(run)
    run["model"]["moe"] |= moe
    return plan_run(run, Machine(gpus=1, gpus_per_node=8, gpu_bytes=80 * GIB))


def test_adapters_are_counted_and_frozen_experts_have_no_state() -> None:
    full, lora = plan(), plan(lora={"r": 8})
    shape = full.shape
    adapters = 3 * 8 * (shape.d_model + shape.expert_hidden) * shape.moe.num_experts * shape.moe_layers
    assert lora.shape.num_params == shape.num_params + adapters
    assert lora.memory["optimizer"] == 8 * (shape.dense + adapters) < full.memory["optimizer"]
    assert lora.memory["weights"] == 4 * lora.shape.num_params
    assert lora.time["experts"] < full.time["experts"]


def test_what_disable_grad_freezes_has_no_state_and_no_gradient(tmp_path: Path) -> None:
    shape = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 3, "vocab_size": 96}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "olmoe", **shape, **experts}))
    recipe = OmegaConf.to_container(OmegaConf.load(ROOT / "yamls/finetune/lora.yaml"), resolve=True)
    assert isinstance(recipe, dict)
    recipe["model"]["pretrained_model_name_or_path"] = str(tmp_path)
    recipe["algorithms"]["dmoe"] |= {"num_experts": 8, "top_k": 3}
    machine = Machine(gpus=1, gpus_per_node=8, gpu_bytes=80 * GIB)
    ours, trained = plan_run(recipe, machine), {**recipe, "optimizer": {"name": "decoupled_adamw", "lr": 1e-4}}
    adapters = 4 * 3 * 16 * (32 + 24) * 8
    assert ours.memory["optimizer"] == 8 * adapters
    assert ours.memory["weights"] == 2 * (ours.shape.num_params - adapters) + 4 * adapters
    gate = 4 * 8 * 32  # frozen by `freeze`
    # weights are bf16, so their moments are, and adapters fp32
    assert plan_run(trained, machine).memory["optimizer"] == 4 * (ours.shape.dense - gate) + 8 * adapters
    assert ours.time["products"] < plan_run(trained, machine).time["products"]
    everything = {**recipe, "optimizer": {**recipe["optimizer"], "disable_grad": [r"\.experts\."]}}
    assert plan_run(everything, machine).memory["optimizer"] == 4 * (ours.shape.dense - gate)
