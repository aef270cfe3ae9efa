"""One message of all ranks before each batch: stop requests, nonfinite values, numbers of microbatches.

The callback `elastic_checkpoint` acts on it.
"""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as torch_dist
from composer.core import Precision, State
from composer.utils import dist
from torch.utils.data import DataLoader

from foundry_moe.callbacks.nonfinite import Finding, FiniteWatch, describe
from foundry_moe.checkpoint.collective_errors import Ranks
from foundry_moe.launch.ending import OutliveSignals, StopSignals
from foundry_moe.launch.lost_nodes import beat
from foundry_moe.launch.user_errors import raise_on_all_ranks
from foundry_moe.parallel.collectives import group_timeout
from foundry_moe.parallel.transformer_blocks import wrapped_modules
from foundry_moe.schema import UserError, name_ranks

FALLBACK_TIMEOUT = datetime.timedelta(hours=1)


NO_NEWS, FINITE, NONFINITE = 0, 1, 2


class RankStatus(NamedTuple):
    """One rank's part of the message.

    stop: whether it was asked to stop.
    health: NO_NEWS, FINITE or NONFINITE: the newest batch whose flags it has read.
    microbatches: of the next batch.
    """

    stop: int = 0
    health: int = NO_NEWS
    microbatches: int = 1


def exchange(mine: RankStatus, group: torch_dist.ProcessGroup | None) -> list[RankStatus]:
    """Collective. Returns the status of all ranks, by rank.

    Each rank sends its row to rank 0, which broadcasts the table down a tree. An all-reduce or an all-gather of gloo
    passes a ring, whose time grows with the number of ranks: of 16 processes on two busy cores 78 ms, where this took
    17 ms.

    Args:
        group: a CPU group over all ranks; None for a single process.
    """
    if group is None:
        return [mine]
    row = torch.tensor(mine, dtype=torch.int32)
    table_PN = torch.zeros(torch_dist.get_world_size(group), len(mine), dtype=torch.int32)
    rows = list(table_PN.unbind(0)) if torch_dist.get_rank(group) == 0 else None
    torch_dist.gather(row, rows, group=group, group_dst=0)
    torch_dist.broadcast(table_PN, group=group, group_src=0)
    return [RankStatus(*values) for values in table_PN.tolist()]


