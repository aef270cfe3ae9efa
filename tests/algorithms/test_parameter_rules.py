"""The optimizer's rules reach experts that are put in after it was built; a rule without a match is reported."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import yaml
from composer import Trainer
from llmfoundry.utils.builders import build_optimizer
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from foundry_moe.algorithms.dmoe import DMoE
from foundry_moe.algorithms.gate_steps import GateSteps, add_steps_algorithm
from foundry_moe.algorithms.parameter_rules import apply_rules
from tests.helpers.pages import blocks
from tests.helpers.training import MOE, llama, mpt


def train(optimizer: dict[str, Any], *, built: bool = False) -> Any:
    """The run's model and optimizer at the start of training, as LLM Foundry makes them from a YAML."""
    config: dict[str, Any] = {
        "model": {"name": "dmoe_causal_lm" if built else "hf_causal_lm"},
        "optimizer": {"name": "decoupled_adamw", "lr": 0.1, **optimizer},
        "algorithms": {} if built else {"dmoe": dict(MOE)},
    }
    algorithms = add_steps_algorithm(copy.deepcopy(config))["algorithms"]
    model = mpt() if built else llama()
    keys = copy.deepcopy(config["optimizer"])
    made = build_optimizer(model, keys.pop("name"), keys)
    kinds = [*([] if built else [DMoE(**algorithms["dmoe"])]), GateSteps(**algorithms["dmoe_steps"])]
    trainer = Trainer(model=model, optimizers=made, algorithms=kinds, device="cpu", progress_bar=False)
    return trainer.state


@pytest.mark.parametrize("pattern", ["experts", "mlp", ["w1_EFD", "w2_EDF", "v1_EFD"]])
def test_what_freezes_experts_freezes_them(pattern: Any) -> None:
    frozen = {name for name, p in train({"disable_grad": pattern}).model.named_parameters() if not p.requires_grad}
    assert frozen and all(".mlp." in name for name in frozen)
    assert sum("experts" in name for name in frozen) == 6


def test_a_group_for_experts_holds_them_and_nothing_else() -> None:
    groups = [
        {"param_str_match": "experts", "lr": 0.5, "weight_decay": 0.0},
        {"param_str_match": "mlp|norm", "lr": 0.7},
    ]
    state = train({"param_groups": groups})
    names = {id(p): name for name, p in state.model.named_parameters()}
    found = [{names[id(p)] for p in group["params"]} for group in state.optimizers[0].param_groups]
    assert [group["lr"] for group in state.optimizers[0].param_groups] == [0.1, 0.5, 0.7]
    assert found[1] == {name for name in names.values() if "experts" in name} and len(found[1]) == 6
    assert found[2] == {name for name in names.values() if ("mlp" in name or "norm" in name) and "experts" not in name}
    assert set.union(*found) == set(names.values()) and sum(map(len, found)) == len(names)


def test_the_recipe_of_a_learning_rate_for_experts_and_gate_holds_through_a_schedule() -> None:
    (recipe,) = [block for block in blocks("how-to/recipes.md", "yaml") if "param_groups" in block]
    keys = yaml.safe_load(recipe)["optimizer"]
    state = train(keys, built=True)
    optimizer = state.optimizers[0]
    names = {id(p): name for name, p in state.model.named_parameters()}
    for group, word in zip(optimizer.param_groups[1:], ("experts.", "gate."), strict=True):
        assert group["params"] and all(word in names[id(p)] for p in group["params"])
    optimizer.step()
    schedule = LambdaLR(optimizer, lambda step: 0.5**step)
    schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([5e-4, 2.5e-4, 1e-3])


@pytest.mark.parametrize("built", [False, True])
@pytest.mark.parametrize(
    ("rules", "sentence"),
    [
        ({"disable_grad": "expertz"}, r"disable_grad \(expertz\) matches no parameter; did you mean 'experts'"),
        ({"param_groups": [{"param_str_match": "nrom", "lr": 1.0}]}, r"param_groups \(nrom\) matches no .*norm"),
    ],
)
def test_a_rule_that_matches_nothing_is_an_error_with_near_names(built: bool, rules: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        train(rules, built=built)


def test_a_model_built_with_experts_keeps_llm_foundrys_groups() -> None:
    state = train({"param_groups": [{"param_str_match": "experts", "lr": 0.5}]}, built=True)
    assert len(state.optimizers[0].param_groups[1]["params"]) == sum(
        "experts" in name for name, _ in state.model.named_parameters()
    )


def test_a_run_that_loads_nothing_says_so_to_the_algorithm() -> None:
    run = {"model": {"name": "hf_causal_lm", "pretrained": False}, "algorithms": {"dmoe": dict(MOE)}}
    assert GateSteps(**add_steps_algorithm(run)["algorithms"]["dmoe_steps"]).facts.weights_loaded is False
    run["model"] = {"name": "hf_causal_lm"}
    run["algorithms"] = {"dmoe": dict(MOE)}
    assert GateSteps(**add_steps_algorithm(run)["algorithms"]["dmoe_steps"]).facts.weights_loaded is None
    assert run["algorithms"]["dmoe"] == MOE, "the user's mapping has the user's keys alone"


@pytest.mark.quick
def test_the_first_of_two_rules_that_match_counts() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    groups = [{"params": list(model.parameters())}, {"params": []}, {"params": []}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    apply_rules(model, [optimizer], {"param_groups": ["weight", "0"]})
    name_of = {parameter: name for name, parameter in model.named_parameters()}
    found = [[name_of[parameter] for parameter in group["params"]] for group in optimizer.param_groups]
    assert found == [["1.bias"], ["0.weight", "1.weight"], ["0.bias"]]
