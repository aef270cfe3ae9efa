"""The Composer callback `elastic_checkpoint`: when to save, when to resume, and what the user is told.

The work is `checkpoint.engine.CheckpointEngine`'s; what a state consists of is in `elastic_state`.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import re
import sys
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as torch_dist
from composer.callbacks import CheckpointSaver
from composer.core import State
from composer.loggers import Logger
from composer.utils import dist, format_name_with_dist
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

from foundry_moe import __version__
from foundry_moe.callbacks.elastic_state import check, collect, describe_mesh, reseed, restore
from foundry_moe.callbacks.resume_times import ResumeTimes
from foundry_moe.callbacks.starting_point import StartingPoint
from foundry_moe.callbacks.stop_signals import leave
from foundry_moe.callbacks.watch import RunWatch, Verdict, WatchingCallback
from foundry_moe.checkpoint import fault_injection
from foundry_moe.checkpoint.engine import CheckpointEngine, Loaded, Policy, SaveReport
from foundry_moe.checkpoint.errors import DamagedError, NonfiniteError
from foundry_moe.checkpoint.ledger import Ledger
from foundry_moe.checkpoint.owners import Identity, tensors_digest
from foundry_moe.checkpoint.settings import WHERE, CheckpointConfig, checkpoint_config
from foundry_moe.checkpoint.stores import is_remote, open_store
from foundry_moe.models.native.architecture import KEY as ARCHITECTURE
from foundry_moe.models.native.architecture import architecture_of
from foundry_moe.models.same_run import check_model, describe_model, describe_training, training_changes

log = logging.getLogger(__name__)

ADVICE = "lower the learning rate or look at the data"
REWINDS = 3  # to one checkpoint
GROUP_TIMEOUT = datetime.timedelta(hours=1)  # the slowest upload of one rank that others wait for


class ElasticCheckpoint(WatchingCallback):
    """Saves the run in the background, as one commit of all ranks, and resumes it on any mesh.

    Under `callbacks` in YAML:

        elastic_checkpoint: {folder: s3://bucket/run, interval: 30m, keep: 3}

    Keys, with their defaults: folder (needed), interval 30m, keep 3, keep_every null, resume auto, async true,
    max_failures 3, reseed true, stale_after 6h, endpoint_url null, region null, profile null,
    timeout 60s, save_timeout 30m, grace 25s, signals [SIGTERM, SIGUSR1], max_nonfinite 3, on_nonfinite stop. See
    docs/checkpoints.md.

    On one of `signals`, to any rank, all ranks finish the batch, save and exit with code 75. After `max_nonfinite`
    batches in a row whose loss, gradients or weights were not finite the run stops, or goes back to the last finite
    checkpoint and on with the next data (`on_nonfinite: rewind`).

    With `save_folder`, Composer goes on writing its own checkpoints too; both to one folder is an error. With
    `load_path`, that is a starting point: it counts only when the folder holds no commit. `autoresume` and `resume:
    auto` that both found something is an error.

    Raises:
        ValueError: an unknown key or an impossible value.
    """

    def __init__(self, **keys: Any) -> None:
        self.config: CheckpointConfig = checkpoint_config(keys)
        self.resumed_from: int | None = None
        self._engine: CheckpointEngine | None = None
        self._talk: torch_dist.ProcessGroup | None = None
        self._last: dict[str, float] = {}  # counts of the newest save, by unit
        self._prepared = False
        self._saved_step: int | None = None
        self._starting_point = StartingPoint()
        self._busy = False  # whether some rank was saving when this batch began
        self._fitting = False
        self._rewound: list[int] = []  # steps that the run went back to
        self._times: ResumeTimes | None = ResumeTimes()  # until the first batch
        self._mark("imports and process group")
        limit = self.config.max_nonfinite
        super().__init__(
            RunWatch(signals=self.config.signals, grace_s=self.config.grace_s, looks_at_numbers=limit is not None)
        )

    # Resuming

    def init(self, state: State, logger: Logger) -> None:
        """Checks what stands beside this callback, and that the store can be reached, before anything slow."""
        self._mark("data and model")
        if sum(isinstance(callback, ElasticCheckpoint) for callback in state.callbacks) > 1:
            raise ValueError(f"{WHERE} is there twice: one run has one folder")
        for callback in state.callbacks:
            if isinstance(callback, CheckpointSaver):
                _check_saver(callback, self.config, state.run_name)
        hook = fault_injection.hook_from_environment(_fault_of_first_life(), dist.get_global_rank())
        fault_injection.hook = hook or fault_injection.hook
        store = open_store(self.config.folder, self.config.store_options)
        if dist.get_global_rank() == 0:
            store.check()

    def has_commits(self) -> bool:
        """Whether this run goes on from a commit. Collective; rank 0 looks."""
        found = [False]
        if dist.get_global_rank() == 0 and self.config.resume != "never":
            store = open_store(self.config.folder, self.config.store_options)
            found = [bool(Ledger(store).newest_first())]
        dist.broadcast_object_list(found)
        return found[0]

    def before_load(self, state: State, logger: Logger) -> None:
        self._starting_point.skip_if_committed(open_store(self.config.folder, self.config.store_options))

    def after_load(self, state: State, logger: Logger) -> None:
        """Makes the folder this run's, finds the newest good commit, and puts it in place of what Composer has."""
        self._mark("trainer and FSDP")
        self._starting_point.restore()
        self._engine = self._make_engine(state)
        self._engine.claim(_identity(state))
        if self.config.resume == "never" and dist.get_global_rank() == 0:
            log.info("%s: a new run, because resume is never", self.config.folder)
        loaded = self._load(state, self.config.resume)
        if loaded is None:
            return
        self._mark("reading it")
        autoresumed = any(
            str(state.load_path or "").startswith(place)
            for callback in state.callbacks
            if isinstance(callback, CheckpointSaver)
            for place in _places(callback, state.run_name)
        )
        if state.load_path is not None and (autoresumed or isinstance(self.config.resume, int)):
            raise ValueError(
                f"load_path or autoresume ({state.load_path}) and {WHERE}.resume ({self.config.resume}) both name a "
                "checkpoint to go on from: remove one of them"
            )
        # the reader has compared the tensors already, and named those that do not fit
        check_model(describe_model(state.model), loaded.info.get("model"))
        asked = describe_training(state)
        restore(state, loaded.state, logger)
        holds = describe_training(state)
        self._engine.info["training"] = holds
        if dist.get_global_rank() == 0 and "composer" in loaded.state:
            for sentence in training_changes(asked, loaded.info.get("training"), holds):
                log.warning("%s", sentence)
        self.resumed_from = loaded.step
        self._saved_step = loaded.step
        self._last = _counts(state)
        self._tell_loaded(loaded, logger)

    def _load(self, state: State, resume: str | int) -> Loaded | None:
        assert self._engine is not None
        here: dict[str, Any] = {}

        def target(info: Mapping[str, Any]) -> dict[str, Any]:
            self._mark("finding the checkpoint")
            here.update(collect(state, weights_only=bool(info.get("weights_only"))))
            return here

        return self._engine.load(target, resume, check=lambda brought: check(brought, here))

    def _make_engine(self, state: State) -> CheckpointEngine:
        group = None
        if torch_dist.is_initialized() and dist.get_world_size() > 1:
            timeout = max(GROUP_TIMEOUT, datetime.timedelta(seconds=2 * self.config.save_timeout_s))
            group = torch_dist.new_group(backend="gloo", timeout=timeout)
            self._talk = torch_dist.new_group(backend="gloo", timeout=timeout)
        architecture = architecture_of(state.model)
        return CheckpointEngine(
            open_store(self.config.folder, self.config.store_options),
            group=group,
            policy=Policy(
                keep=self.config.keep,
                keep_every=self.config.keep_every_batches,
                max_failures=self.config.max_failures,
                asynchronous=self.config.asynchronous,
                stale_s=self.config.stale_s,
                save_timeout_s=self.config.save_timeout_s,
            ),
            info={
                "mesh": describe_mesh(state.model),
                "torch": torch.__version__,
                "foundry_moe": __version__,
                "run_name": state.run_name,
                "model": describe_model(state.model),
                "training": describe_training(state),
                **({} if architecture is None else {ARCHITECTURE: architecture.to_info()}),
            },
        )

    def _tell_loaded(self, loaded: Loaded, logger: Logger) -> None:
        traffic = loaded.traffic
        totals = [traffic.bytes_fetched, traffic.bytes_sent]
        if self._talk is not None:
            sums = torch.tensor(totals, dtype=torch.int64)
            torch_dist.all_reduce(sums, group=self._talk)
            totals = sums.tolist()
        logger.log_metrics(
            {
                "checkpoint/resumed_step": loaded.step,
                "checkpoint/load_bytes_fetched": totals[0],
                "checkpoint/load_bytes_sent": totals[1],
                "checkpoint/load_seconds": traffic.seconds,
            }
        )
        if dist.get_global_rank() == 0:
            size = int(loaded.summary.get("bytes", 0))
            log.warning(
                "Resumed at batch %d from %s, written by %s: %.1f MB fetched (%.2f times the checkpoint), %.1f MB "
                "sent between ranks, %.1f s.",
                loaded.step,
                self.config.folder,
                loaded.info.get("mesh"),
                totals[0] / 1e6,
                totals[0] / max(size, 1),
                totals[1] / 1e6,
                traffic.seconds,
            )

    def _mark(self, part: str) -> None:
        if self._times is not None:
            self._times.mark(part)

    def _tell_times(self, logger: Logger) -> None:
        """Once, after the first batch: where the time of a resume went."""
        self._mark("first batch")
        times, self._times = self._times, None
        if times is None or self.resumed_from is None:
            return
        logger.log_metrics({"checkpoint/resume_seconds": times.total_s})
        if dist.get_global_rank() == 0:
            log.warning("First batch after the resume, since this process began: %s.", times)

    @property
    def latest_checkpoint(self) -> str | None:
        """Where the newest checkpoint of this run is, for a person to read; None before the first."""
        return None if self._saved_step is None else f"{self.config.folder} (batch {self._saved_step})"

    # Saving

    def fit_start(self, state: State, logger: Logger) -> None:
        if not self._last:
            self._last = _counts(state)
        self._watch.start(state)
        self._fitting = True

    def after_dataloader(self, state: State, logger: Logger) -> None:
        if self.config.reseed:
            reseed(state.rank_zero_seed, state.timestamp.batch.value, dist.get_global_rank())

    def batch_start(self, state: State, logger: Logger) -> None:
        """All ranks agree whether to train this batch; see `RunWatch.before_batch`."""
        assert self._engine is not None
        verdict = self._watch.before_batch(state, busy=self._engine.busy)
        self._busy = verdict.busy
        self._act_on(verdict, state, logger)

    def eval_batch_start(self, state: State, logger: Logger) -> None:
        if self._fitting:  # else nothing was trained that could be lost
            verdict = self._watch.elsewhere()
            if verdict.stop is not None:
                self._stop(verdict, state, logger)

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        self._tell_times(logger)
        self._visit(state, logger, epoch_ended=False)

    def epoch_checkpoint(self, state: State, logger: Logger) -> None:
        self._visit(state, logger, epoch_ended=True)

    def fit_end(self, state: State, logger: Logger) -> None:
        """Saves the end, if it is not saved yet, and waits for it."""
        assert self._engine is not None
        self._fitting = False
        verdict = self._watch.elsewhere()
        if verdict.bad_batches:
            raise NonfiniteError(f"{self._watch.what_happened(verdict)}. The run's end is not saved; {ADVICE}")
        self._tell(self._engine.wait(), logger)
        while self._saved_step != state.timestamp.batch.value and state.timestamp.batch.value > 0:
            self._save(state)
            self._tell(self._engine.wait(), logger)
        self._watch.signals.remove()

    # Stopping, and going back

    def _act_on(self, verdict: Verdict, state: State, logger: Logger) -> None:
        """What a verdict leads to; the same on all ranks."""
        limit = self.config.max_nonfinite
        if verdict.stop is not None:
            self._stop(verdict, state, logger)
        if limit is not None and verdict.bad_batches >= limit:
            if self.config.on_nonfinite == "stop":
                raise NonfiniteError(
                    f"{self._watch.what_happened(verdict)}. The newest checkpoint with finite weights stays in "
                    f"{self.config.folder}; {ADVICE}, or set {WHERE}.on_nonfinite: rewind"
                )
            self._rewind(verdict, state, logger)

    def _stop(self, verdict: Verdict, state: State, logger: Logger) -> None:
        """Saves what is trained, within the grace period or not at all, and ends the process."""
        assert self._engine is not None
        step = state.timestamp.batch.value
        self._tell(self._engine.wait(), logger)
        if verdict.bad_batches:
            told = f"batch {step} is not saved, for it was not finite"
        elif step in (0, self._saved_step):
            told = f"batch {step} was the newest that was saved" if step else "nothing was trained yet"
        else:
            self._save(state)
            report = self._engine.wait()
            self._tell(report, logger)
            assert report is not None
            told = f"batch {step} is saved" if report.error is None else f"batch {step} could not be saved"
        if self._watch.signals.reason is not None:  # this rank knows when it came
            told += f", {self._watch.signals.age_s:.1f} s after the signal"
        sentence = (
            f"Stopped by {verdict.stop}: {told}; the newest checkpoint is {self.latest_checkpoint or 'none yet'}. "
            "Start the run again, and it goes on."
        )
        self._engine.close()
        if dist.get_global_rank() == 0:
            print(sentence, file=sys.stderr, flush=True)
        leave(sentence)

    def _rewind(self, verdict: Verdict, state: State, logger: Logger) -> None:
        """Weights and optimizer of the last finite commit; time, schedule and data go on, so what lies between is
        skipped, as large runs do (PaLM, section 5.1)."""
        assert self._engine is not None
        step = state.timestamp.batch.value
        sentence = self._watch.what_happened(verdict)
        self._tell(self._engine.wait(), logger)
        try:
            loaded = self._load(state, "auto")
        except DamagedError as error:
            raise NonfiniteError(f"{sentence}. {error}") from error
        if loaded is None:
            raise NonfiniteError(f"{sentence}. There is no checkpoint to go back to; {ADVICE}")
        self._rewound.append(loaded.step)
        if self._rewound.count(loaded.step) > REWINDS:
            raise NonfiniteError(f"{sentence}. {REWINDS} rewinds to batch {loaded.step} did not help; {ADVICE}")
        if "optim" in loaded.state:
            for optimizer in state.optimizers:
                set_optimizer_state_dict(state.model, optimizer, loaded.state["optim"])
        self._watch.count.forget()
        logger.log_metrics({"checkpoint/rewound_to": loaded.step})
        if dist.get_global_rank() == 0:
            log.warning(
                "%s. Went back to the weights of batch %d; batches %d to %d are skipped.",
                sentence,
                loaded.step,
                loaded.step + 1,
                step,
            )

    def close(self, state: State, logger: Logger) -> None:
        self._starting_point.restore()
        self._watch.signals.remove()
        if self._engine is not None:
            # after a failure Composer closes while the interpreter ends: it starts no threads, which a store needs
            with contextlib.suppress(RuntimeError):
                self._engine.close()

    def _visit(self, state: State, logger: Logger, *, epoch_ended: bool) -> None:
        assert self._engine is not None
        self._tell(self._engine.poll(), logger)
        step = state.timestamp.batch.value
        if step == self._saved_step or not self._due(state, epoch_ended):
            if not self._prepared:
                self._engine.prepare(collect(state))
                self._prepared = True
            return
        if (self._busy and self._someone_is_busy()) or self._watch.count.count:
            return  # due still, and looked at again after the next batch
        self._tell(self._engine.poll(), logger)
        self._last = _counts(state)
        blocked = self._save(state)
        logger.log_metrics({"checkpoint/seconds_blocked": blocked})

    def _save(self, state: State) -> float:
        assert self._engine is not None
        timestamp, loss = state.timestamp, (state.total_loss_dict or {}).get("loss/train/total")
        summary = {
            "epoch": timestamp.epoch.value,
            "sample": timestamp.sample.value,
            "token": timestamp.token.value,
            **({} if loss is None else {"loss": loss}),
            "training_seconds": timestamp.total_wct.total_seconds() if timestamp.total_wct else 0.0,
        }
        self._prepared = True
        self._saved_step = timestamp.batch.value
        return self._engine.save(collect(state), timestamp.batch.value, summary)

    def _due(self, state: State, epoch_ended: bool) -> bool:
        """The same on all ranks: Composer's timestamp is."""
        every = self.config.every
        now, last = _counts(state)[every.unit], self._last.get(every.unit, 0.0)
        if every.unit == "s":
            return now - last >= every.amount
        return now // every.amount > last // every.amount and (epoch_ended or every.unit != "ep")

    def _someone_is_busy(self) -> bool:
        assert self._engine is not None
        most = torch.tensor([int(self._engine.busy), self._engine.failures_so_far])
        if self._talk is not None:
            torch_dist.all_reduce(most, op=torch_dist.ReduceOp.MAX, group=self._talk)
        busy, failures = most.tolist()
        if busy:
            self._engine.give_up(failures)
        return bool(busy)

    def _tell(self, report: SaveReport | None, logger: Logger) -> None:
        if report is None:
            return
        assert self._engine is not None
        if report.error is not None:
            self._saved_step = None
        logger.log_metrics(
            {
                "checkpoint/save_seconds": report.seconds_total,
                "checkpoint/save_bytes_this_rank": report.bytes_staged,
                "checkpoint/failures_in_a_row": self._engine.failures_in_a_row,
            }
        )
        if report.error is None and dist.get_global_rank() == 0:
            log.info(
                "Checkpoint of batch %d committed to %s: blocked %.3f s, %.1f s in all.",
                report.step,
                self.config.folder,
                report.seconds_blocked,
                report.seconds_total,
            )


def _identity(state: State) -> Identity:
    """What is the same in all lives of this run. A name that Composer made up is another in each."""
    made_up = re.fullmatch(r"[0-9]{10}-[a-z]+(-[a-z]+)*", state.run_name)
    tensors = collect(state, weights_only=True)["model"]
    return Identity(run_name="" if made_up else state.run_name, model=tensors_digest(tensors))


def _counts(state: State) -> dict[str, float]:
    timestamp = state.timestamp
    return {
        "ba": timestamp.batch.value,
        "ep": timestamp.epoch.value,
        "sp": timestamp.sample.value,
        "tok": timestamp.token.value,
        "s": timestamp.total_wct.total_seconds() if timestamp.total_wct else 0.0,
    }


def _places(saver: CheckpointSaver, run_name: str) -> list[str]:
    """Where Composer's own callback writes, and what its names begin with when it resumes by itself."""
    if saver.remote_uploader is not None:
        return [format_name_with_dist(str(saver.remote_uploader.remote_folder), run_name).rstrip("/")]
    return [format_name_with_dist(str(saver.folder), run_name).rstrip("/")]


def _check_saver(saver: CheckpointSaver, config: CheckpointConfig, run_name: str) -> None:
    """Both write: allowed, at twice the cost, but not to one place."""
    ours = config.folder.removeprefix("file://").rstrip("/")
    for place in _places(saver, run_name):
        if is_remote(ours) or is_remote(place):
            same = place == ours
        else:
            same = os.path.realpath(place) == os.path.realpath(os.path.expanduser(ours))
        if same:
            raise ValueError(f"save_folder and {WHERE}.folder are both {config.folder}: give each a folder of its own")
    if dist.get_global_rank() == 0:
        log.warning(
            "save_folder and elastic_checkpoint both write checkpoints: remove save_folder unless you want Composer's"
        )


def _fault_of_first_life() -> str | None:
    """A test's fault strikes the first life of a run only, and not those after the launcher's restarts."""
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0:
        return None
    return os.environ.get("FOUNDRY_MOE_FAULT")
