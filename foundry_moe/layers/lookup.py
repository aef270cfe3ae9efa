"""Finds the MoE layers of a model, and the context that they share."""

from __future__ import annotations

from torch import nn

from foundry_moe.layers.context import BatchContext
from foundry_moe.layers.moe import MoELayer


def named_moe_layers(model: nn.Module) -> dict[str, MoELayer]:
    """The model's MoE layers by name, in order."""
    return {name: module for name, module in model.named_modules() if isinstance(module, MoELayer)}


def moe_layers(model: nn.Module) -> list[MoELayer]:
    """The model's MoE layers, in order."""
    return list(named_moe_layers(model).values())


def batch_context(model: nn.Module) -> BatchContext | None:
    """The context that the model's MoE layers share; None where it has no such layer."""
    layers = moe_layers(model)
    return layers[0].context if layers else None
