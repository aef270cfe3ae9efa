"""How a training process stops and ends: stop signals, exit codes under each launcher, the last line.

Signals come from Kubernetes, Slurm or a terminal. While the process does not train, `exit_on` ends it; during training
`StopSignals` records the signal, which `callbacks.run_watch` reads once per batch. This module must not know ranks'
messages or checkpoints, and imports neither torch nor Composer.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from foundry_moe.launch.checkpoint_settings import RESTART, CheckpointConfig, checkpoint_config

log = logging.getLogger(__name__)

INTERRUPTED = 130  # exit code after a second Ctrl-C, as of a shell
LEAVE_S = 10.0  # limit for exit handlers, some of which wait for ranks that have already exited
SECOND_S = 1.0  # within this time, a SIGINT is the launcher's or a parent's copy of a Ctrl-C, not a second one
SLACK_S = 3.0  # beyond `grace`, for the exit after the save
DEFAULTS = CheckpointConfig(folder="unknown")
PROC = Path("/proc")
# Composer's and torch's launchers print exit codes and tracebacks once their processes have ended, so the last line is
# printed by a process that waits for the rank (its parent) and then, for at most `_WAIT_S`, for the launcher
_PRINT_LAST = """
import os, sys, time
rank, launcher, wait_s, text = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
while os.getppid() == rank:
    time.sleep(0.02)
end = time.monotonic() + wait_s
while os.path.exists(f"/proc/{launcher}") and time.monotonic() < end:
    time.sleep(0.02)
print(text, file=sys.stderr, flush=True)
"""
LAUNCHER = "FOUNDRY_MOE_LAUNCHER"  # in the environment of ranks of our launcher: its process id
_WAIT_S = {LAUNCHER: 0.4, "composer": 0.4, "torchrun": 5.0, "torch.distributed": 5.0}

_code: int | None = None  # of a process that is leaving
_last_line = ""


def stop_settings(words: Sequence[str]) -> CheckpointConfig:
    """The keys of `elastic_checkpoint` from the training script's arguments, `RUN.yaml key=value ...`.

    Defaults where they cannot be read: the run itself reports what is wrong.
    """
    try:
        from omegaconf import OmegaConf

        from foundry_moe.launch.run_config import load_run

        # alone: other values may name what only ranks have, such as ${oc.env:RANK}
        found: Any = OmegaConf.select(load_run(words[0], list(words[1:])), "callbacks.elastic_checkpoint")
        keys: Any = None if found is None else OmegaConf.to_container(found, resolve=True)
        return DEFAULTS if keys is None else checkpoint_config(keys)
    except Exception:
        return DEFAULTS


def launcher_of(pid: int) -> str:
    """Name of the launcher of ranks that a process is, or "". A shell is none: it may leave a run in the background."""
    if os.environ.get(LAUNCHER) == str(pid):
        return LAUNCHER
    try:
        words = (PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return ""
    names = [os.path.basename(word) for word in words[:4]] if "WORLD_SIZE" in os.environ else []
    return next((launcher for launcher in _WAIT_S if any(launcher in name for name in names)), "")


def is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"


def code_here(code: int) -> int:
    """The exit code of this process if all ranks end for one reason, which rank 0 reports.

    Composer's launcher prints all output of each other rank whose exit code is not 0, and returns local rank 0's.
    """
    hidden = os.environ.get("LOCAL_RANK", "0") != "0" and launcher_of(os.getppid()) == "composer"
    return 0 if hidden else code


def print_last(sentence: str) -> None:
    """Prints a sentence as the last line of this process and of its launcher."""
    launcher = os.getppid()
    wait_s = _WAIT_S.get(launcher_of(launcher))
    if wait_s is None or launcher == 1:  # in a container nothing outlives process 1
        print(sentence, file=sys.stderr, flush=True)
        return
    words = [sys.executable, "-I", "-S", "-c", _PRINT_LAST, str(os.getpid()), str(launcher), str(wait_s), sentence]
    subprocess.Popen(words, start_new_session=True)


def leave_at_once(code: int, sentence: str) -> None:
    """Ends this process without exit handlers; rank 0 prints the sentence, if there is one."""
    with contextlib.suppress(OSError):  # nobody reads it
        sys.stdout.flush()
        if sentence and is_first_rank():
            print_last(sentence)
        sys.stderr.flush()
    os._exit(code)


def let_go(number: int) -> None:
    """After SIGHUP, output to a terminal goes nowhere: the terminal is closed, and each write to it would raise."""
    if number != signal.SIGHUP:
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for output in (1, 2):
        if stat.S_ISCHR(os.fstat(output).st_mode):
            os.dup2(nowhere, output)
    os.close(nowhere)


class RunComplete(SystemExit):
    """Ends a process whose run has reached `max_duration` with exit code 0, through any script that runs it."""


class Restart(SystemExit):
    """Ends the process with exit code RESTART, through any script that runs it."""


def leave(sentence: str) -> NoReturn:
    """Ends this process with exit code RESTART, even if an exit handler waits for other processes.

    Rank 0 prints the sentence, after the exit handlers of loggers.
    """
    global _code, _last_line
    _code, _last_line = code_here(RESTART), sentence  # all ranks leave
    _leave_in_time(_code, sentence)
    raise Restart(RESTART)


def _leave_in_time(code: int, sentence: str) -> None:
    timer = threading.Timer(LEAVE_S, leave_at_once, (code, sentence))
    timer.daemon = True
    timer.start()


def wait_to_end(seconds: float, code: int) -> None:
    """Waits, or ends with this code as soon as the launcher signals: no stop is requested then."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(code))
    time.sleep(seconds)


