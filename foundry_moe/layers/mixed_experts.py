"""Experts of different widths: their weights side by side, and what they compute. Knows no gate and no rank.

Shapes: Q rows received, K choices, D model width, F one expert's width, H widths of all experts added up.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from foundry_moe.layers.dispatch import Dispatched, Dispatcher
from foundry_moe.layers.experts import ExpertsBase
from foundry_moe.layers.init import normal_matrix, residual_std
from foundry_moe.ops import PermutePlan, expert_mlp


class MixedExperts(ExpertsBase):
    """MLPs or GLUs: w1_HD, v1_HD (None for an MLP) and w2_HD, whose row j is what hidden unit j adds to the output.

    Args:
        widths: of each expert, in order; their rows lie in this order.
        Others as those of `ExpertsBase`.

    `held`: the experts whose rows this process has: all, or what placement on a mesh sets here.
    """

    def __init__(
        self,
        *,
        widths: tuple[int, ...],
        d_model: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        self.widths = widths
        self.held = range(len(widths))
        shape = (sum(widths), d_model)
        self.w1_HD = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.v1_HD = nn.Parameter(torch.empty(shape, device=device, dtype=dtype)) if self.gated else None
        self.w2_HD = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

    def rows_of(self, experts: range) -> range:
        """The rows of consecutive experts."""
        ends = [0, *accumulate(self.widths)]
        return range(ends[experts.start], ends[experts.stop])

    def initial(self, name: str, expert: int, *, seed: int, layer: int, device: torch.device) -> Tensor:
        """The initial fp32 rows [F, D] of one expert: the numbers that `Experts` of one width F draw for it."""
        width, d_model = self.widths[expert], self.w1_HD.shape[1]
        if name == "w2_HD":
            std = residual_std(self.init_std, self.num_layers)
            shape = (d_model, width)
            return normal_matrix(shape, std, seed=seed, layer=layer, name="w2_EDF", expert=expert, device=device).T
        stream = name.replace("_HD", "_EFD")
        return normal_matrix(
            (width, d_model), self.init_std, seed=seed, layer=layer, name=stream, expert=expert, device=device
        )

    @torch.no_grad()
    def draw_(self, name: str, local: Tensor, rows: range, columns: range, *, seed: int, layer: int) -> None:
        """Fills `local` with the initial values of these rows and columns of the parameter `name`."""
        ends = [0, *accumulate(self.widths)]
        for expert, (start, stop) in enumerate(pairwise(ends)):
            first, last = max(start, rows.start), min(stop, rows.stop)
            if first < last:
                whole_FD = self.initial(name, expert, seed=seed, layer=layer, device=local.device)
                part = whole_FD[first - start : last - start, columns.start : columns.stop]
                local[first - rows.start : last - rows.start].copy_(part)

    def reset_parameters(self, *, seed: int, layer: int) -> None:
        """Draws all experts. For parameters that are whole on this process."""
        for name, parameter in self.named_parameters():
            rows, columns = (range(size) for size in parameter.shape)
            self.draw_(name, parameter, rows, columns, seed=seed, layer=layer)

    def forward(self, rows: Dispatched, dispatcher: Dispatcher) -> Dispatched:
        """See `run`."""
        parameters = tuple(
            None if parameter is None else self.local(parameter) for parameter in (self.w1_HD, self.v1_HD, self.w2_HD)
        )
        return self.run(rows, dispatcher, self._compute, parameters)

    def _compute(self, x_QD: Tensor, weights_QK: Tensor | None, plan: PermutePlan, *parameters: Any) -> Tensor:
        return expert_mlp(
            x_QD,
            weights_QK,
            plan,
            *parameters,
            widths=self.widths[self.held.start : self.held.stop],
            activation=self.activation,
            backend=self.backend,
            memory=self.memory,
        )
