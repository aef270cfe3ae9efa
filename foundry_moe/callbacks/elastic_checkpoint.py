"""The Composer callback `elastic_checkpoint`: when a run saves, resumes, stops and rewinds.

How it saves and resumes is in `run_checkpoints`, how it stops in `launch.ending`, and how nonfinite values are detected
in `nonfinite`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import psutil
from composer.core import Callback, State, Time
from composer.loggers import Logger
from composer.trainer import trainer
from composer.utils import dist

from foundry_moe.callbacks.data_order import enter_datamix, fix_order
from foundry_moe.callbacks.elastic_state import check_storable, continue_progress_bars, reseed, restore_optimizers
from foundry_moe.callbacks.run_checkpoints import RunCheckpoints, has_commits, log_on_first_rank, start_from
from foundry_moe.callbacks.run_watch import RunWatch
from foundry_moe.checkpoint import open_store
from foundry_moe.checkpoint.collective_errors import Ranks
from foundry_moe.checkpoint.errors import DamagedError, StoreError
from foundry_moe.checkpoint.store import folder_problem
from foundry_moe.launch.checkpoint_settings import WHERE, CheckpointConfig, checkpoint_config
from foundry_moe.launch.ending import RunComplete, leave
from foundry_moe.launch.user_errors import NonfiniteError, raise_on_all_ranks
from foundry_moe.schema import UserError, takes_keys_of, with_keys

log = logging.getLogger(__name__)

REWINDS = 3  # to one checkpoint
ADVICE = "lower the learning rate or inspect the data"


@with_keys(CheckpointConfig)
class ElasticCheckpoint(Callback):
    """Saves the run in the background, as one commit of all ranks, and resumes it on any mesh.

    Under `callbacks` in YAML:

        elastic_checkpoint: {folder: s3://bucket/run, interval: 30m, keep: 3}

    On one of `signals`, to any rank, all ranks finish the batch, save and exit with code 75. After `max_nonfinite`
    batches in a row whose loss, gradients or weights were not finite, the run stops, or restores the last finite
    checkpoint and continues with the next data (`on_nonfinite: rewind`).

    With `save_folder`, Composer also writes its own checkpoints. `load_path`, and what `autoresume` finds, count only
    while the folder holds no commit.

    Raises:
        ValueError: an unknown key or an impossible value.
    """

    @takes_keys_of(CheckpointConfig)
    def __init__(self, folder: str | None = None, **keys: Any) -> None:
        self.config: CheckpointConfig = checkpoint_config(keys if folder is None else {"folder": folder, **keys})
        self.resumed_from: int | None = None
        self._checkpoints: RunCheckpoints | None = None  # from `after_load` on
        self._restore_loading: Callable[[], None] = lambda: None  # Composer's of `load_path`
        self._fitting = False
        self._complete: tuple[Time[Any], Time[Any]] | None = None  # the end of a complete run, and where it was moved
        self._rewound: list[int] = []  # steps that the run went back to
        # seconds since the epoch at the end of each phase of a start, until the first batch
        self._marks = {"": psutil.Process().create_time()}
        self._mark("imports and process group")
        checks_values = self.config.max_nonfinite is not None
        self._watch = RunWatch(signals=self.config.signals, grace_s=self.config.grace_s, checks_values=checks_values)

    @property
    def checkpoints(self) -> RunCheckpoints:
        assert self._checkpoints is not None, "set in after_load"
        return self._checkpoints

    @property
    def latest_checkpoint(self) -> str | None:
        """The place of the newest complete checkpoint of this run, as text; None before the first."""
        return None if self._checkpoints is None else self._checkpoints.committed

    # Resuming

    def init(self, state: State, logger: Logger) -> None:
        """Checks the other callbacks, and that the store can be reached, before anything slow."""
        # callbacks whose `after_load` reads their state (datamixes) must find it restored, whatever the order in YAML
        state.callbacks.remove(self)
        state.callbacks.insert(0, self)
        self._mark("data and model")
        if sum(isinstance(callback, ElasticCheckpoint) for callback in state.callbacks) > 1:
            raise UserError(f"{WHERE} is there twice: one run has one folder")
        store = open_store(self.config.folder, self.config.store_options)
        try:
            Ranks(self._watch.group()).first(store.check)
        except (StoreError, OSError) as error:
            raise_on_all_ranks(error)

    def has_commits(self) -> bool:
        """Whether all weights of this run come from a commit. Collective; rank 0 looks."""
        return self.config.save_frozen and self.config.resume != "never" and self._holds_commits(self.config.folder)

    def _holds_commits(self, folder: str) -> bool:
        return has_commits(folder, self.config.store_options)

    def before_load(self, state: State, logger: Logger) -> None:
        resumes = self._holds_commits(self.config.folder)
        skips = resumes and self.config.save_frozen  # `load_path` may have been deleted by now

        def is_ours(folder: str) -> bool:
            return skips or (not folder_problem(folder) and self._holds_commits(folder))

        def load(folder: str, weights_only: bool, others: list[str]) -> None:
            if skips:
                resumed = f"the run resumes from a checkpoint in {self.config.folder}"
                log_on_first_rank(log, f"{folder} is not loaded: {resumed}")
                return
            for key in others:
                raise UserError(
                    f"{key} does not apply to load_path ({folder}), a folder of elastic_checkpoint: delete it"
                )
            start_from(folder, self.config, state, logger, weights_only=weights_only or resumes)

        self._restore_loading = load_elsewhere(is_ours, load)

    def after_load(self, state: State, logger: Logger) -> None:
        """Restores the folder's newest good commit in place of Composer's loaded state."""
        self._mark("trainer and FSDP")
        self._restore_loading()
        check_storable(state)
        self._checkpoints = RunCheckpoints(self.config, state, self._watch.group())
        if self.config.resume == "never":
            log_on_first_rank(log, f"{self.config.folder}: a new run, because resume is never")
        loaded = self._checkpoints.load(state, self.config.resume, lambda: self._mark("finding the checkpoint"))
        if loaded is None:
            return
        self._mark("reading it")
        self._checkpoints.resume(state, loaded, logger)
        self.resumed_from = loaded.step
        self._allow_fit(state)

    def _allow_fit(self, state: State) -> None:
        """Moves the end of a complete run, for which `Trainer.fit` raises ValueError before any event.

        `fit_start` then ends the process with exit code 0, so that a launcher does not restart the run.
        """
        end = state.max_duration
        if end is not None and end <= state.timestamp.get(end.unit):
            state.max_duration = state.timestamp.get(end.unit) + Time(1, end.unit)
            self._complete = (end, state.max_duration)

    def _mark(self, phase: str) -> None:
        self._marks[phase] = time.time()

    def _log_times(self, logger: Logger) -> None:
        """After the first batch of this process."""
        self._mark("first batch")
        marks = list(self._marks.items())
        total_s = marks[-1][1] - marks[0][1]
        parts = ", ".join(f"{phase} {end - start:.1f}" for (_, start), (phase, end) in pairwise(marks))
        if self.resumed_from is not None:
            logger.log_metrics({"checkpoint/resume_seconds": total_s})
        log_on_first_rank(log, f"First batch, since this process began: {total_s:.1f} s ({parts}).")

    # Saving

    def fit_start(self, state: State, logger: Logger) -> None:
        if self._complete is not None and state.max_duration is self._complete[1]:  # `fit` has no duration of its own
            state.max_duration = self._complete[0]
            if state.max_duration <= state.timestamp.get(state.max_duration.unit):  # `reset_time` trains again
                if dist.get_global_rank() == 0:
                    print(f"this run is complete: max_duration ({state.max_duration}) is reached, nothing to train")
                raise RunComplete(0)
        fix_order(state)
        enter_datamix(state, logger)
        continue_progress_bars(state, logger)
        self.checkpoints.start(state)  # a start that was refused, or is complete, has not stopped a running process
        self._watch.signals.newest = lambda: self.checkpoints.committed
        self._watch.start(state)
        self._fitting = True
        self._mark("before training")  # an evaluation first, of a new run

    def after_dataloader(self, state: State, logger: Logger) -> None:
        reseed(state.rank_zero_seed, state.timestamp.batch.value, dist.get_global_rank())

    def batch_start(self, state: State, logger: Logger) -> None:
        """All ranks reach the same decision on training this batch."""
        stop = self._watch.before_batch(state)
        if stop is not None:
            self._stop(stop, state, logger)
        limit = self.config.max_nonfinite
        if limit is not None and self._watch.bad_batches >= limit:
            if self.config.on_nonfinite == "stop":
                raise NonfiniteError(
                    f"{self._watch.describe()}. The newest checkpoint with finite weights stays in "
                    f"{self.config.folder}; {ADVICE}, or set {WHERE}.on_nonfinite: rewind"
                )
            self._rewind(state, logger)

    def after_loss(self, state: State, logger: Logger) -> None:
        if self._watch.finite is not None:
            self._watch.finite.after_loss(state.loss)

    def after_backward(self, state: State, logger: Logger) -> None:
        if self._watch.finite is not None:
            self._watch.finite.after_backward()

    def after_train_batch(self, state: State, logger: Logger) -> None:
        if self._watch.finite is not None:
            self._watch.finite.after_batch()

    def eval_batch_start(self, state: State, logger: Logger) -> None:
        if self._fitting:  # an evaluation outside `fit` has no training to lose
            stop = self._watch.between_batches()
            if stop is not None:
                self._stop(stop, state, logger)

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        if "first batch" not in self._marks:
            self._log_times(logger)
        self._save_if_due(state, logger, epoch_ended=False)

    def epoch_end(self, state: State, logger: Logger) -> None:
        self.checkpoints.position.end_epoch(state)

    def epoch_checkpoint(self, state: State, logger: Logger) -> None:
        self._save_if_due(state, logger, epoch_ended=True)

    def _save_if_due(self, state: State, logger: Logger, *, epoch_ended: bool) -> None:
        self.checkpoints.save_if_due(state, logger, epoch_ended=epoch_ended, bad=self._watch.bad_batches > 0)

    def fit_end(self, state: State, logger: Logger) -> None:
        """Saves the end, if it is not saved yet, and waits for it."""
        self._fitting = False
        self._watch.between_batches()
        if self._watch.bad_batches:
            raise NonfiniteError(f"{self._watch.describe()}. The run's end is not saved; {ADVICE}")
        self.checkpoints.wait(logger)
        step = state.timestamp.batch.value
        while step > 0 and self.checkpoints.saved_step != step:  # the engine raises after `max_failures`
            self.checkpoints.save(state, logger)
        self._watch.signals.remove()

    def close(self, state: State, logger: Logger) -> None:
        if self._checkpoints is not None:
            self._checkpoints.close()
        self._watch.signals.remove()
        self._restore_loading()  # last: it fails while Python ends, in a program that has not closed its trainer

    # Stopping and rewinding

    def _stop(self, reason: str, state: State, logger: Logger) -> None:
        """Saves the last batch, as far as the grace period allows, and ends the process with exit code 75."""
        step = state.timestamp.batch.value
        self.checkpoints.wait(logger)
        if self._watch.bad_batches:
            outcome = f"batch {step} is not saved, because it was not finite"
        elif step == 0:
            outcome = "no batch was trained yet"
        elif step == self.checkpoints.saved_step or self.checkpoints.save(state, logger):
            outcome = f"batch {step} is saved"
        else:
            outcome = f"batch {step} could not be saved"
        if self._watch.signals.reason is not None:  # this rank received the signal
            outcome += f", {self._watch.signals.age_s:.1f} s after the signal"
        newest = self.checkpoints.committed or "none yet"
        self.checkpoints.close()
        leave(f"Stopped by {reason}: {outcome}; the newest checkpoint is {newest}. Start the run again to resume it.")

    def _rewind(self, state: State, logger: Logger) -> None:
        """Restores weights and optimizer of the last finite commit.

        Time, schedule and data continue, so that the batches in between are skipped (PaLM, 2204.02311, section 5.1).
        """
        step = state.timestamp.batch.value
        sentence = self._watch.describe()
        self.checkpoints.wait(logger)
        try:
            loaded = self.checkpoints.load(state, "auto")
        except DamagedError as error:
            raise NonfiniteError(f"{sentence}. {error}") from error
        if loaded is None:
            raise NonfiniteError(f"{sentence}. There is no checkpoint to go back to; {ADVICE}")
        self._rewound.append(loaded.step)
        if self._rewound.count(loaded.step) > REWINDS:
            raise NonfiniteError(f"{sentence}. {REWINDS} rewinds to batch {loaded.step} did not help; {ADVICE}")
        if "optim" in loaded.state:
            keep = self.config.optimizer_settings == "run"
            restore_optimizers(state, loaded.state["optim"], keep_settings=keep)
        self._watch.forget_bad_batches()
        logger.log_metrics({"checkpoint/rewound_to": loaded.step})
        skipped = f"batches {loaded.step + 1} to {step} are skipped"
        log_on_first_rank(
            log, f"{sentence}. Went back to the weights of batch {loaded.step}; {skipped}.", logging.WARNING
        )


def load_elsewhere(is_ours: Callable[[str], bool], load: Callable[[str, bool, list[str]], None]) -> Callable[[], None]:
    """Keeps Composer from reading some `load_path` until the function that is returned is called: see
    docs/explanation/design.md.

    `load_path` names the starting point of a run, or the checkpoint that `autoresume` has found.

    Args:
        is_ours: called with `load_path`; whether Composer must not read it.
        load: called instead, with `load_path`, `load_weights_only` and the names of other keys that are set.
    """
    create, original = trainer.maybe_create_object_store_from_uri, trainer.checkpoint.load_checkpoint
    ours = ""

    def create_object_store(uri: str) -> Any:
        nonlocal ours
        ours = uri if is_ours(uri) else ""
        return None if ours else create(uri)

    def load_checkpoint(path: str, *args: Any, **keys: Any) -> Any:
        if not ours:
            return original(path, *args, **keys)
        others = [f"load_{key}" for key in ("ignore_keys", "exclude_algorithms") if keys.get(key)]
        load(ours, keys.get("load_weights_only", False), others)
        return None

    def restore() -> None:
        trainer.maybe_create_object_store_from_uri, trainer.checkpoint.load_checkpoint = create, original

    trainer.maybe_create_object_store_from_uri = create_object_store
    trainer.checkpoint.load_checkpoint = load_checkpoint
    return restore
