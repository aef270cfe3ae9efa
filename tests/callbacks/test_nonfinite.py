"""Nonfinite values are reported with the batch and the layer where they began."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from foundry_moe.callbacks.nonfinite import Finding, FiniteWatch, describe

ORDER = ["0.weight", "0.bias", "2.weight", "2.bias"]


class Poison(nn.Module):
    """The identity, whose backward pass is infinite while `on`."""

    def __init__(self) -> None:
        super().__init__()
        self.on = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.on and x.requires_grad:
            x.register_hook(lambda gradient: gradient * float("inf"))
        return x


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), Poison(), nn.Linear(4, 2))


def train(network: nn.Sequential, x: torch.Tensor, *, microbatches: int = 2, batch: int = 7, auto: bool = False) -> Any:
    """One batch as Composer runs it, with clipping before `after_batch`; returns what the watch read."""
    watch = FiniteWatch(list(network.named_parameters()))
    watch.before_batch(batch, 0 if auto else microbatches)
    network.zero_grad()
    for part in x.chunk(microbatches):
        loss = network(part).square().mean()
        watch.after_loss({"total": loss, "other": torch.tensor(float("nan"))})
        loss.backward()
        watch.after_backward()
    nn.utils.clip_grad_norm_(network.parameters(), 1.0)
    watch.after_batch()
    found = watch.read()
    assert watch.read() is None, "each batch is read once"
    return found


X = torch.randn(4, 3)


def test_a_good_batch_is_finite() -> None:
    assert train(model(), X) == Finding(batch=7)


def test_bad_weights_are_named_though_all_gradients_are_bad_then() -> None:
    network = model()
    with torch.no_grad():
        network[2].weight[0, 0] = float("nan")
    found = train(network, X)
    assert found.weights == ["2.weight"] and found.loss and len(found.gradients) == 4
    batch, where = describe([Finding(batch=7), found], ORDER)
    assert describe([Finding(batch=0), found], ORDER)[0] == 7, "a rank without a finding has batch 0"
    assert batch == 7 and where == "the weights were not finite before it, first in 2.weight"


def test_a_backward_pass_that_overflows_is_named_before_clipping_spreads_it() -> None:
    network = model()
    network[1].on = True
    found = train(network, X)
    assert not found.loss and not found.weights and found.gradients == ["0.weight", "0.bias"]
    assert "overflowed first in 0.bias (2 parameters in all)" in describe([found], ORDER)[1]


@pytest.mark.parametrize("microbatches", [1, 2])
def test_bad_data_in_one_microbatch_are_the_loss_s(microbatches) -> None:
    x = X.clone()
    x[0, 0] = float("inf")
    found = train(model(), x, microbatches=microbatches, auto=microbatches == 1)
    assert found.loss and not found.weights
    assert "the loss on rank 1 was not finite, though all weights were" in describe([Finding(batch=7), found], ORDER)[1]
