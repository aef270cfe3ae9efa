"""Losses, gradients and weights that are not finite: seen on the device, read a batch later, told with the layer.

`FiniteWatch` looks at one rank's part of one batch after another and costs no wait for the device; `NonfiniteCount`
counts, over all ranks' rows, how many batches in a row were bad. What is done then is the caller's.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from composer.core import Precision, State
from torch import Tensor

from foundry_moe.callbacks.agreement import FINITE, NO_NEWS, NONFINITE, Row, name_ranks

log = logging.getLogger(__name__)


Magnitudes = tuple[list[str], list[Tensor]]  # names, and their values in some 1-D tensors


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What was not finite on one rank in one batch; names of parameters in the model's order.

    batch: its number, from 1.
    weights: before the batch; gradients: after its backward pass, of this rank's shards.
    """

    batch: int
    loss: bool = False
    weights: list[str] = field(default_factory=list)
    gradients: list[str] = field(default_factory=list)

    @property
    def finite(self) -> bool:
        return not (self.loss or self.weights or self.gradients)


class FiniteWatch:
    """One rank's watch. Events of a batch, in order: `before_batch`, `after_loss` and `after_backward` for each
    microbatch, `after_batch`; `read` at any time.

    Args:
        parameters: the model's, as the optimizer knows them: walking the modules each batch would cost a millisecond.
    """

    def __init__(self, parameters: Sequence[tuple[str, Tensor]]) -> None:
        self._parameters = parameters
        self._loss: Tensor | None = None  # the sum over microbatches: finite only if all are
        self._weights: Magnitudes = ([], [])
        self._gradients: Magnitudes | None = None
        self._batch = 0
        self._to_come = 0
        self._unread: tuple[int, list[str], list[str], Tensor, torch.cuda.Event | None] | None = None

    def before_batch(self, state: State, microbatches: int) -> None:
        """Largest magnitudes of the weights, one pass over this rank's shards."""
        self._loss, self._gradients = None, None
        self._batch = state.timestamp.batch.value + 1
        # automatic microbatches are not known before; clipping may then have spread what was one layer's
        self._to_come = 0 if state.auto_microbatching else microbatches
        self._weights = _magnitudes(self._parameters)

    def after_loss(self, state: State) -> None:
        for loss in _losses(state.loss):
            value = loss.detach().float().mean()
            self._loss = value if self._loss is None else self._loss + value

    def after_backward(self, state: State) -> None:
        """Looks at the gradients after the last microbatch, before clipping makes all of them NaN where one was."""
        self._to_come -= 1
        if self._to_come == 0:
            self._look_at_gradients(state)

    def after_batch(self, state: State) -> None:
        """Starts bringing the flags to the host."""
        if self._gradients is None:
            self._look_at_gradients(state)
        assert self._gradients is not None
        if self._unread is not None:  # the device is more than a batch behind
            self.read()
        if self._unread is not None or self._loss is None:
            return
        names, values = self._weights
        names_after, values_after = self._gradients
        device = self._loss.device
        all_values = [self._loss.reshape(1), *(value.to(device) for value in (*values, *values_after))]
        bad = torch.isfinite(torch.cat(all_values)).logical_not()
        event = None
        if device.type == "cuda":
            flags = torch.empty(bad.shape, dtype=torch.bool, pin_memory=True)
            flags.copy_(bad, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        else:
            flags = bad
        self._unread = (self._batch, names, names_after, flags, event)

    def _look_at_gradients(self, state: State) -> None:
        if state.precision == Precision.AMP_FP16:  # its scaler tries scales until none overflows, and skips those steps
            self._gradients = ([], [])
            return
        self._gradients = _magnitudes(
            (name, parameter.grad) for name, parameter in self._parameters if parameter.grad is not None
        )

    def read(self) -> Finding | None:
        """What was found in the newest batch that was not read yet; None if the device has not come so far."""
        if self._unread is None:
            return None
        batch, names, names_after, flags, event = self._unread
        if event is not None and not event.query():
            return None
        self._unread = None
        bad = flags.tolist()
        after = bad[1 + len(names) :]
        return Finding(
            batch=batch,
            loss=bad[0],
            weights=[name for name, flag in zip(names, bad[1:], strict=False) if flag],
            gradients=[name for name, flag in zip(names_after, after, strict=True) if flag],
        )


def _losses(loss: Any) -> list[Tensor]:
    if isinstance(loss, dict):
        loss = loss["total"] if "total" in loss else list(loss.values())
    several = loss if isinstance(loss, list | tuple) else [loss]
    return [item for item in several if isinstance(item, Tensor)]


@torch.no_grad()
def _magnitudes(tensors: Iterable[tuple[str, Tensor]]) -> Magnitudes:
    """Names and the largest magnitude in this rank's part of each; NaN where there is one."""
    by_kind: dict[tuple[torch.dtype, torch.device], list[tuple[str, Tensor]]] = {}
    for name, tensor in tensors:
        part = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        if part.numel() and part.is_floating_point():
            by_kind.setdefault((part.dtype, part.device), []).append((name, part))
    names: list[str] = []
    values: list[Tensor] = []
    for kind in by_kind.values():  # of one dtype and device it is one launch for many tensors
        names += [name for name, _ in kind]
        values.append(torch.stack(torch._foreach_norm([part for _, part in kind], float("inf"))).float())
    return names, values


class NonfiniteCount:
    """How many batches in a row were bad on any rank, and what this rank saw in the first of them."""

    def __init__(self) -> None:
        self.count = 0
        self.first: Finding | None = None  # this rank's
        self._newest: Finding | None = None

    def row(self, finding: Finding | None) -> int:
        """This rank's `Row.health`."""
        self._newest = finding
        return NO_NEWS if finding is None else FINITE if finding.finite else NONFINITE

    def add(self, rows: Sequence[Row]) -> int:
        """Counts the exchanged rows; returns how many in a row are bad now. The same on all ranks."""
        if any(row.health == NONFINITE for row in rows):
            if self.count == 0:
                self.first = self._newest
            self.count += 1
        elif any(row.health == FINITE for row in rows):
            self.count, self.first = 0, None
        return self.count

    def forget(self) -> None:
        """Starts anew, after a rewind."""
        self.count, self.first = 0, None

    def where(self, order: Sequence[str], group: dist.ProcessGroup | None) -> tuple[int, str]:
        """Collective. The number of the first bad batch, and a clause that says where it began.

        Args:
            order: the model's parameters by name, in the order in which the forward pass meets them.
        """
        found: list[Finding | None] = [self.first]
        if group is not None:
            found = [None] * dist.get_world_size(group)
            dist.all_gather_object(found, self.first, group=group)
        return describe([finding or Finding(batch=0) for finding in found], order)


def describe(found: Sequence[Finding], order: Sequence[str]) -> tuple[int, str]:
    """What ranks saw in the first bad batch, as its number and a clause.

    Weights that were bad before the batch are the cause, the first of them in the model's order. With a finite loss the
    backward pass made it, and passed it on to all layers below: the last in the model's order is where it began.
    """
    place = {name: number for number, name in enumerate(order)}

    def sorted_names(lists: Iterable[list[str]]) -> list[str]:
        return sorted({name for names in lists for name in names}, key=lambda name: place.get(name, len(place)))

    batch = max(finding.batch for finding in found)
    weights = sorted_names(finding.weights for finding in found)
    gradients = sorted_names(finding.gradients for finding in found)
    losses = [rank for rank, finding in enumerate(found) if finding.loss]
    if weights:
        return batch, f"the weights were not finite before it, first in {_plain(weights[0])}{_more(weights)}"
    if losses:
        return batch, (
            f"the loss on {name_ranks(losses)} was not finite, though all weights were: the batch's data, or an "
            "overflow in the forward pass"
        )
    return batch, (
        f"the loss was finite and gradients were not: the backward pass overflowed first in {_plain(gradients[-1])}"
        f"{_more(gradients)}"
        if gradients
        else "it was seen on no rank's own part"
    )


def _plain(name: str) -> str:
    for wrapper in ("module.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod."):
        name = name.replace(wrapper, "")
    return name


def _more(names: Sequence[str]) -> str:
    return f" ({len(names)} parameters in all)" if len(names) > 1 else ""
