"""Saves in the background and loads, for all ranks of one training run. Independent of Composer and of the schedule.

Every public method is collective: all ranks call it with the same arguments. Rank 0 makes all decisions.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
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
from foundry_moe.checkpoint.ledger import Found, Ledger
from foundry_moe.checkpoint.manifest import build_manifest
from foundry_moe.checkpoint.owners import Heartbeat, Identity
from foundry_moe.checkpoint.records import CommitKey
from foundry_moe.checkpoint.store import Store
from foundry_moe.checkpoint.training_state import Snapshot, Snapshotter, is_finite, targets_in

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Policy:
    """How many checkpoints are kept, and how many failures are tolerated."""

    keep: int = 3
    keep_every: int | None = None  # the first commit at or after each multiple of this many steps is never deleted
    max_failures: int = 3  # consecutive failed saves after which training stops
    asynchronous: bool = True
    stale_s: float = STALE_S


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """The result of a load. `state` has the structure that was saved; its tensors were filled in place."""

    step: int
    state: dict[str, Any]
    info: Mapping[str, Any]
    summary: Mapping[str, Any]
    traffic: Traffic
    rejected: list[str]  # one sentence for each newer commit that could not be used


@dataclass(frozen=True, kw_only=True)
class SaveReport:
    """The result of one save; `error` is None if it was committed. Seconds are measured on this rank."""

    step: int
    error: str | None
    bytes_staged: int
    seconds_blocked: float
    seconds_total: float


class CheckpointEngine:
    """Saves and loads one run's state in one folder.

    Args:
        store: the folder of the run.
        group: a CPU (gloo) group over all ranks that nothing else uses, because saves use it from their own thread;
            None for a single process.
        policy: retention and failures.
        info: mesh and versions of the writer, for `checkpoints show`.
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
        self._loaded: CommitKey | None = None
        self._last_step: int | None = None  # newest commit of this run, for milestones
        self._snapshotter = Snapshotter(self.rank, self.world_size)
        self._thread: threading.Thread | None = None
        self._sent_before = self._save_bytes = 0  # of the newest save, see `progress`
        self._report: SaveReport | None = None
        self._committer = Committer(self.ledger, keep=self.policy.keep, stale_s=self.policy.stale_s)  # rank 0's
        self._heartbeat: Heartbeat | None = None  # on rank 0
        self._acquired = False
        self._other_model: OwnedError | None = None
        self._taken_over: TakenOverError | None = None

    # Owning

    def check_owner(self, identity: Identity) -> None:
        """Checks before a load whether the folder may become this run's, and changes nothing.

        If only the model differs from that of the folder's run, `load` raises the error: it can name the tensors.

        Raises:
            OwnedError: the folder belongs to another run.
        """
        try:
            self._ranks.first(lambda: self._committer.owners.find(identity, has_commits=self._committer.has_commits))
        except OwnedError as error:
            if not error.model_differs:
                raise
            self._other_model = error

    def acquire(self, identity: Identity) -> None:
        """Leases the folder for this run and this process group, once, and applies retention.

        An older group of the run stops at its next save. Call this after all that may refuse the run.

        Raises:
            OwnedError: the folder belongs to another run.
            CheckpointError: an older group has saved since this one loaded. A restart continues from there.
        """

        def acquire() -> None:
            self._heartbeat = Heartbeat(self._committer.owners, self._committer.acquire(identity))
            keys = self.ledger.newest_first()
            if self.ledger.next_generation(keys, self._loaded) != self.generation:
                begun = "began anew" if self._loaded is None else f"loaded step {self._loaded.step}"
                raise CheckpointError(
                    f"another process of this run has saved step {keys[0].step} to {self.ledger.store.url} since this "
                    f"one {begun}: start again, to continue from there; the other one stops at its next save"
                )
            if self._loaded is not None:
                self._committer.retain(self._loaded)  # `keep` may be lower than in the process before

        if not self._acquired:
            self._ranks.first(acquire)
            self._acquired = True

    def close(self) -> None:
        """Stops the heartbeat. This process must not save afterwards."""
        if self._heartbeat is not None:
            self._heartbeat.stop()

    # Saving

    def prepare(self, state_dict: Mapping[str, Any]) -> None:
        """Allocates the staging memory and makes the plans, so that the first save is as fast as later ones."""
        self._snapshotter.take(state_dict)

    @property
    def busy(self) -> bool:
        """Whether a save of this rank is in progress."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def progress(self) -> tuple[int, int]:
        """Bytes of this rank's object of the newest save: how many were sent to the store, and all."""
        return min(self.ledger.store.sent_bytes - self._sent_before, self._save_bytes), self._save_bytes

    def save(self, state_dict: Mapping[str, Any], step: int, summary: Mapping[str, Any] | None = None) -> float:
        """Stages the state and saves it in the background; returns the seconds for which it blocked.

        Args:
            state_dict: nested dictionaries of tensors, DTensors and plain values. Values, and tensors that are not
                DTensors, must be equal on all ranks.
            step: the commit's number; it must increase within a run.
            summary: written to the commit record: epoch, samples, tokens.

        Raises:
            TooManyFailuresError: see `Policy.max_failures`.
            TypeError, ValueError: the state holds a value that cannot be stored.
        """
        assert not self.busy, "a save is in progress: see `busy`"
        self.poll()
        began = time.perf_counter()
        snapshot = self._snapshotter.take(state_dict)
        where, recorded = CommitKey(generation=self.generation, step=step), dict(summary or {})
        every = self.policy.keep_every
        if every is not None and step // every > (self._last_step or 0) // every:
            recorded["milestone"] = True
        blocked = time.perf_counter() - began
        self._sent_before, self._save_bytes = self.ledger.store.sent_bytes, snapshot.staged.raw.numel()
        self._thread = threading.Thread(
            target=self._run, args=(snapshot, where, recorded, began, blocked), name="checkpoint-save", daemon=True
        )
        self._thread.start()
        if not self.policy.asynchronous:
            self._thread.join()
            blocked = time.perf_counter() - began
        return blocked

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
        except Exception as failed:  # a lost connection to another rank, or a bug: the report must say so
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

    def _write(self, snapshot: Snapshot, where: CommitKey, summary: Mapping[str, Any]) -> None:
        """One attempt: rank 0 gathers layout digests, broadcasts the attempt's name, and gathers block hashes."""

        def begin(digests: list[str]) -> str:
            strange = [rank for rank, digest in enumerate(digests) if digest != snapshot.digest]
            if strange:
                raise CheckpointError(
                    f"the tensors or layouts of ranks {strange[:8]} differ from those of rank 0: every rank must pass "
                    "the same state dict"
                )
            self._committer.make_room(sum(plan.size_bytes for plan in snapshot.plans.values()))
            return self._committer.begin(where, info=self.info, summary=summary, forked_from=self._forked_from)

        attempt = self._ranks.decide(lambda: snapshot.digest, begin)

        def write() -> tuple[bytes, bool]:
            hashes = snapshot.staged.hashes()
            snapshot.staged.write(self.ledger.store, attempt, self.rank)
            return hashes.tobytes(), is_finite(snapshot)

        def commit(reports: list[tuple[bytes, bool]]) -> None:
            names = list(snapshot.tensors)
            rows = {
                rank: (plan.size_bytes, plan.rows(names, np.frombuffer(reports[rank][0], dtype=np.uint64)))
                for rank, plan in snapshot.plans.items()
            }
            manifest = build_manifest(snapshot.tensors, rows, snapshot.values, self._committer.info)
            self._committer.commit(manifest, finite=all(finite for _, finite in reports))

        self._ranks.decide(write, commit)

    def poll(self) -> SaveReport | None:
        """The report of a save that has ended since the last call; None if there is none.

        Raises:
            TakenOverError: another process owns the folder by now, and later saves of this one would be dropped.
            TooManyFailuresError: `Policy.max_failures` saves in a row have failed.
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
        count = f"{self.failures_in_a_row} of {self.policy.max_failures}"
        message = "The save of step %d failed (%s in a row end the run); newest checkpoint: %s. %s"
        log.warning(message, report.step, count, kept, report.error)
        return report

    def join(self, timeout_s: float | None = None) -> None:
        """Waits for this rank's part of the save in progress. Not collective."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def wait(self) -> SaveReport | None:
        """Waits for the save in progress and returns `poll()`, with its errors."""
        self.join()
        return self.poll()

    # Loading

    def load(
        self,
        state_dict: Mapping[str, Any] | Callable[[Mapping[str, Any]], Mapping[str, Any]],
        resume: str | int = "auto",
        *,
        check: Callable[[Loaded], object] = lambda loaded: None,
        sections: Collection[str] | None = None,
    ) -> Loaded | None:
        """Fills `state_dict` in place from the newest usable commit, which any mesh may have written.

        Args:
            state_dict: the tensors of sections `model` and `optim` must match the checkpoint; other sections may lack
                or add some. A function is called with the checkpoint's `info`, and only if there is a checkpoint,
                because creating an optimizer's state changes it, and a `weights_only` checkpoint has none.
            resume: "auto", "never", or a step.
            check: raises DamagedError, on all ranks, for a loaded state that must not be used, or MismatchError for one
                that does not fit this run.
            sections: the top-level keys of the checkpoint to read; None = all.

        Returns:
            None if there is no checkpoint to resume from.

        Raises:
            MismatchError: the checkpoint does not fit this run. No older one is tried.
            DamagedError: there are commits, and none can be used.
            CheckpointError: see `Ledger.choose`.
            StoreError: the store does not answer.
            Exception: any other failure of a rank, raised on all ranks. It says nothing about the checkpoint.
        """
        while True:
            choice = self._ranks.first(lambda: self.ledger.choose(resume))
            for sentence in choice.rejected:
                log.warning("Passed over a checkpoint: %s", sentence)
            self.generation, self._forked_from = choice.generation, choice.forked_from
            found = choice.found
            if found is None:
                if self._other_model is not None:
                    raise self._other_model
                return None
            if callable(state_dict):
                state_dict = state_dict(found.manifest.info)
            try:
                loaded = self._load_from(found, state_dict, choice.rejected, sections)
                check(loaded)
            except DamagedError as error:
                self.ledger.damaged.add(found.commit.where)
                log.warning("Checkpoint of step %d is damaged, trying the one before: %s", found.commit.step, error)
                continue
            if self._other_model is not None:
                raise self._other_model
            self._loaded = found.commit.where
            return loaded

    def _load_from(
        self, found: Found, state_dict: Mapping[str, Any], rejected: list[str], sections: Collection[str] | None
    ) -> Loaded:
        place: dict[str, Any] = {"rank": self.rank, "world_size": self.world_size, "sections": sections}
        try:
            targets, state = self._ranks.every(lambda: targets_in(state_dict, found.manifest, **place))
            traffic = read_blocks(self.ledger.store, found, self._ranks, targets)
        except RanksError as failed:
            raise worst(failed.reasons.values()) from failed
        self._last_step = found.commit.step
        return Loaded(
            step=found.commit.step,
            state=state,
            info=found.manifest.info,
            summary=found.commit.summary,
            traffic=traffic,
            rejected=rejected,
        )
