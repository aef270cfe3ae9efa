"""LoRA from YAML keys: frozen weights stay as they were, and the optimizer has state of trained parameters alone."""

from __future__ import annotations

import pytest
import torch
import yaml
from composer.optim import DecoupledAdamW
from llmfoundry.utils.builders import build_optimizer
from safetensors.torch import save_file

from foundry_moe.algorithms.dmoe import DMoE
from foundry_moe.algorithms.gate_steps import GateSteps, add_steps_algorithm
from tests.helpers.pages import blocks
from tests.helpers.training import MOE, fit, llama, mpt

pytestmark = pytest.mark.quick
LORA = {"r": 2, "alpha": 4}


def adapters(model) -> set[str]:
    return {name for name, _ in model.named_parameters() if "_A_E" in name or "_B_E" in name}


@pytest.mark.parametrize("built", [True, False])
def test_base_experts_keep_their_bits_and_have_no_state(built):
    keys = {**MOE, "lora": LORA}
    model = mpt(moe=keys) if built else llama()
    optimizer = DecoupledAdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    base = MOE if built else {**MOE, "init": "random"}
    before = {n: p.clone() for n, p in model.named_parameters() if "w1_EFD" in n} if built else {}
    fit(model, algorithms=[] if built else [DMoE(**{**base, "lora": LORA})], optimizer=optimizer, duration="2ba")
    experts = {n: p for n, p in model.named_parameters() if ".experts." in n}
    assert adapters(model) and len(adapters(model)) == 2 * sum(not p.requires_grad for p in experts.values())
    for name, parameter in experts.items():
        trained = name in adapters(model)
        assert (parameter in optimizer.state and bool(optimizer.state[parameter])) == trained, name
        if name in before:
            assert torch.equal(parameter, before[name])
        if "_B_E" in name:
            assert parameter.any(), f"{name} was trained"


def test_the_rule_of_the_page_trains_adapters_alone():
    (rule,) = [block for block in blocks("how-to/lora.md", "yaml") if "disable_grad" in block]
    config = {
        "model": {"name": "hf_causal_lm"},
        "optimizer": {"name": "decoupled_adamw", "lr": 0.1, **yaml.safe_load(rule)["optimizer"]},
        "algorithms": {"dmoe": {**MOE, "loss": {}, "lora": LORA}},
    }
    algorithms = add_steps_algorithm(config)["algorithms"]
    model = llama()
    keys = {key: value for key, value in config["optimizer"].items() if key != "name"}
    optimizer = build_optimizer(model, "decoupled_adamw", keys)
    both = [DMoE(**algorithms["dmoe"]), GateSteps(**algorithms["dmoe_steps"])]
    fit(model, algorithms=both, optimizer=optimizer, duration="1ba")
    assert {name for name, p in model.named_parameters() if p.requires_grad} == adapters(model)


def test_checkpoints_of_a_model_with_peft_config_hold_the_experts_too():
    """Composer's state dict of such a model would have peft's tensors alone."""
    model = llama()
    model.using_peft, model.should_save_peft_only = True, True  # as with peft_config
    fit(model, algorithms=[DMoE(**{**MOE, "init": "random", "lora": LORA})], duration="1ba")
    assert not model.should_save_peft_only


def test_a_run_starts_from_a_peft_folder(tmp_path):
    factors = {
        f"base_model.model.model.layers.{layer}.mlp.experts.{e}.{matrix}_proj.lora_{factor}.weight": torch.randn(shape)
        for layer in range(2)
        for e in range(MOE["num_experts"])
        for matrix, inputs, outputs in (("gate", 32, 24), ("up", 32, 24), ("down", 24, 32))
        for factor, shape in (("A", (2, inputs)), ("B", (outputs, 2)))
    }
    save_file(factors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text('{"r": 2, "lora_alpha": 8}')
    model = llama()
    keys = {**MOE, "init": "random", "lora": {**LORA, "start": str(tmp_path)}}
    fit(model, algorithms=[DMoE(**keys)], optimizer=torch.optim.SGD(model.parameters(), lr=0.0), duration="1ba")
    (found,) = (p for n, p in model.named_parameters() if "layers.1." in n and n.endswith("w2_B_EDL"))
    theirs = factors["base_model.model.model.layers.1.mlp.experts.3.down_proj.lora_B.weight"]
    assert torch.equal(found[3], 2 * theirs), "of twice the alpha"
