"""The smallest model that Composer trains."""

from __future__ import annotations

from typing import Any

import torch
from composer import ComposerModel
from torch import nn


class Line(ComposerModel):
    """A linear layer, fitted to zero."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        return self.last(self.first(batch["x"]))

    def loss(self, outputs: torch.Tensor, batch: dict[str, Any]) -> torch.Tensor:
        return outputs.square().mean()
