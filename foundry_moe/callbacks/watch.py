"""A run's watch over itself: one message of all ranks before each batch; what it says of stopping, numbers and data.

`elastic_checkpoint` and `nonfinite_guard` are `WatchingCallback`s; what a verdict leads to is theirs.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as torch_dist
from composer.core import Callback, Precision, State
from composer.loggers import Logger
from composer.utils import dist
from torch.nn.parallel import DistributedDataParallel

from foundry_moe.callbacks.agreement import RankAgreement, Row, check_microbatches, name_ranks
from foundry_moe.callbacks.nonfinite import FiniteWatch, NonfiniteCount
from foundry_moe.callbacks.stop_signals import StopSignals, shield_workers
from foundry_moe.parallel.timeout import group_timeout

FALLBACK_TIMEOUT = datetime.timedelta(hours=1)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What all ranks know before a batch.

    stop: why the run is to stop, with the ranks that were told; None if nobody was.
    bad_batches: so many in a row, up to the newest that was looked at, were not finite on some rank.
    busy: whether a rank is saving.
    """

    stop: str | None
    bad_batches: int
    busy: bool


class RunWatch:
    """One rank's part of the watch.

    Args:
        signals: names of those that stop the run; none: they are left to whoever has them.
        grace_s: how long processes of data loaders outlive one.
        looks_at_numbers: whether losses, gradients and weights are looked at.
    """

    def __init__(self, *, signals: Sequence[str] = (), grace_s: float = 0.0, looks_at_numbers: bool = True) -> None:
        self.signals = StopSignals(signals)
        self.count = NonfiniteCount()
        self._grace_s = grace_s
        self._looks_at_numbers = looks_at_numbers
        self.finite: FiniteWatch | None = None  # from `start` on
        self._agreement = RankAgreement(None)
        self._group: torch_dist.ProcessGroup | None = None
        self._order: list[str] = []

    def start(self, state: State) -> None:
        """Collective, before the first batch."""
        if self._group is None and torch_dist.is_initialized() and dist.get_world_size() > 1:
            timeout = group_timeout(fallback=FALLBACK_TIMEOUT)  # no longer than the run's own collectives wait
            self._group = torch_dist.new_group(backend="gloo", timeout=timeout)
            self._agreement = RankAgreement(self._group)
        parameters = list(state.model.named_parameters())
        self._order = [name for name, _ in parameters]
        if self._looks_at_numbers:
            self.finite = FiniteWatch(parameters, gradients=state.precision != Precision.AMP_FP16)
        if self.signals.names:
            loaders = [state.train_dataloader, *(evaluator.dataloader.dataloader for evaluator in state.evaluators)]
            for loader in loaders:
                shield_workers(loader, self.signals.names, self._grace_s)
            self.signals.install()

    def before_batch(self, state: State, *, busy: bool) -> Verdict:
        """Collective, once all ranks have their data.

        Raises:
            ValueError: ranks have other numbers of microbatches.
        """
        count = count_microbatches(state)
        verdict, rows = self._exchange(microbatches=count, busy=busy)
        if not isinstance(state.model, DistributedDataParallel):  # there ranks meet in the last microbatch alone
            check_microbatches(rows, state.timestamp.batch.value + 1, state.device_train_microbatch_size)
        if self.finite is not None:
            # automatic microbatches are not known before
            self.finite.before_batch(state.timestamp.batch.value + 1, 0 if state.auto_microbatching else count)
        return verdict

    def elsewhere(self) -> Verdict:
        """Collective, where no batch is to come: in an evaluation, at the end."""
        return self._exchange(microbatches=1, busy=False)[0]

    def what_happened(self, verdict: Verdict) -> str:
        """Collective. How many batches were not finite, from which on, and where it began."""
        batch, where = self.count.where(self._order, self._group)
        if verdict.bad_batches == 1:
            return f"batch {batch} was not finite: {where}"
        return f"the last {verdict.bad_batches} batches were not finite, from batch {batch} on: {where}"

    def _exchange(self, *, microbatches: int, busy: bool) -> tuple[Verdict, list[Row]]:
        finding = self.finite.read() if self.finite is not None else None
        mine = Row(
            stop=int(self.signals.reason is not None),
            health=self.count.row(finding),
            microbatches=microbatches,
            busy=int(busy),
        )
        rows = self._agreement.exchange(mine)
        told = [rank for rank, row in enumerate(rows) if row.stop]
        stop = None
        if told:
            stop = f"{self.signals.reason or 'a signal'} on {name_ranks(told)}"
        return Verdict(stop=stop, bad_batches=self.count.add(rows), busy=any(row.busy for row in rows)), rows


class WatchingCallback(Callback):
    """Shows a `RunWatch` each batch's losses and gradients."""

    def __init__(self, watch: RunWatch) -> None:
        self._watch = watch

    def after_loss(self, state: State, logger: Logger) -> None:
        if self._watch.finite is not None:
            self._watch.finite.after_loss(state.loss)

    def after_backward(self, state: State, logger: Logger) -> None:
        if self._watch.finite is not None:
            self._watch.finite.after_backward()

    def after_train_batch(self, state: State, logger: Logger) -> None:
        if self._watch.finite is not None:
            self._watch.finite.after_batch()


def count_microbatches(state: State) -> int:
    """How many Composer will make of this rank's batch; 1 where that cannot be known before."""
    size, batch = state.device_train_microbatch_size, state.batch
    if state.auto_microbatching or not isinstance(size, int) or not isinstance(batch, Mapping):
        return 1
    samples = next((len(value) for value in batch.values() if isinstance(value, torch.Tensor) and value.ndim), 0)
    return max(1, -(-samples // size)) if samples else 1
