"""One message of all ranks before each batch: stop requests, nonfinite values, numbers of microbatches, busy saves.

The callback `elastic_checkpoint` acts on the `RunStatus` that follows from it.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields

import torch
import torch.distributed as torch_dist
from composer.core import Precision, State
from composer.utils import dist

from foundry_moe.callbacks.nonfinite import NO_NEWS, FiniteWatch, NonfiniteCount, name_ranks
from foundry_moe.callbacks.preemption import StopSignals, shield_workers
from foundry_moe.launch.lost_nodes import beat
from foundry_moe.launch.user_errors import raise_on_all_ranks
from foundry_moe.parallel.collectives import group_timeout

FALLBACK_TIMEOUT = datetime.timedelta(hours=1)
SHOWN = 4  # numbers of microbatches in the error about them: a job of hundreds of ranks may have as many


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """One rank's part of the message.

    stop: whether it was asked to stop.
    health: NO_NEWS, FINITE or NONFINITE: the newest batch whose flags it has read.
    microbatches: of the next batch.
    busy: whether it is saving.
    """

    stop: int = 0
    health: int = NO_NEWS
    microbatches: int = 1
    busy: int = 0


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """What all ranks know before a batch.

    stop: why the run is to stop, with the ranks that were asked to; None if none was.
    bad_batches: how many batches in a row, up to the newest whose flags were read, were not finite on some rank.
    busy: whether a rank is saving.
    """

    stop: str | None
    bad_batches: int
    busy: bool


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
    row = torch.tensor(astuple(mine), dtype=torch.int32)
    table_RN = torch.zeros(torch_dist.get_world_size(group), len(fields(RankStatus)), dtype=torch.int32)
    rows = list(table_RN.unbind(0)) if torch_dist.get_rank(group) == 0 else None
    torch_dist.gather(row, rows, group=group, group_dst=0)
    torch_dist.broadcast(table_RN, group=group, group_src=0)
    names = [field.name for field in fields(RankStatus)]
    return [RankStatus(**dict(zip(names, values, strict=True))) for values in table_RN.tolist()]


class RunWatch:
    """One rank's part of the watch.

    Args:
        signals: names of the signals that stop the run.
        grace_s: how long data loader workers ignore a signal.
        checks_values: whether losses, gradients and weights are checked.
    """

    def __init__(self, *, signals: Sequence[str], grace_s: float, checks_values: bool) -> None:
        self.signals = StopSignals(signals)
        self.count = NonfiniteCount()
        self.finite: FiniteWatch | None = None  # from `start` on
        self._grace_s = grace_s
        self._checks_values = checks_values
        self._group: torch_dist.ProcessGroup | None = None
        self._order: list[str] = []

    def group(self) -> torch_dist.ProcessGroup | None:
        """A CPU group over all ranks for their main threads; None for one process. Collective when first called."""
        if self._group is None and torch_dist.is_initialized() and dist.get_world_size() > 1:
            timeout = group_timeout(fallback=FALLBACK_TIMEOUT)  # no longer than the run's own collectives wait
            self._group = torch_dist.new_group(backend="gloo", timeout=timeout)
        return self._group

    def start(self, state: State) -> None:
        """Collective, before the first batch."""
        self.group()
        parameters = list(state.model.named_parameters())
        self._order = [name for name, _ in parameters]
        if self._checks_values:
            self.finite = FiniteWatch(parameters, gradients=state.precision != Precision.AMP_FP16)
        if self.signals.names:
            loaders = [state.train_dataloader, *(evaluator.dataloader.dataloader for evaluator in state.evaluators)]
            for loader in loaders:
                shield_workers(loader, self.signals.names, self._grace_s)
            self.signals.install()

    def before_batch(self, state: State, *, busy: bool) -> RunStatus:
        """Collective, once all ranks have their data.

        Raises:
            ValueError: ranks have different numbers of microbatches.
        """
        count, batch = count_microbatches(state), state.timestamp.batch.value + 1
        status, rows = self._exchange(microbatches=count, busy=busy)
        try:
            check_microbatches([row.microbatches for row in rows], batch, state.device_train_microbatch_size)
        except ValueError as error:
            raise_on_all_ranks(error)
        if self.finite is not None:
            # the number of automatic microbatches is not known yet
            self.finite.before_batch(batch, 0 if state.auto_microbatching else count)
        return status

    def between_batches(self) -> RunStatus:
        """Collective, where no batch follows: in an evaluation, at the end."""
        return self._exchange(microbatches=1, busy=False)[0]

    def describe(self, status: RunStatus) -> str:
        """Collective. How many batches were not finite, from which on, and where it began."""
        batch, where = self.count.where(self._order, self._group)
        if status.bad_batches == 1:
            return f"batch {batch} was not finite: {where}"
        return f"the last {status.bad_batches} batches were not finite, from batch {batch} on: {where}"

    def _exchange(self, *, microbatches: int, busy: bool) -> tuple[RunStatus, list[RankStatus]]:
        finding = self.finite.read() if self.finite is not None else None
        mine = RankStatus(
            stop=int(self.signals.reason is not None),
            health=self.count.health(finding),
            microbatches=microbatches,
            busy=int(busy),
        )
        rows = exchange(mine, self._group)
        beat()
        asked = [rank for rank, row in enumerate(rows) if row.stop]
        stop = f"{self.signals.reason or 'a signal'} on {name_ranks(asked)}" if asked else None
        bad_batches = self.count.add([row.health for row in rows])
        return RunStatus(stop=stop, bad_batches=bad_batches, busy=any(row.busy for row in rows)), rows


def count_microbatches(state: State) -> int:
    """How many microbatches Composer will make of this rank's batch; 1 where that is not known before."""
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
        ValueError: says which ranks have how many microbatches, rarest counts first, and what to set.
    """
    by_count: dict[int, list[int]] = {}
    for rank, count in enumerate(counts):
        by_count.setdefault(count, []).append(rank)
    if len(by_count) == 1:
        return
    rarest = sorted(by_count.items(), key=lambda item: (len(item[1]), item[0]))  # most ranks have the right number
    listed = "; ".join(f"{count}: {name_ranks(ranks)}" for count, ranks in rarest[:SHOWN])
    if len(rarest) > SHOWN:
        listed += f"; {len(rarest) - SHOWN} more counts on other ranks"
    raise ValueError(
        f"batch {batch} does not have the same number of microbatches on all ranks ({listed}), so that a collective "
        f"would never complete: set train_loader.drop_last: true, or a device_train_microbatch_size ({size}) that is "
        "at least each rank's batch"
    )
