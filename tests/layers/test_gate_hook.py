"""`step_gates_after`: a plain loop steps gates by the optimizer's hook; what a layer's statistics print."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from foundry_moe import MoEConfig, MoELayer, Progress, batch_context, step_gates_after
from foundry_moe.layers.lookup import idle_parameters

pytestmark = pytest.mark.quick

CONFIG = MoEConfig(
    num_experts=4,
    top_k=1,
    expert_hidden_size=8,
    activation="gelu",
    gate={"name": "topk", "bias_balance": True},
    loss={"balance": 0.01},
)


def backward(layer: nn.Module, tokens: int) -> None:
    layer(torch.randn(tokens, 8)).square().mean().backward()


def test_each_step_passes_the_loads_of_all_its_microbatches_and_counts_a_batch():
    torch.manual_seed(0)
    layer = MoELayer(8, CONFIG)
    frozen = MoELayer(8, replace(CONFIG, freeze=("gate",)), context=layer.context)
    model = nn.Sequential(frozen, layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    layer.gate.after_step = lambda counts_E, progress: seen.append((int(counts_E.sum()), progress.ba))
    frozen.gate.after_step = lambda *_: pytest.fail("a frozen gate keeps its bias")
    layer.context.sum_over_ranks = lambda counts_E: 3 * counts_E
    handle = step_gates_after(optimizer, model)
    assert batch_context(layer).progress == Progress()
    for reset in (False, True, False):
        for tokens in (5, 3):
            backward(model, tokens)
        optimizer.step()
        if reset:  # as a loop that prints the loads of each step does
            layer.statistics.reset()
    assert seen == [(24, 1), (24, 2), (24, 3)]  # of three ranks
    handle.remove()
    optimizer.step()
    assert len(seen) == 3 and batch_context(layer).progress == Progress(ba=3)


def test_a_step_moves_the_bias_and_a_resumed_loop_continues_its_count():
    layer = MoELayer(8, CONFIG)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    batch_context(layer).progress = Progress(ba=7)
    step_gates_after(optimizer, layer)
    backward(layer, 3)  # of 4 experts, one has no token
    optimizer.step()
    assert layer.gate.bias_E.abs().max() > 0 and batch_context(layer).progress == Progress(ba=8)


def test_parameters_of_the_experts_that_a_token_does_not_pass_through_are_idle():
    model = nn.Sequential(MoELayer(8, CONFIG), nn.Linear(8, 8), MoELayer(8, replace(CONFIG, top_k=3)))
    assert idle_parameters(model) == (3 + 1) * 2 * 8 * 8


def test_a_model_without_experts_is_refused():
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="needs a model with MoE layers: call it after apply_dmoe"):
        step_gates_after(torch.optim.SGD(model.parameters(), lr=0.1), model)


def test_layers_with_contexts_of_their_own_are_refused_and_a_copy_is_a_model_of_its_own():
    layer = MoELayer(8, CONFIG)
    assert batch_context(nn.Linear(2, 2)) is None
    model = nn.Sequential(layer, MoELayer(8, CONFIG, context=layer.context), layer)
    copied = copy.deepcopy(model)
    assert batch_context(model) is layer.context and batch_context(copied) is copied[0].context is not layer.context
    for apart in (nn.Sequential(layer, MoELayer(8, CONFIG)), nn.ModuleList([model, copied])):
        with pytest.raises(ValueError, match=r"MoE layers have 2 contexts: build all of them with one"):
            batch_context(apart)


def test_statistics_print_loads_and_mean_losses():
    layer = MoELayer(8, CONFIG)
    assert repr(layer.statistics) == "LoadStatistics(counts=[0, 0, 0, 0], max/mean=0, balance=0)"
    layer.statistics.counts_E += torch.tensor([6, 2, 0, 0])
    layer.statistics.losses_L += 3.0
    layer.statistics.scale_1 += 2.0
    assert repr(layer.statistics) == "LoadStatistics(counts=[6, 2, 0, 0], max/mean=3, balance=1.5)"
