"""Adds auxiliary losses to a layer's graph and counts its loads, exactly once per microbatch.

Both happen in the backward pass of an identity on the layer's output: it runs once per microbatch, also
where activation checkpointing recomputes. Independent of gates, experts and trainers.

Shapes: T tokens, D model width, E experts, L auxiliary losses.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foundry_moe.ops.operators import define, refuse_second_derivatives


class LoadStatistics:
    """Loads and losses of a layer, summed over the microbatches since `reset`.

    Plain tensors, not buffers: DDP would overwrite them with rank 0's.

    counts_E: int64, choices per expert of the real tokens of this process.
    losses_L: fp32, sums of the auxiliary losses in the order of `names`, each times its microbatch's scale in the
        gradient; not times its weight in the config.
    scale_1: fp32, sum of these scales: `losses_L / scale_1` is the mean over real tokens.
    """

    def __init__(self, num_experts: int, names: list[str]) -> None:
        self.names = names
        self.counts_E = torch.zeros(num_experts, dtype=torch.int64)
        self.losses_L = torch.zeros(len(names))
        self.scale_1 = torch.zeros(1)
        self.stepped_E = torch.zeros_like(self.counts_E)  # `counts_E` at the last step of the gates

    def __repr__(self) -> str:
        """Choices per expert, the fullest expert's over the mean, and mean losses. Reads the device."""
        counts_E = self.counts_E.double()
        over_mean = (counts_E.max() / counts_E.mean().clamp(min=1 / len(counts_E))).item()
        means_L = self.losses_L / self.scale_1.clamp(min=torch.finfo(torch.float32).tiny)
        figures = [f"counts={self.counts_E.tolist()}", f"max/mean={over_mean:.3g}"]
        figures += [f"{name}={mean:.4g}" for name, mean in zip(self.names, means_L.tolist(), strict=True)]
        return f"LoadStatistics({', '.join(figures)})"

    @torch.compiler.disable  # a graph whose backward pass writes to tensors that it made does not compile
    def move_to(self, device: torch.device) -> None:
        """Moves the sums to the layer's device, once."""
        if self.counts_E.device != device:
            self.counts_E, self.losses_L, self.scale_1 = (
                # a layer that was made on the meta device has counted nothing
                torch.zeros_like(tensor, device=device) if tensor.is_meta else tensor.to(device)
                for tensor in self.sums
            )

    def reset(self) -> None:
        for tensor in (*self.sums, self.stepped_E):
            tensor.zero_()

    @property
    def sums(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.counts_E, self.losses_L, self.scale_1


def _add_load(sum_E: Tensor, sum_L: Tensor, sum_1: Tensor, counts_E: Tensor, losses_L: Tensor, scale: Tensor) -> None:
    """Adds one microbatch to the sums."""
    # `.data`: the sums are saved for this backward pass, whose version check must not see the change
    sum_E.data.add_(counts_E)
    sum_L.data.addcmul_(losses_L, scale.to(losses_L.dtype))
    sum_1.data.add_(scale)


def _scale_now(scale: Tensor, gradient: Tensor, like: Tensor) -> Tensor:
    """The current scale, in `like`'s dtype. The gradient is not used, but makes this depend on the backward pass: a
    compiled graph may move other operations to its forward pass, where the scale is that of the previous microbatch.
    """
    return scale.to(like.dtype, copy=True)


# operators, so that a compiled backward pass may have a side effect, and reads the scale when it runs
_note_load = define("note_load", _add_load, lambda *_: None, mutates=("sum_E", "sum_L", "sum_1"))
_read_scale = define("read_scale", _scale_now, lambda scale, _, like: torch.empty_like(scale, dtype=like.dtype))


class _AttachLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        y_TD: Tensor,
        loss: Tensor,
        losses_L: Tensor,
        counts_E: Tensor,
        scale: Tensor,
        *sums: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(losses_L, counts_E, loss.detach())
        ctx.scale, ctx.sums = scale, sums
        # torch.compile rebuilds an output that aliases an input outside the graph, which would drop this backward pass
        return y_TD.clone() if torch.compiler.is_compiling() else y_TD.view_as(y_TD)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives(grads[0])
        losses_L, counts_E, loss = ctx.saved_tensors
        scale = _read_scale(ctx.scale, grads[0], loss)
        _note_load(*ctx.sums, counts_E, losses_L, scale)
        return grads[0], scale, None, None, None, None, None, None


def attach(
    y_TD: Tensor, loss: Tensor, losses_L: Tensor, counts_E: Tensor, scale: Tensor, statistics: LoadStatistics
) -> Tensor:
    """`y_TD` unchanged; its backward pass sets the gradient of `loss` to `scale` and adds to the statistics.

    Args:
        loss: weighted sum of auxiliary losses, a scalar.
        losses_L: their unweighted values, detached, fp32.
        counts_E: choices per expert, int64.
        scale: the trainer's factor of this microbatch (`BatchContext.loss_scale`), read in the backward pass.
    """
    if statistics.counts_E.device != y_TD.device:
        statistics.move_to(y_TD.device)
    return _AttachLoss.apply(y_TD, loss, losses_L, counts_E, scale, *statistics.sums)
