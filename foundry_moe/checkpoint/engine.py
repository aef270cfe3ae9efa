"""Saves in the background and loads, for one training run on all its ranks. It knows neither Composer nor when to save.

Every public method is collective: all ranks call it, with the same arguments. Decisions are rank 0's.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch.distributed as dist

from foundry_moe.checkpoint.collective_errors import Ranks, RanksError
from foundry_moe.checkpoint.committer import STALE_S, Committer
from foundry_moe.checkpoint.errors import (
    CheckpointError,
    DamagedError,
    OwnedError,
    TakenOverError,
    TooManyFailuresError,
    worst,
)
from foundry_moe.checkpoint.exchange import Traffic, read_blocks
from foundry_moe.checkpoint.layout import Block, plan_writes
from foundry_moe.checkpoint.ledger import Choice, Found, Ledger
from foundry_moe.checkpoint.manifest import Row, build_manifest
from foundry_moe.checkpoint.owners import Heartbeat, Identity
from foundry_moe.checkpoint.records import CommitKey
from foundry_moe.checkpoint.snapshot import Snapshot, Snapshotter, is_finite, place
from foundry_moe.checkpoint.state_targets import StateTargets
from foundry_moe.checkpoint.store import Store

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Policy:
    """How many checkpoints stay, and what a failure means."""

    keep: int = 3
    keep_every: int | None = None  # the first commit at or after each multiple of this many steps stays for ever
    max_failures: int = 3  # so many saves in a row may fail before training stops
    asynchronous: bool = True
    stale_s: float = STALE_S


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """What a load brought: `state` has the shape of what was saved, its tensors are those that were filled."""

    step: int
    state: dict[str, Any]
    info: Mapping[str, Any]
    summary: Mapping[str, Any]
    traffic: Traffic
    rejected: list[str]  # newer commits that could not be used, a sentence for each


@dataclass(frozen=True, kw_only=True)
class SaveReport:
    """How one save went; `error` is None if it was committed. Seconds are this rank's."""

    step: int
    error: str | None
    bytes_staged: int
    seconds_blocked: float
    seconds_total: float


