"""Saves the state of a run to its folder and resumes the run from it; `elastic_checkpoint` decides when.

`checkpoint.engine.CheckpointEngine` reads and writes; `elastic_state` collects a state and restores it.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
import torch.distributed as torch_dist
from composer.core import State
from composer.loggers import Logger
from composer.utils import dist

from foundry_moe import __version__
from foundry_moe.callbacks.data_order import DataPosition, swaps_dataset
from foundry_moe.callbacks.elastic_state import check, collect, describe_mesh, restore
from foundry_moe.checkpoint import open_store
from foundry_moe.checkpoint.engine import CheckpointEngine, Loaded, Policy, SaveReport
from foundry_moe.checkpoint.errors import CheckpointError, MismatchError
from foundry_moe.checkpoint.ledger import Ledger
from foundry_moe.checkpoint.owners import Identity, tensors_digest
from foundry_moe.checkpoint.store import StoreOptions
from foundry_moe.launch.checkpoint_settings import FROZEN, WHERE, CheckpointConfig
from foundry_moe.models.frozen_weights import digest, frozen_names
from foundry_moe.models.native.architecture import KEY as ARCHITECTURE
from foundry_moe.models.native.architecture import architecture_of
from foundry_moe.models.same_run import check_model, describe_model, describe_training, training_changes

log = logging.getLogger(__name__)

WANDB = "wandb"  # in a checkpoint's info: the `id` of its run
SHUFFLE_SEED = "train_loader.dataset.shuffle_seed"
PROGRESS_S = (0.5, 10.0)  # after which the progress of a save that training waits for is logged, first and then
GROUP_TIMEOUT = datetime.timedelta(hours=1)  # the slowest upload of one rank that others wait for


def log_on_first_rank(log: logging.Logger, text: str, level: int = logging.INFO) -> None:
    if dist.get_global_rank() == 0:
        log.log(level, text)


class RunCheckpoints:
    """The checkpoints of one run. Its methods are collective unless they say otherwise.

    saved_step: the newest batch that was saved, resumed from or is being saved; None before the first.
    committed_step: the newest batch whose checkpoint is known to be complete.
    position: where the run is in its data.
    """

    def __init__(self, config: CheckpointConfig, state: State, group: torch_dist.ProcessGroup | None) -> None:
        """Opens the folder, which must belong to no other run.

        Args:
            group: a CPU group over all ranks for their main threads.
        """
        self.config = config
        self.saved_step: int | None = None
        self.committed_step: int | None = None
        self.position = DataPosition()
        self._group = group
        self._counts_at_save: dict[str, float] = {}
        self._prepared = False
        self._began_s = self._warned_s = float("-inf")  # of the newest save, and of the last warning that it is slow
        own = None
        if group is not None:
            # the engine's alone: it saves in a thread
            own = torch_dist.new_group(backend="gloo", timeout=GROUP_TIMEOUT)
        architecture = architecture_of(state.model)
        self._engine = CheckpointEngine(
            open_store(config.folder, config.store_options),
            group=own,
            policy=Policy(
                keep=config.keep,
                keep_every=config.keep_every_batches,
                max_failures=config.max_failures,
                asynchronous=config.asynchronous,
            ),
            info={
                "mesh": describe_mesh(state.model),
                "torch": torch.__version__,
                "foundry_moe": __version__,
                "run_name": state.run_name,
                "model": describe_model(state.model),
                "training": describe_training(state),
                **({} if (run := getattr(sys.modules.get("wandb"), "run", None)) is None else {WANDB: run.id}),
                **({} if architecture is None else {ARCHITECTURE: architecture.to_info()}),
            },
        )
        self._identity = _identity(state)
        self._engine.check_owner(self._identity)
        self._frozen = frozenset() if config.save_frozen else frozenset(frozen_names(state.model))
        if self._frozen:
            self._engine.info[FROZEN] = _describe_base(state, group)

    @property
    def committed(self) -> str | None:
        """Where the newest complete checkpoint is, as text; None before the first. Not collective."""
        return None if self.committed_step is None else f"{self.config.folder} (batch {self.committed_step})"

    def close(self) -> None:
        """Not collective."""
        # after a failure Composer closes callbacks during interpreter shutdown, when a store can start no threads
        with contextlib.suppress(RuntimeError):
            self._engine.close()

    # Resuming

    def load(self, state: State, resume: str | int, found: Callable[[], None] = lambda: None) -> Loaded | None:
        """Reads a checkpoint into the model, and returns the rest of the state checked; None if there is none.

        Args:
            found: called before the checkpoint is read.
        """
        return _read(self._engine, state, resume, self._group, found=found)

    def resume(self, state: State, loaded: Loaded, logger: Logger) -> None:
        """Restores a loaded state, and logs the differences between its training and this run's.

        Raises:
            MismatchError: the experts of the checkpoint compute a different function.
        """
        keep = self.config.optimizer_settings == "run"
        self._engine.info["training"] = _restore(state, loaded, logger, keep_settings=keep)
        self.saved_step = self.committed_step = loaded.step
        self._counts_at_save = _counts(state)
        self._log_loaded(loaded, logger)

    def _log_loaded(self, loaded: Loaded, logger: Logger) -> None:
        traffic = loaded.traffic
        totals = self._sums([traffic.bytes_fetched, traffic.bytes_sent])
        logger.log_metrics(
            {
                "checkpoint/resumed_step": loaded.step,
                "checkpoint/load_bytes_fetched": totals[0],
                "checkpoint/load_bytes_sent": totals[1],
                "checkpoint/load_seconds": traffic.seconds,
            }
        )
        times = totals[0] / max(int(loaded.summary.get("bytes", 0)), 1)
        log_on_first_rank(
            log,
            f"Resumed at batch {loaded.step} from {self.config.folder}, written by {loaded.info.get('mesh')}: "
            f"{totals[0] / 1e6:.1f} MB fetched ({times:.2f} times the checkpoint), {totals[1] / 1e6:.1f} MB sent "
            f"between ranks, {traffic.seconds:.1f} s.",
        )

    # Saving

    def start(self, state: State) -> None:
        """Makes this run the owner of the folder. Counts `interval` from here if it has not resumed."""
        self._engine.acquire(self._identity)
        self._counts_at_save = self._counts_at_save or _counts(state)

    def save_if_due(self, state: State, logger: Logger, *, epoch_ended: bool, bad: bool) -> None:
        """Saves in the background once per `interval`; while some rank is saving, the save waits for a later batch.

        Args:
            bad: the values of the newest batches are not finite, so that nothing is saved.
        """
        self.poll(logger)
        if state.timestamp.batch.value == self.saved_step or not self._due(state, epoch_ended):
            if not self._prepared:
                self._engine.prepare(collect(state, left_out=self._frozen))
                self._prepared = True
            return
        if bad:
            return  # still due after the next batch
        if self._progress()[0]:
            self._warn_slow()
            return
        self.poll(logger)
        self._counts_at_save = _counts(state)
        logger.log_metrics({"checkpoint/seconds_blocked": self._save(state)})

    def save(self, state: State, logger: Logger) -> bool:
        """Saves and waits for the commit; returns whether it succeeded."""
        self._save(state)
        report = self.wait(logger)
        assert report is not None
        return report.error is None

    def poll(self, logger: Logger) -> None:
        """Logs a save that has completed."""
        self._log_saved(self._engine.poll(), logger)

    def wait(self, logger: Logger) -> SaveReport | None:
        """Waits for the save in progress, and logs its progress and its end."""
        self._engine.join(PROGRESS_S[0])
        while (progress := self._progress())[0]:
            _, sent_bytes, save_bytes = progress
            unit, size = ("GB", 1e9) if save_bytes >= 1e9 else ("MB", 1e6)
            log_on_first_rank(
                log,
                f"Waiting for the checkpoint of batch {self.saved_step}: {sent_bytes / size:.1f} of "
                f"{save_bytes / size:.1f} {unit} are written to {self.config.folder}.",
            )
            self._engine.join(PROGRESS_S[1])
        report = self._engine.wait()
        self._log_saved(report, logger)
        return report

    def _save(self, state: State) -> float:
        counts, loss = _counts(state), (state.total_loss_dict or {}).get("loss/train/total")
        summary = {
            "epoch": counts["ep"],
            "sample": counts["sp"],
            "token": counts["tok"],
            "training_seconds": counts["sec"],
        }
        if loss is not None:
            summary["loss"] = loss
        self._prepared = True
        self._began_s = time.monotonic()
        self.saved_step = step = state.timestamp.batch.value
        saved = collect(state, left_out=self._frozen, position=self.position)
        return self._engine.save(saved, step, summary)

    def _due(self, state: State, epoch_ended: bool) -> bool:
        """The same on all ranks: Composer's timestamp is."""
        every = self.config.every
        now, last = _counts(state)[every.unit], self._counts_at_save.get(every.unit, 0.0)
        if every.unit == "sec":
            return now - last >= every.amount
        return now // every.amount > last // every.amount and (epoch_ended or every.unit != "ep")

    def _progress(self) -> list[int]:
        """How many ranks are saving, the bytes that all have sent of the newest save, and the bytes of all."""
        return self._sums([self._engine.busy, *self._engine.progress])

    def _sums(self, mine: list[int]) -> list[int]:
        """Sums over ranks."""
        sums = torch.tensor(mine, dtype=torch.int64)
        if self._group is not None:
            torch_dist.all_reduce(sums, group=self._group)
        return sums.tolist()

    def _warn_slow(self) -> None:
        """At most once per minute."""
        now_s = time.monotonic()
        if now_s - self._warned_s >= 60:
            self._warned_s = now_s
            log_on_first_rank(
                log,
                f"The save of batch {self.saved_step} is still in progress after {now_s - self._began_s:.0f} s, and "
                f"the next one waits for it: {self.config.folder} is slow, or interval ({self.config.interval}) is "
                f"short. The newest complete checkpoint: {self.committed or 'none yet'}.",
                logging.WARNING,
            )

    def _log_saved(self, report: SaveReport | None, logger: Logger) -> None:
        if report is None:
            return
        if report.error is None:
            self.committed_step = report.step
        else:
            self.saved_step = None
        logger.log_metrics(
            {
                "checkpoint/save_seconds": report.seconds_total,
                "checkpoint/save_bytes_this_rank": report.bytes_staged,
                "checkpoint/failures_in_a_row": self._engine.failures_in_a_row,
            }
        )
        if report.error is None:
            log_on_first_rank(
                log,
                f"Checkpoint of batch {report.step} committed to {self.config.folder}: blocked "
                f"{report.seconds_blocked:.3f} s, {report.seconds_total:.1f} s in all.",
            )