class RunWatch:
    """Exchanges stop requests and health flags before each batch.

    Args:
        signals: names of the signals that stop the run.
        grace_s: how long data loader workers ignore a signal.
        checks_values: whether losses, gradients and weights are checked.

    bad_batches: how many batches in a row, up to the newest whose flags were read, were not finite on some rank.
    """

    def __init__(self, *, signals: Sequence[str], grace_s: float, checks_values: bool) -> None:
        self.signals = StopSignals(signals)
        self.bad_batches = 0
        self.finite: FiniteWatch | None = None  # from `start` on
        self._grace_s = grace_s
        self._checks_values = checks_values
        self._group: torch_dist.ProcessGroup | None = None
        self._order: list[str] = []
        self._first_bad: Finding | None = None  # this rank's, of the first of these batches

    def group(self) -> torch_dist.ProcessGroup | None:
        """A CPU group over all ranks for their main threads; None for one process. Collective when first called."""
        if self._group is None and torch_dist.is_initialized() and dist.get_world_size() > 1:
            timeout = group_timeout(fallback=FALLBACK_TIMEOUT)  # no longer than the run's own collectives wait
            self._group = torch_dist.new_group(backend="gloo", timeout=timeout)
        return self._group

    def start(self, state: State) -> None:
        """Collective, before the first batch."""
        self.group()
        for module in wrapped_modules(state.model):
            module.reshard()  # an evaluation has gathered it, if `reshard_after_forward` is false
        parameters = list(state.model.named_parameters())
        self._order = [name for name, _ in parameters]
        if self._checks_values:
            self.finite = FiniteWatch(parameters, gradients=state.precision != Precision.AMP_FP16)
        if self.signals.names:
            loaders = [state.train_dataloader, *(evaluator.dataloader.dataloader for evaluator in state.evaluators)]
            for loader in loaders:
                shield_workers(loader, self.signals.names, self._grace_s)
            self.signals.install()

    def before_batch(self, state: State) -> str | None:
        """Collective, once all ranks have their data. Returns as `between_batches`.

        Raises:
            ValueError: ranks have different numbers of microbatches.
        """
        count, batch = count_microbatches(state), state.timestamp.batch.value + 1
        rows = self._exchange(microbatches=count)
        try:
            check_microbatches([row.microbatches for row in rows], batch, state.device_train_microbatch_size)
        except UserError as error:
            raise_on_all_ranks(error)
        if self.finite is not None:
            # the number of automatic microbatches is not known yet
            self.finite.before_batch(batch, 0 if state.auto_microbatching else count)
        return self._stop_reason(rows)

    def between_batches(self) -> str | None:
        """Collective, for events without a following batch: in an evaluation, at the end.

        Returns:
            Why the run must stop, with the ranks that received the request; None if none did.
        """
        return self._stop_reason(self._exchange())

    def forget_bad_batches(self) -> None:
        self.bad_batches, self._first_bad = 0, None

    def describe(self) -> str:
        """Collective. How many batches were not finite, from which on, and where it began."""
        found: list[Finding | None] = Ranks(self._group).decide(lambda: self._first_bad, list)
        batch, where = describe([finding or Finding(batch=0) for finding in found], self._order)
        if self.bad_batches == 1:
            return f"batch {batch} was not finite: {where}"
        return f"the last {self.bad_batches} batches were not finite, from batch {batch} on: {where}"

    def _exchange(self, *, microbatches: int = 1) -> list[RankStatus]:
        finding = self.finite.read() if self.finite is not None else None
        health = NO_NEWS if finding is None else FINITE if finding.finite else NONFINITE
        mine = RankStatus(stop=int(self.signals.reason is not None), health=health, microbatches=microbatches)
        rows = exchange(mine, self._group)
        beat()
        self.count_bad_batches([row.health for row in rows], finding)
        return rows

    def count_bad_batches(self, health: Sequence[int], finding: Finding | None) -> None:
        """Counts from the health of all ranks, so that the count is the same on all. `finding`: this rank's."""
        if NONFINITE in health:
            if self.bad_batches == 0:
                self._first_bad = finding
            self.bad_batches += 1
        elif FINITE in health:
            self.forget_bad_batches()

    def _stop_reason(self, rows: Sequence[RankStatus]) -> str | None:
        asked = [rank for rank, row in enumerate(rows) if row.stop]
        return f"{self.signals.reason or 'a signal'} on {name_ranks(asked)}" if asked else None


def count_microbatches(state: State) -> int:
    """How many microbatches Composer will make of this rank's batch; 1 if that is not known beforehand."""
    size, batch = state.device_train_microbatch_size, state.batch
    if state.auto_microbatching or not isinstance(size, int) or not isinstance(batch, Mapping):
        return 1
    samples = next((len(value) for value in batch.values() if isinstance(value, torch.Tensor) and value.ndim), 0)
    return max(1, -(-samples // size)) if samples else 1


def check_microbatches(counts: Sequence[int], batch: int, size: object) -> None:
    """Refuses a batch with different numbers of microbatches: some ranks would wait in a collective for the others.

    Args:
        counts: by rank.
        batch: its number, from 1.
        size: `device_train_microbatch_size`, for the error.

    Raises:
        ValueError: says which ranks have another number than most, and what to set.
    """
    usual = Counter(counts).most_common(1)[0][0]
    others = [rank for rank, count in enumerate(counts) if count != usual]
    if others:
        numbers = sorted({counts[rank] for rank in others})
        theirs = f"{numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else numbers[0]
        raise UserError(
            f"batch {batch} does not have the same number of microbatches on all ranks ({theirs} on "
            f"{name_ranks(others)}; {usual} on all others), so that a collective would never complete: set "
            f"train_loader.drop_last: true, or a device_train_microbatch_size ({size}) that is at least the batch of "
            "each rank"
        )


def shield_workers(loader: object, names: Sequence[str], seconds: float) -> None:
    """Lets the workers that a data loader will start outlive the signals."""
    if isinstance(loader, DataLoader) and loader.num_workers and not isinstance(loader.worker_init_fn, OutliveSignals):
        loader.worker_init_fn = OutliveSignals(names, seconds, loader.worker_init_fn)
