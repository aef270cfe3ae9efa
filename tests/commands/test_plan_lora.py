"""`plan` of a run with LoRA: adapters are counted, and frozen experts have neither gradient nor optimizer state."""

from __future__ import annotations

import copy
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
    assert lora.shape.total == shape.total + adapters
    assert lora.memory["optimizer"] == 8 * (shape.dense + adapters) < full.memory["optimizer"]
    assert lora.memory["weights"] == 4 * lora.shape.total
    assert lora.time["experts"] < full.time["experts"]