def start_from(folder: str, config: CheckpointConfig, state: State, logger: Logger, *, weights_only: bool) -> None:
    """Starts a run from the newest commit of another run's folder, which is only read.

    A run that takes the weights alone may differ in what its model computes, with a line for each difference.
    """
    world_size = dist.get_world_size()
    group = torch_dist.new_group(backend="gloo", timeout=GROUP_TIMEOUT) if world_size > 1 else None
    engine = CheckpointEngine(open_store(folder, config.store_options), group=group)
    loaded = _read(engine, state, "auto", group, weights_only=weights_only)
    assert loaded is not None, "has_commits was asked"
    if not weights_only:
        _restore(state, loaded, logger, keep_settings=config.optimizer_settings == "run")
    for sentence in training_changes(describe_model(state.model), loaded.info.get("model")) if weights_only else ():
        log_on_first_rank(log, f"model.{sentence}", logging.WARNING)
    what = "The weights" if weights_only else "Weights, optimizer and progress"
    log_on_first_rank(log, f"{what} are those of batch {loaded.step} in {folder}.")


def _read(
    engine: CheckpointEngine,
    state: State,
    resume: str | int,
    group: torch_dist.ProcessGroup | None,
    *,
    found: Callable[[], None] = lambda: None,
    weights_only: bool = False,
) -> Loaded | None:
    """See `RunCheckpoints.load`."""
    here: dict[str, Any] = {}

    def target(info: Mapping[str, Any]) -> dict[str, Any]:
        found()
        left_out: Collection[str] = ()
        if isinstance(info.get(FROZEN), Mapping):
            _check_base(_describe_base(state, group), info[FROZEN])
            left_out = frozen_names(state.model)
        here.update(collect(state, weights_only=weights_only or bool(info.get("weights_only")), left_out=left_out))
        return here

    def check_loaded(loaded: Loaded) -> None:
        samples = _samples_of(state, loaded.info.get("world_size"))
        check(loaded.state, here, step=loaded.step, samples=samples)

    return engine.load(
        target,
        resume,
        check=check_loaded,
        sections=("model",) if weights_only else None,
    )


