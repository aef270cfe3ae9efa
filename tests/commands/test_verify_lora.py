"""`verify` compares layers with LoRA adapters with their formula, W + scale B A."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from foundry_moe import MoEConfig, MoELayer
from foundry_moe.commands.verify.formula import Capture

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_outputs_and_gradients_of_adapters_equal_the_formula(activation: str) -> None:
    torch.manual_seed(0)
    lora = {"r": 3, "alpha": 5, "rslora": True}
    config = MoEConfig(num_experts=4, expert_hidden_size=12, activation=activation, init_std=0.4, loss={}, lora=lora)
    layer = MoELayer(8, config, dtype=torch.float64)
    with torch.no_grad():
        for name, parameter in layer.experts.named_parameters():
            if "_B_E" in name:
                parameter.copy_(torch.randn_like(parameter))
    capture = Capture(nn.ModuleDict({"layer": layer}))
    layer(torch.randn(2, 9, 8, dtype=torch.float64, requires_grad=True)).sin().sum().backward()
    (found,) = capture.finish().values()
    assert found["output"] < 1e-12
    ours = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    assert found["main"].keys() == ours.keys() and any("_A_E" in name for name in ours)
    for name, gradient in ours.items():
        torch.testing.assert_close(gradient, found["main"][name])