class CheckpointEngine:
    """Saves and loads one run's state in one folder.

    Args:
        store: where.
        group: a CPU (gloo) group over all ranks that nothing else uses; None for a single process. Saves use it from
            a thread of their own.
        policy: what to keep.
        info: what `show` prints of the writer: mesh, versions.
    """

    def __init__(
        self,
        store: Store,
        *,
        group: dist.ProcessGroup | None = None,
        policy: Policy | None = None,
        info: Mapping[str, Any] | None = None,
    ) -> None:
        self.ledger, self.policy, self._ranks = Ledger(store), policy or Policy(), Ranks(group)
        self.rank, self.world_size = self._ranks.rank, self._ranks.size
        self.info = {"world_size": self.world_size, **(info or {})}
        self.failures_in_a_row = 0
        self.generation = 0
        self._forked_from: int | None = None
        self._last_step: int | None = None  # newest commit of this run, for milestones
        self._snapshotter = Snapshotter(self.rank, self.world_size)
        self._plans: tuple[str, dict[int, tuple[list[Block], list[int], int]]] = ("", {})  # of all ranks, by digest
        self._thread: threading.Thread | None = None
        self._report: SaveReport | None = None
        self._committer = Committer(self.ledger, keep=self.policy.keep, stale_s=self.policy.stale_s)  # rank 0's
        self._heartbeat: Heartbeat | None = None  # on rank 0
        self._other_model: OwnedError | None = None
        self._taken_over: TakenOverError | None = None

    # Owning

    def acquire(self, identity: Identity) -> None:
        """Leases the folder for this run, and of its processes for this group: an older one stops at its next save.

        A run whose model alone differs from what the folder has is refused by `load`, which names the tensors.

        Raises:
            OwnedError: the folder is another run's.
        """

        def acquire() -> None:
            self._heartbeat = Heartbeat(self._committer.owners, self._committer.acquire(identity))

        try:
            self._ranks.first(acquire)
        except OwnedError as error:
            if not error.model_differs:
                raise
            self._other_model = error

    def close(self) -> None:
        """This process saves no more: its heartbeat ends."""
        if self._heartbeat is not None:
            self._heartbeat.stop()

    # Saving

    def prepare(self, state_dict: Mapping[str, Any]) -> None:
        """Touches the staging memory and makes plans, so that the first save is as quick as others."""
        snapshot = self._snapshotter.take(state_dict)
        if self.rank == 0:
            self._plan_all(snapshot)  # in the save's thread it would keep the interpreter from a step's launches

    @property
    def busy(self) -> bool:
        """Whether a save of this rank is under way."""
        return self._thread is not None and self._thread.is_alive()

    def save(self, state_dict: Mapping[str, Any], step: int, summary: Mapping[str, Any] | None = None) -> float:
        """Stages the state and saves it in the background; returns the seconds for which it blocked.

        Args:
            state_dict: nested dictionaries of tensors, DTensors and plain values; tensors that are not DTensors, and
                all values, are taken from rank 0 or whichever rank holds them: they must be the same on all.
            step: the commit's number; it must grow within a run.
            summary: what the commit record shows: epoch, samples, tokens.

        Raises:
            TooManyFailuresError: see `Policy.max_failures`.
            TypeError, ValueError: the state holds something that cannot be stored.
        """
        assert not self.busy, "one save at a time: look at `busy`"
        if self._other_model is not None:
            raise self._other_model
        self.poll()
        began = time.perf_counter()
        snapshot = self._snapshotter.take(state_dict)
        where, recorded = CommitKey(generation=self.generation, step=step), {**(summary or {}), **self._milestone(step)}
        blocked = time.perf_counter() - began
        self._thread = threading.Thread(
            target=self._run, args=(snapshot, where, recorded, began, blocked), name="checkpoint-save", daemon=True
        )
        self._thread.start()
        if not self.policy.asynchronous:
            self._thread.join()
            blocked = time.perf_counter() - began
        return blocked

    def _milestone(self, step: int) -> dict[str, bool]:
        every = self.policy.keep_every
        if every is None:
            return {}
        before = -1 if self._last_step is None else self._last_step // every
        return {"milestone": True} if step // every > max(before, 0) else {}

    def _run(
        self, snapshot: Snapshot, where: CommitKey, summary: Mapping[str, Any], began: float, blocked: float
    ) -> None:
        error: str | None = None
        try:
            self._write(snapshot, where, summary)
        except RanksError as failed:
            error = str(failed)
            reasons = failed.reasons.values()
            self._taken_over = next((reason for reason in reasons if isinstance(reason, TakenOverError)), None)
        except Exception as failed:  # a lost connection to another rank, or a fault of ours: never silently
            error = f"{type(failed).__name__}: {failed}"
        if self.rank == 0:
            self._committer.clean_up()
        self._report = SaveReport(
            step=where.step,
            error=error,
            bytes_staged=snapshot.staged.raw.numel(),
            seconds_blocked=blocked,
            seconds_total=time.perf_counter() - began,
        )

    def _plan_all(self, snapshot: Snapshot) -> dict[int, tuple[list[Block], list[int], int]]:
        """What each rank writes, as rank 0 needs it: kept while the layout stays the same."""
        if self._plans[0] != snapshot.digest:
            dtypes = [dtype for dtype, _ in snapshot.tensors.values()]
            planned = [(layout, dtype.itemsize) for layout, dtype in zip(snapshot.layouts, dtypes, strict=True)]
            plans = {rank: (blocks, *place(blocks)) for rank, blocks in plan_writes(planned).items()}
            self._plans = snapshot.digest, plans
        return self._plans[1]

    def _write(self, snapshot: Snapshot, where: CommitKey, summary: Mapping[str, Any]) -> None:
        """One attempt: a digest of the layout goes to rank 0, the attempt's name to all, and hashes come back."""

        def begin(digests: list[str]) -> str:
            strange = [rank for rank, digest in enumerate(digests) if digest != snapshot.digest]
            if strange:
                raise CheckpointError(
                    f"ranks {strange[:8]} hold other tensors, or otherwise laid out, than rank 0: every rank must give "
                    "the same state dict"
                )
            return self._committer.begin(where, info=self.info, summary=summary, forked_from=self._forked_from)

        attempt = self._ranks.decide(lambda: snapshot.digest, begin)

        def write() -> tuple[int, bytes, bool]:
            hashes = snapshot.staged.hashes()
            snapshot.staged.write(self.ledger.store, attempt, self.rank)
            return snapshot.staged.raw.numel(), hashes.tobytes(), is_finite(snapshot)

        def commit(reports: list[tuple[int, bytes, bool]]) -> None:
            wrote = {rank: (size, hashes) for rank, (size, hashes, _) in enumerate(reports)}
            rows = rows_of(list(snapshot.tensors), self._plan_all(snapshot), wrote)
            manifest = build_manifest(snapshot.tensors, rows, snapshot.values, self._committer.info)
            self._committer.commit(manifest, finite=all(finite for *_, finite in reports))

        self._ranks.decide(write, commit)

    def poll(self) -> SaveReport | None:
        """The report of a save that has ended since the last call, None if there is none.

        Raises:
            TakenOverError: the folder is another process's: nothing that this one still does will be kept.
            TooManyFailuresError: this was one failure too many.
        """
        if self.busy or self._report is None:
            return None
        report, self._report, self._thread = self._report, None, None
        if self._taken_over is not None:
            raise self._taken_over
        if report.error is None:
            self.failures_in_a_row = 0
            self._last_step = report.step
            return report
        self.failures_in_a_row += 1
        kept = "none yet" if self._last_step is None else f"the one of step {self._last_step}"
        if self.failures_in_a_row >= self.policy.max_failures:
            raise TooManyFailuresError(
                f"{self.failures_in_a_row} saves in a row failed, so training stops; the newest checkpoint in "
                f"{self.ledger.store.url} is {kept}. The last failure, at step {report.step}: {report.error}"
            )
        log.warning(
            "The save of step %d failed (%d of %d in a row end the run); newest checkpoint: %s. %s",
            report.step,
            self.failures_in_a_row,
            self.policy.max_failures,
            kept,
            report.error,
        )
        return report

    def wait(self) -> SaveReport | None:
        """Waits for the save under way and returns `poll()`; raises what `poll` does."""
        if self._thread is not None:
            self._thread.join()
        return self.poll()

    # Loading

    def load(
        self,
        state_dict: Mapping[str, Any] | Callable[[Mapping[str, Any]], Mapping[str, Any]],
        resume: str | int = "auto",
        *,
        check: Callable[[Loaded], object] = lambda loaded: None,
    ) -> Loaded | None:
        """Fills `state_dict` in place from the newest commit that can be used, whatever mesh wrote it.

        Args:
            state_dict: sections `model` and `optim` must match the checkpoint; others may lack or add tensors. A
                function is called, with the checkpoint's `info`, only if there is something to load: making an
                optimizer's state changes it, and a checkpoint that is `weights_only` has none.
            resume: "auto", "never", or a step.
            check: raises DamagedError for a state, tensors and values, that is not to be used; on all ranks alike.

        Returns:
            None if there is nothing to go on from.

        Raises:
            MismatchError: the checkpoint is of another model; nothing was changed.
            DamagedError: commits exist and none can be used.
            CheckpointError: see `Ledger.choose`.
            StoreError: the store does not answer.
            Exception: what else failed on a rank, on all of them; the checkpoint may well be good.
        """
        while True:
            choice = self._choose(resume)
            self.generation, self._forked_from = choice.generation, choice.forked_from
            if choice.found is None:
                if self._other_model is not None:
                    raise self._other_model
                return None
            if callable(state_dict):
                state_dict = state_dict(choice.found.manifest.info)
            try:
                loaded = self._load_from(choice.found, state_dict, choice.rejected)
                check(loaded)
                if self._other_model is not None:
                    raise self._other_model
                return loaded
            except DamagedError as error:
                where = choice.found.commit.where
                self.ledger.damaged.add(where)
                log.warning("Checkpoint of step %d is damaged, trying the one before: %s", where.step, error)

    def _choose(self, resume: str | int) -> Choice:
        """`Ledger.choose` on rank 0, for all."""
        choice = self._ranks.first(lambda: self.ledger.choose(resume))
        for sentence in choice.rejected:
            log.warning("Passed over a checkpoint: %s", sentence)
        return choice

    def _load_from(self, found: Found, state_dict: Mapping[str, Any], rejected: list[str]) -> Loaded:
        made: list[StateTargets] = []

        def plan() -> StateTargets:
            made.append(StateTargets(found.manifest, state_dict, rank=self.rank, world_size=self.world_size))
            return made[0]

        try:
            traffic = read_blocks(self.ledger.store, found, self._ranks, plan)
        except RanksError as failed:
            raise worst(failed.reasons.values()) from failed
        self._last_step = found.commit.step
        return Loaded(
            step=found.commit.step,
            state=made[0].result,
            info=found.manifest.info,
            summary=found.commit.summary,
            traffic=traffic,
            rejected=rejected,
        )


def rows_of(
    names: list[str],
    plans: Mapping[int, tuple[list[Block], list[int], int]],
    reports: Mapping[int, tuple[int, bytes]],
) -> dict[int, tuple[int, list[Row]]]:
    """What each rank wrote, from the plan of all and what they report: (bytes written, hashes in plan order).

    Raises:
        CheckpointError: a rank wrote something else than the plan says.
    """
    rows = {}
    for rank, (blocks, starts, size_bytes) in plans.items():
        wrote, raw = reports[rank]
        hashes = np.frombuffer(raw, dtype=np.uint64).tolist()
        if wrote != size_bytes or len(hashes) != len(blocks):
            raise CheckpointError(
                f"rank {rank} wrote {wrote} bytes in {len(hashes)} blocks, the plan says {size_bytes} in {len(blocks)}"
            )
        mine = zip(blocks, starts, hashes, strict=True)
        rows[rank] = size_bytes, [(names[block.item], block.box, start, digest) for block, start, digest in mine]
    return rows