def _restore(state: State, loaded: Loaded, logger: Logger, *, keep_settings: bool) -> dict[str, Any]:
    """See `RunCheckpoints.resume`. Returns the description of the training that is in effect."""
    # the engine has compared the tensors already, and named those that do not fit
    check_model(describe_model(state.model), loaded.info.get("model"))
    configured = describe_training(state)
    data = dict((loaded.state.get("composer") or {}).get("dataset_state") or {})  # Composer empties it
    train, samples = data.get("train") or {}, _samples_of(state, dist.get_world_size())
    if samples is not None and (train.get("sample_in_epoch") or 0) > samples:
        train["sample_in_epoch"] = samples  # at the end of an epoch that was padded for more ranks
    restore(state, loaded.state, logger, keep_settings=keep_settings)
    _skip_in_new_batches(state, configured, loaded.info.get("training"))
    in_effect = describe_training(state)
    if SHUFFLE_SEED in in_effect and (seed := (data.get("train") or {}).get("shuffle_seed")) is not None:
        in_effect[SHUFFLE_SEED] = seed  # streaming uses the checkpoint's when it makes an iterator
    if "composer" in loaded.state:
        for sentence in training_changes(configured, loaded.info.get("training"), in_effect):
            log_on_first_rank(log, sentence, logging.WARNING)
    return in_effect


