"""Detects losses, gradients and weights that are not finite, and names the first layer that had them.

`FiniteWatch` checks one rank's part of each batch on the device and reads the flags a batch later, so that no step
waits for the device. `describe` names the place from the findings of all ranks. This module must not import Composer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from foundry_moe.ops.finite import NonfiniteSearch
from foundry_moe.parallel.gradients import local_part
from foundry_moe.schema import name_ranks, plain_name


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Which values were not finite on one rank in one batch; names of parameters in the model's order.

    batch: its number, from 1.
    weights: not finite before the batch; checked only if the loss or a gradient is bad on this rank.
    gradients: not finite after the backward pass. Both lists are of this rank's shards.
    """

    batch: int
    loss: bool = False
    weights: list[str] = field(default_factory=list)
    gradients: list[str] = field(default_factory=list)

    @property
    def finite(self) -> bool:
        return not (self.loss or self.weights or self.gradients)


class FiniteWatch:
    """One rank's check of each batch: `before_batch`; `after_loss` and `after_backward` for each microbatch;
    `after_batch`. `read` at any time.

    Reading all weights and gradients of OLMoE's shape took 2 to 3% of a step on an H200. Therefore the kernel that
    reads the weights returns at once unless the loss or a gradient is bad (a bad weight that was used makes them so),
    and of each gradient only the lines that `NonfiniteSearch` names are read.

    Args:
        parameters: the model's, listed once: walking the modules in each batch would cost a millisecond.
        gradients: whether they are checked; not under an fp16 scaler, which tries scales until none overflows.
    """

    def __init__(self, parameters: Sequence[tuple[str, Tensor]], *, gradients: bool = True) -> None:
        self._parameters = [(name, p) for name, p in parameters if p.is_floating_point()]
        self._gradients = gradients
        self._search_weights, self._search_gradients = NonfiniteSearch(lines=False), NonfiniteSearch(lines=True)
        self._loss: Tensor | None = None  # the sum over microbatches: finite only if all are
        self._flags: Tensor | None = None  # uint8: loss, each weight, each gradient; on the loss's device
        self._names_after: list[str] = []  # of the gradients that were checked
        self._batch = 0
        self._remaining = 0
        self._unread: tuple[int, list[str], Tensor, torch.cuda.Event | None] | None = None

    def before_batch(self, batch: int, microbatches: int) -> None:
        """Starts the batch of this number, from 1. `microbatches`: how many it has; 0 = not known before."""
        self._loss, self._flags = None, None
        self._batch, self._remaining = batch, microbatches

    def after_loss(self, loss: Any) -> None:
        """A microbatch's loss: a tensor, or several in a list or by name."""
        for part in _losses(loss):
            value = part.detach().float().mean()
            self._loss = value if self._loss is None else self._loss + value

    def after_backward(self) -> None:
        """Checks after the last microbatch, before clipping spreads one NaN to all gradients."""
        self._remaining -= 1
        if self._remaining == 0:
            self._check()

    def after_batch(self) -> None:
        """Before the optimizer's step: starts the copy of the flags to the host."""
        if self._flags is None:  # number of microbatches unknown: clipping may have spread one layer's NaN
            self._check()
        if self._unread is not None:  # the device is more than a batch behind
            self.read()
        if self._unread is not None or self._flags is None:
            return
        flags, event = self._flags, None
        if flags.is_cuda:
            on_host = torch.empty(flags.shape, dtype=flags.dtype, pin_memory=True)
            flags = on_host.copy_(flags, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        self._unread = (self._batch, self._names_after, flags, event)

    @torch.no_grad()
    def _check(self) -> None:
        if self._loss is None:
            return
        weights = [local_part(parameter) for _, parameter in self._parameters]
        after = [(name, p.grad) for name, p in self._parameters if p.grad is not None] if self._gradients else []
        self._names_after = [name for name, _ in after]
        self._flags = torch.zeros(1 + len(weights) + len(after), dtype=torch.uint8, device=self._loss.device)
        loss, bad_weights, bad_gradients = self._flags.split([1, len(weights), len(after)])
        loss.copy_(torch.isfinite(self._loss).logical_not().reshape(1))
        self._search_gradients([local_part(gradient) for _, gradient in after], bad_gradients)
        # a bad weight of this rank may make another rank's loss bad: the gradients that arrive here show it
        self._search_weights(weights, bad_weights, only_if=self._flags.amax().reshape(1))

    def read(self) -> Finding | None:
        """The finding of the newest batch that was not read yet; None if the device has not finished its check."""
        if self._unread is None:
            return None
        batch, names_after, flags, event = self._unread
        if event is not None and not event.query():
            return None
        self._unread = None
        loss, *bad = map(bool, flags.tolist())
        names = [name for name, _ in self._parameters]
        return Finding(
            batch=batch,
            loss=loss,
            weights=[name for name, flag in zip(names, bad, strict=False) if flag],
            gradients=[name for name, flag in zip(names_after, bad[len(names) :], strict=True) if flag],
        )


def _losses(loss: Any) -> list[Tensor]:
    if isinstance(loss, dict):
        loss = loss["total"] if "total" in loss else list(loss.values())
    several = loss if isinstance(loss, list | tuple) else [loss]
    return [item for item in several if isinstance(item, Tensor)]


def describe(found: Sequence[Finding], order: Sequence[str]) -> tuple[int, str]:
    """The number of the first bad batch, and a clause that says where it began, from the findings of all ranks.

    Weights that were bad before the batch are the cause: the first of them in the model's order is named. If the loss
    was finite, the backward pass overflowed and passed that on to all layers below: the last in the model's order is
    where it began.
    """
    place = {name: number for number, name in enumerate(order)}

    def sorted_names(lists: Iterable[list[str]]) -> list[str]:
        return sorted({name for names in lists for name in names}, key=lambda name: place.get(name, len(place)))

    batch = max(finding.batch for finding in found)
    weights = sorted_names(finding.weights for finding in found)
    gradients = sorted_names(finding.gradients for finding in found)
    losses = [rank for rank, finding in enumerate(found) if finding.loss]
    if weights:
        return batch, f"the weights were not finite before it, first in {plain_name(weights[0])}{_more(weights)}"
    if losses:
        return batch, (
            f"the loss on {name_ranks(losses)} was not finite, though all weights were: the batch's data, or an "
            "overflow in the forward pass"
        )
    if gradients:
        return batch, (
            "the loss was finite and gradients were not: the backward pass overflowed first in "
            f"{plain_name(gradients[-1])}{_more(gradients)}"
        )
    return batch, "no rank found it in its own part"


def _more(names: Sequence[str]) -> str:
    return f" ({len(names)} parameters in all)" if len(names) > 1 else ""
