"""All MoE layers of a model: how to find them and the context they share, and the step of their gates.

Independent of trainers and ranks: sums over ranks come from the context.

Shapes: E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from foundry_moe.layers.context import BatchContext
from foundry_moe.layers.moe import MoELayer
from foundry_moe.layers.schedule import Progress
from foundry_moe.schema import UserError


def named_moe_layers(model: nn.Module) -> dict[str, MoELayer]:
    """The model's MoE layers by name, in order."""
    return {name: module for name, module in model.named_modules() if isinstance(module, MoELayer)}


def moe_layers(model: nn.Module) -> list[MoELayer]:
    """The model's MoE layers, in order."""
    return list(named_moe_layers(model).values())


def batch_context(model: nn.Module) -> BatchContext | None:
    """The context that the model's MoE layers share; None where it has no such layer.

    Raises:
        ValueError: the layers have several contexts.
    """
    contexts = {layer.context for layer in moe_layers(model)}
    if len(contexts) > 1:
        raise UserError(
            f"the model's MoE layers have {len(contexts)} contexts: build all of them with one, "
            "MoELayer(..., context=context)"
        )
    return next(iter(contexts), None)


def idle_parameters(model: nn.Module) -> int:
    """Parameters of experts that a token does not pass through: of a layer's experts, all but `top_k`."""
    return sum(
        sum(parameter.numel() for parameter in layer.experts.parameters())
        // layer.num_experts
        * (layer.num_experts - layer.config.top_k)
        for layer in moe_layers(model)
    )


def loads_so_far(layers: Sequence[MoELayer]) -> list[Tensor]:
    """The loads counted so far, for `step_gates`; call it before the first microbatch of a step."""
    return [layer.statistics.counts_E.clone() for layer in layers if layer.uses_loads]


def step_gates(layers: Sequence[MoELayer], before: Sequence[Tensor], progress: Progress) -> None:
    """Calls `after_step` with the loads of the step, over all microbatches and ranks. One reduction for all layers.

    Args:
        before: from `loads_so_far`.
    """
    layers = [layer for layer in layers if layer.uses_loads]
    if not layers:
        return
    counts = [
        layer.statistics.counts_E - earlier_E.to(layer.statistics.counts_E.device)
        for layer, earlier_E in zip(layers, before, strict=True)
    ]
    context = layers[0].context
    context.check_ranks(f"gate {layers[0].config.gate['name']}")
    summed = context.sum_over_ranks(torch.cat(counts))
    for layer, counts_E in zip(layers, summed.split([len(c) for c in counts]), strict=True):
        layer.after_step(counts_E, progress)


def step_gates_after(optimizer: torch.optim.Optimizer, model: nn.Module) -> RemovableHandle:
    """Steps the gates after each `optimizer.step()`, with the loads since the previous one, and advances the progress.

    `batch_context(model).progress` starts at 0 if it is not set, and gets one more batch per step. Where schedules use
    other units than batches, the loop sets it before each step. Call this after a checkpoint is loaded, for which torch
    steps a new optimizer once.

    Returns:
        A handle whose `remove()` ends this.

    Raises:
        ValueError: the model has no MoE layers.
    """
    layers, context = moe_layers(model), batch_context(model)
    if context is None:
        raise UserError("step_gates_after needs a model with MoE layers: call it after apply_dmoe")
    context.progress = context.progress or Progress()
    layers = [layer for layer in layers if layer.uses_loads]
    for layer in layers:
        layer.statistics.stepped_E = layer.statistics.counts_E.clone()

    def after_step(*_: object) -> None:
        progress = context.progress or Progress()
        context.progress = replace(progress, ba=progress.ba + 1)
        step_gates(layers, [layer.statistics.stepped_E for layer in layers], context.progress)
        for layer in layers:
            layer.statistics.stepped_E = layer.statistics.counts_E.clone()

    return optimizer.register_step_post_hook(after_step)