def _skip_in_new_batches(state: State, here: Mapping[str, Any], there: object) -> None:
    """With another batch size, counts the batches that Composer skips in a loader without a position of its own.

    Args:
        here, there: `describe_training` of this run and of the checkpoint.

    Raises:
        MismatchError: the samples that were read are no whole number of this run's batches.
    """
    key = "global_train_batch_size"
    new, old = here.get(key), there.get(key) if isinstance(there, Mapping) else None
    if "train" in state.dataset_resumption or type(new) is not int or type(old) is not int or new == old:
        return
    samples = state.timestamp.sample_in_epoch.value
    if samples % new:
        raise MismatchError(
            f"{key} ({new}): the checkpoint has read {samples} samples of its epoch in batches of {old}, and this "
            f"train_loader can only skip whole batches: use {old}, or a divisor of {samples}, until the epoch ends"
        )
    state.timestamp = state.timestamp.copy(batch_in_epoch=samples // new)


def has_commits(folder: str, options: StoreOptions) -> bool:
    """Collective; rank 0 looks. Whether a folder holds a commit."""
    found = [False]
    if dist.get_global_rank() == 0 and _may_hold_commits(folder):
        found = [bool(Ledger(open_store(folder, options)).newest_first())]
    dist.broadcast_object_list(found)
    return found[0]


def _may_hold_commits(folder: str) -> bool:
    return "://" in folder or os.path.isdir(os.path.expanduser(folder))


def wandb_id(config: CheckpointConfig) -> str | None:
    """The id of the run of wandb that the checkpoint to resume from records. Not collective."""
    if config.resume == "never" or not _may_hold_commits(config.folder):
        return None
    with contextlib.suppress(CheckpointError, OSError):  # reported by all ranks when they load
        found = Ledger(open_store(config.folder, config.store_options)).choose(config.resume).found
        recorded = None if found is None else found.manifest.info.get(WANDB)
        return recorded if isinstance(recorded, str) else None
    return None


def _describe_base(state: State, group: torch_dist.ProcessGroup | None) -> dict[str, Any]:
    """The digest of the frozen weights and where they were loaded from, for a checkpoint's info."""
    left_out, tensors = frozen_names(state.model), collect(state, weights_only=True)["model"]
    frozen = {name: tensor for name, tensor in tensors.items() if name in left_out}
    named = (getattr(getattr(module, "config", None), "_name_or_path", "") for module in state.model.modules())
    place = str(state.load_path or "") or next((str(name) for name in named if name), "")
    return {"digest": digest(frozen, group), "tensors": len(frozen), "from": place}


def _identity(state: State) -> Identity:
    """The identity of this run, equal in all restarts. A name that Composer generated changes with each."""
    generated = re.fullmatch(r"[0-9]{10}-[a-z]+(-[a-z]+)*", state.run_name)
    tensors = collect(state, weights_only=True)["model"]
    return Identity(run_name="" if generated else state.run_name, model=tensors_digest(tensors))


def _check_base(here: Mapping[str, Any], there: Mapping[str, Any]) -> None:
    """Raises MismatchError if a checkpoint was written with other frozen weights than this run has."""
    if here["digest"] == there.get("digest"):
        return
    raise MismatchError(
        f"the checkpoint leaves out {there.get('tensors')} frozen tensors, loaded from {there.get('from')!r} "
        f"(digest {there.get('digest')}), and this run has {here['tensors']}, from {here['from']!r} (digest "
        f"{here['digest']}): start it from the same weights, with {WHERE}.save_frozen: false, or give it another folder"
    )


def _samples_of(state: State, ranks: object) -> int | None:
    """The most samples that some ranks count in an epoch of a streaming dataset, which gives equally many to each.

    None if it is not known, as with callbacks that have not yet swapped the dataset when a checkpoint is loaded.
    """
    size = getattr(getattr(state.train_dataloader, "dataset", None), "epoch_size", None)
    if not isinstance(size, int) or type(ranks) is not int or ranks < 1 or any(map(swaps_dataset, state.callbacks)):
        return None
    return -(-size // ranks) * ranks


def _counts(state: State) -> dict[str, float]:
    """By unit of `interval`."""
    timestamp = state.timestamp
    return {
        "ba": timestamp.batch.value,
        "ep": timestamp.epoch.value,
        "sp": timestamp.sample.value,
        "tok": timestamp.token.value,
        "sec": timestamp.total_wct.total_seconds() if timestamp.total_wct else 0.0,
    }
