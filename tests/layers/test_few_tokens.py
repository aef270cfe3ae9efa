"""Layers with 0 to 3 tokens: every gate, with and without capacity, in every shape of input."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from foundry_moe.config import MoEConfig
from foundry_moe.layers.context import BatchContext
from foundry_moe.layers.moe import MoELayer
from foundry_moe.layers.schedule import Progress
from tests.helpers.gates import GATE_IDS, GATES, WIDTH

pytestmark = pytest.mark.filterwarnings("ignore:gate expert_choice")

# of the input without D; [0] and [0, S] are what a rank without tokens has
SHAPES = [(0,), (1,), (3,), (0, 4), (2, 0), (1, 1), (1, 3), (3, 1), (2, 1, 1), (0, 1, 2)]


def build(settings, top_k: int, capacity) -> MoELayer:
    context = BatchContext()
    context.progress = Progress(ba=1, dur=0.0)
    config = MoEConfig(
        num_experts=8, top_k=top_k, gate=settings, expert_hidden_size=5, activation="swiglu", capacity=capacity,
        init_std=0.5,
    )  # fmt: skip
    layer = MoELayer(WIDTH, config, context=context, dtype=torch.float64)
    layer.reset_parameters()
    return layer


def run(layer: MoELayer, ids: Tensor | None, x: Tensor) -> list[Tensor]:
    """The output, and the gradients of the input and all parameters."""
    layer.context.set_tokens(ids, None if ids is None else torch.ones_like(ids))
    x = x.clone().requires_grad_()
    y = layer(x)
    assert y.shape == x.shape
    y.sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters() if p.grad is not None)]


@pytest.mark.parametrize("capacity", [pytest.param(None, marks=pytest.mark.quick), 1.25])
@pytest.mark.parametrize(("settings", "top_k"), GATES, ids=GATE_IDS)
def test_few_tokens_in_any_shape_are_computed_as_one_sequence(settings, top_k, capacity):
    for shape in SHAPES:
        ids = torch.arange(torch.Size(shape).numel()).view(shape) + 3
        x = torch.randn(*shape, WIDTH, dtype=torch.float64)
        for noted in (ids, None) if settings["name"] != "hash" else (ids,):
            layer = build(settings, top_k, capacity)
            if settings["name"] == "base":
                layer.eval()  # in training it needs as many tokens as experts
            found = run(layer, noted, x)
            assert all(torch.isfinite(tensor).all() for tensor in found), (shape, noted)
            if shape[:-1] in ((), (1,)):  # a sequence, with or without its dimension
                layer.zero_grad()
                expected = run(layer, None if noted is None else noted.view(1, -1), x.view(1, -1, WIDTH))
                for ours, truth in zip(found, expected, strict=True):
                    assert torch.equal(ours.view_as(truth), truth), shape
