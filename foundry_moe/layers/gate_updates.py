"""What happens to gates and to copies of hot experts once per optimizer step.

Knows no trainer and no rank: sums come from the batch's context.

Shapes: E experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foundry_moe.layers.moe import MoELayer
from foundry_moe.layers.schedule import Progress


def note_loads(layers: Sequence[MoELayer]) -> list[Tensor]:
    """The loads counted so far, for `step_gates`; call it before the first microbatch of a step."""
    return [layer.statistics.counts_E.clone() for layer in layers if layer.learns_from_loads]


def step_gates(layers: Sequence[MoELayer], before: Sequence[Tensor], progress: Progress) -> None:
    """Gives the layers that learn from loads those of the step, over all microbatches and ranks. One reduction.

    Args:
        before: from `note_loads`.
    """
    layers = [layer for layer in layers if layer.learns_from_loads]
    if not layers:
        return
    counts = [
        layer.statistics.counts_E - earlier_E.to(layer.statistics.counts_E.device)
        for layer, earlier_E in zip(layers, before, strict=True)
    ]
    summed = layers[0].context.sum_over_ranks(torch.cat(counts))
    for layer, counts_E in zip(layers, summed.split([len(c) for c in counts]), strict=True):
        layer.after_step(counts_E, progress)
