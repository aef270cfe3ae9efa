"""The keys of `callbacks.elastic_checkpoint`, and every check of them that needs no store.

This module imports neither torch nor Composer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from foundry_moe.checkpoint.errors import without_secrets
from foundry_moe.checkpoint.store import FORM, StoreOptions, endpoint_problem, folder_problem
from foundry_moe.schema import MistakesError, UserError, caught, form, from_mapping, raise_mistakes, sentences_of
from foundry_moe.times import COUNTS, Time, parse_time

RESTART = 75  # exit code (EX_TEMPFAIL) of a run that was asked to stop: a restart loses nothing
SIGNALS = ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGINT", "SIGXCPU")  # that can ask a run to stop
WHERE = "callbacks.elastic_checkpoint"
FROZEN = "frozen"  # key in a checkpoint's info: digest and source of the frozen weights that it omits
_FORMS = {
    None: "must be a time (90s, 30m, 2h) or a whole count (500ba, 1ep, 1000000tok)",
    "sec": "must be a time, for example 60s or 6h",
    "ba": "must be in batches, for example 1000ba",
}


def parse_interval(text: str, where: str, unit: str | None = None) -> Time:
    """Reads `30m`, `500ba`, `1ep`, `2h`, `1000000tok`. `unit`: the only one that is valid, `sec` or `ba`."""
    time = parse_time(text)
    units = (unit,) if unit else ("sec", *COUNTS)
    if time is None or time.unit not in units or time.amount <= 0 or (time.unit != "sec" and time.amount % 1):
        raise UserError(f"{where} ({text}) {_FORMS[unit]}")
    return time


@dataclass(frozen=True)
class CheckpointConfig:
    """The keys of `elastic_checkpoint`.

    Attributes:
        folder: `s3://bucket/prefix`, `gs://bucket/prefix`, `az://container/prefix`, or a path that all nodes see. One
            run, one folder.
        interval: a time (`90s`, `30m`, `2h`) or a count (`500ba`, `1ep`, `1000000tok`, `4096sp`). The end of training
            is always saved.
        keep: how many of the newest checkpoints stay; applied after each save, when a run begins to train, and before a
            save for which a file system lacks room.
        keep_every: `1000ba`: the first checkpoint at or after each multiple is never deleted.
        resume: auto (the newest that is good, or a new run) | never (the folder must be empty) | a step, from which the
            run forks: restarts then continue from the fork's own newest.
        optimizer_settings: checkpoint | run: whose learning rate, betas and weight decay hold after a resume.
        asynchronous: true uploads in the background; false waits for every save. `async` in YAML.
        max_failures: training stops after this many failed saves in a row.
        save_frozen: false omits parameters that are not trained, and records their digest and source. A resume loads
            them from that source and refuses other weights.
        endpoint_url: address of a store other than the cloud provider's own.
        region: of S3, as boto3 takes it; null follows AWS_* variables and profiles.
        profile: as region.
        timeout: limit for a connection attempt (10 s at most), for a silence of the store, and for each attempt at a
            whole request (plus the time of its bytes at 64 KiB/s; on `s3://` up to twice the sum).
        signals: those that stop the run with a save, whichever rank gets one; a second SIGINT (Ctrl-C) ends it at once.
        grace: time from one of `signals` until launchers end the remaining processes; slightly less than the cluster
            grants.
        max_nonfinite: number of batches in a row with a loss, gradients or weights that are not finite, after which
            `on_nonfinite` applies; null disables the check.
        on_nonfinite: stop, with an error | rewind to the last checkpoint with finite weights, and skip the data since.
    """

    folder: str = field(metadata=form(FORM))
    _: KW_ONLY
    interval: str = field(
        default="30m", metadata=form("a time (90s, 30m, 2h) or a whole count (500ba, 1ep, 1000000tok)")
    )
    keep: int = 3
    keep_every: str | None = field(default=None, metadata=form("a count of batches such as 1000ba"))
    resume: str | int = field(default="auto", metadata=form("auto, never, or a step such as 500"))
    optimizer_settings: str = "checkpoint"
    asynchronous: bool = True
    max_failures: int = 3
    save_frozen: bool = True
    endpoint_url: str | None = field(default=None, repr=False)  # may hold a password
    region: str | None = None
    profile: str | None = None
    timeout: str = field(default="60s", metadata=form("a time such as 60s"))
    grace: str = field(default="25s", metadata=form("a time such as 25s"))
    signals: tuple[str, ...] = field(
        default=("SIGTERM", "SIGUSR1", "SIGINT", "SIGHUP"),
        metadata=form("a list of signals' names such as [SIGTERM, SIGUSR1, SIGINT]"),
    )
    max_nonfinite: int | None = field(default=3, metadata=form("a whole number, or null"))
    on_nonfinite: str = "stop"

    def __post_init__(self) -> None:
        raise_mistakes(self._mistakes())

    def _mistakes(self) -> Iterator[str]:
        if not self.folder.strip():
            yield f"folder is empty: write {FORM}"
        elif problem := folder_problem(self.folder):
            yield f"folder ({self.folder}): {problem}"
        if self.endpoint_url is not None and (problem := endpoint_problem(self.endpoint_url)):
            yield f"endpoint_url ({self.endpoint_url}) {problem}"
        for name in ("region", "profile"):
            if getattr(self, name) is not None and self.folder.partition("://")[0] in ("gs", "az"):
                yield f"{name} ({getattr(self, name)}) applies to s3:// only, and folder is {self.folder}"
        yield from caught(parse_interval, self.interval, "interval")
        for name in ("timeout", "grace"):
            yield from caught(parse_interval, getattr(self, name), name, "sec")
        if self.keep_every is not None:
            yield from caught(parse_interval, self.keep_every, "keep_every", "ba")
        for name in ("keep", "max_failures"):
            if getattr(self, name) < 1:
                yield f"{name} ({getattr(self, name)}) must be at least 1"
        for name in self.signals:
            if name not in SIGNALS:
                yield f"signals ({name}) must be among {', '.join(SIGNALS)}"
        if self.max_nonfinite is not None and self.max_nonfinite < 1:
            yield f"max_nonfinite ({self.max_nonfinite}) must be at least 1, or null to disable the check"
        if self.optimizer_settings not in ("checkpoint", "run"):
            yield f"optimizer_settings ({self.optimizer_settings}) must be checkpoint or run"
        if self.on_nonfinite not in ("stop", "rewind"):
            yield f"on_nonfinite ({self.on_nonfinite}) must be stop or rewind"
        if self.resume not in ("auto", "never") and (isinstance(self.resume, str) or self.resume < 0):
            yield f"resume ({self.resume}) must be auto, never, or a step such as 500"

    @property
    def every(self) -> Time:
        return parse_interval(self.interval, "interval")

    @property
    def keep_every_batches(self) -> int | None:
        return None if self.keep_every is None else int(parse_interval(self.keep_every, "keep_every").amount)

    @property
    def grace_s(self) -> float:
        return parse_interval(self.grace, "grace").amount

    @property
    def store_options(self) -> StoreOptions:
        return StoreOptions(
            endpoint_url=self.endpoint_url,
            region=self.region,
            profile=self.profile,
            timeout_s=parse_interval(self.timeout, "timeout").amount,
        )


def checkpoint_config(mapping: Mapping[str, Any]) -> CheckpointConfig:
    """From the user's keys; `async` is `asynchronous`, because `async` is a keyword of Python."""
    keys = {"asynchronous" if key == "async" else key: value for key, value in mapping.items()}
    try:
        return from_mapping(CheckpointConfig, keys, WHERE)
    except UserError as error:
        # the value that is wrong may hold a password
        raise MistakesError(without_secrets(text) for text in sentences_of(error)) from None