def leave_after_handlers(code: int) -> NoReturn:
    """Ends this process with an exit code, after the exit handlers of loggers, without Python's finalization.

    After an error a process group is left as it is: other ranks may wait in a collective. Its threads sometimes end an
    interpreter that finalizes with "terminate called without an active exception" (torch 2.11, gloo, Python 3.12).
    Without a process group Python ends as usual, so a caller may catch the SystemExit.
    """
    global _code
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        _code = code
        _leave_in_time(code, "")
    raise SystemExit(code)


def _skip_remaining_handlers() -> None:
    """Ends a leaving process after the exit handlers that were registered after this module: loggers are closed then.

    The handlers that remain wait for data loader workers, which outlive the signal, and for other ranks, and Python's
    timers no longer run. Without this, four processes under the `composer` launcher were killed with exit code 1, half
    a minute after their last batch was saved.
    """
    if _code is not None:
        leave_at_once(_code, _last_line)


atexit.register(_skip_remaining_handlers)


def heeded(names: Sequence[str]) -> list[signal.Signals]:
    """These signals, without a SIGHUP that this process ignores: `nohup` outlives its terminal."""
    ignored = {"SIGHUP"} if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else set()
    return [signal.Signals[name] for name in names if name not in ignored]


def exit_on(names: Sequence[str]) -> None:
    """Makes these signals end the process with exit code RESTART and one sentence while it does not train.

    A handler in Python would have to wait until the main thread returns from a collective. A thread that reads the
    process's wakeup file does not. `StopSignals` takes that file away while it is installed.
    """
    numbers = {int(number) for number in heeded(names)}
    for number in numbers:  # a signal without a handler in Python writes no wakeup
        signal.signal(number, _ignore)
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    before = signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
    if before >= 0:  # called again, after an import that has replaced the handlers
        signal.set_wakeup_fd(before, warn_on_full_buffer=False)
        os.close(reads)
        os.close(writes)
        return
    threading.Thread(target=_exit_at_signal, args=(reads, numbers), name="stop-signals", daemon=True).start()
    os.register_at_fork(after_in_child=lambda: _forget(numbers))


def stopped_early(number: int) -> str:
    """The last line of a run that a signal ended before it trained."""
    return (
        f"Stopped by {signal.Signals(number).name} while no batch was trained: the newest checkpoint is as it was. "
        "Start the run again to resume it."
    )


def _ignore(number: int, frame: FrameType | None) -> None:
    pass


def _exit_at_signal(reads: int, numbers: set[int]) -> None:
    while True:
        number = os.read(reads, 1)[0]
        if number in numbers and _code is None:
            let_go(number)
            leave_at_once(RESTART, stopped_early(number))


def _forget(numbers: set[int]) -> None:
    """In a forked process, such as a data loader worker: its signals are not this process's."""
    if threading.current_thread() is threading.main_thread():
        signal.set_wakeup_fd(-1)
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


class StopSignals:
    """Records the first of the signals `names` that this process receives, from `install` to `remove`.

    A later SIGINT (a second Ctrl-C) ends the process at once.

    newest: says where the newest complete checkpoint is, for the sentence then.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.newest: Callable[[], str | None] = lambda: None
        self._reason: str | None = None
        self._since_s = 0.0
        self._before: dict[int, Any] = {}
        self._wakeup = -1
        self._launcher = 0  # its process id

    def install(self) -> None:
        """Installs the handlers. Python allows that in the main thread only; elsewhere this logs a warning."""
        if threading.current_thread() is not threading.main_thread():
            log.warning("Signals do not stop this run: it does not run in its process's main thread.")
            return
        if not self._before:
            self._wakeup = signal.set_wakeup_fd(-1)  # that of `exit_on`
        for number in heeded(self.names):
            if number not in self._before:
                self._before[number] = signal.signal(number, self._note)
        self._launcher = os.getppid() if launcher_of(os.getppid()) else 0

    def remove(self) -> None:
        """Restores the previous handlers."""
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        if self._before:
            signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
        self._before = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        let_go(number)
        if self._reason is None:
            self._reason, self._since_s = signal.Signals(number).name, time.monotonic()
        elif number == signal.SIGINT and self.age_s > SECOND_S:
            leave_at_once(
                INTERRUPTED,
                f"Ended by a second SIGINT before the save was complete: the newest checkpoint is "
                f"{self.newest() or 'none yet'}. Start the run again to resume it.",
            )

    @property
    def reason(self) -> str | None:
        """The signal's name, or that the launcher has died; None while nothing asks this process to stop."""
        if self._reason is None and self._launcher and os.getppid() != self._launcher:
            # a launcher that was killed leaves its processes running
            self._reason, self._since_s = "its launcher has died", time.monotonic()
        return self._reason

    @property
    def age_s(self) -> float:
        """Seconds since this process was asked to stop."""
        return time.monotonic() - self._since_s if self._reason is not None else 0.0


class OutliveSignals:
    """A `worker_init_fn` that lets data loader workers outlive a signal to the whole process group by `seconds`.

    Otherwise the loss of a worker would raise in the batch that the run still has to finish.
    """

    def __init__(self, names: Sequence[str], seconds: float, then: Any = None) -> None:
        self.names, self.seconds, self.then = tuple(names), seconds, then

    def __call__(self, worker: int) -> None:
        for number in heeded(self.names):
            signal.signal(number, self._wait)
        if self.then is not None:
            self.then(worker)

    def _wait(self, number: int, frame: FrameType | None) -> None:
        timer = threading.Timer(self.seconds, os._exit, (0,))
        timer.daemon = True
        timer.start()
