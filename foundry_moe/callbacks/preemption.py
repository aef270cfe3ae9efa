"""Preemption: notices requests to stop (signals of Kubernetes and Slurm, a launcher that has died), and exits.

A signal handler only records the signal; the run checks it once a batch. This module handles processes and must not
know ranks or checkpoints.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from torch.utils.data import DataLoader

from foundry_moe.checkpoint.settings import RESTART

log = logging.getLogger(__name__)

PROC = Path("/proc")
_LAUNCHERS = ("composer", "torchrun", "torch.distributed", "foundry_moe.launch")
LEAVE_S = 10.0  # limit for exit handlers, some of which wait for ranks that have already exited
_leaving = False


class StopSignals:
    """Records the first of the signals `names` that this process receives, from `install` to `remove`."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self._reason: str | None = None
        self._since_s = 0.0
        self._before: dict[int, Any] = {}
        self._launcher = 0  # its process id

    def install(self) -> None:
        """Installs the handlers. Python allows that in the main thread only; elsewhere this logs a warning."""
        if threading.current_thread() is not threading.main_thread():
            log.warning("Signals do not stop this run: it does not run in its process's main thread.")
            return
        for name in self.names:
            number = signal.Signals[name]
            if number not in self._before:
                self._before[number] = signal.signal(number, self._note)
        self._launcher = os.getppid() if _is_launcher(os.getppid()) else 0

    def remove(self) -> None:
        """Restores the previous handlers."""
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._before = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._reason is None:
            self._reason, self._since_s = signal.Signals(number).name, time.monotonic()

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


def _is_launcher(pid: int) -> bool:
    """Whether a process is a launcher of ranks. A shell is not: it may exit and leave a run in the background."""
    try:
        words = (PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return False
    return "WORLD_SIZE" in os.environ and any(
        name in os.path.basename(word) for word in words[:4] for name in _LAUNCHERS
    )


class OutliveSignals:
    """A `worker_init_fn` that lets data loader workers outlive a signal to the whole process group by `seconds`.

    Otherwise the loss of a worker would raise in the batch that the run still has to finish.
    """

    def __init__(self, names: Sequence[str], seconds: float, then: Any = None) -> None:
        self.names, self.seconds, self.then = tuple(names), seconds, then

    def __call__(self, worker: int) -> None:
        for name in self.names:
            signal.signal(signal.Signals[name], self._wait)
        if self.then is not None:
            self.then(worker)

    def _wait(self, number: int, frame: FrameType | None) -> None:
        timer = threading.Timer(self.seconds, os._exit, (0,))
        timer.daemon = True
        timer.start()


def shield_workers(loader: object, names: Sequence[str], seconds: float) -> None:
    """Lets the workers that a data loader will start outlive the signals."""
    if isinstance(loader, DataLoader) and loader.num_workers and not isinstance(loader.worker_init_fn, OutliveSignals):
        loader.worker_init_fn = OutliveSignals(names, seconds, loader.worker_init_fn)


class Restart(SystemExit):
    """Ends the process with exit code RESTART, through any script that runs it; `sentence` was printed before."""

    def __init__(self, sentence: str) -> None:
        super().__init__(RESTART)
        self.sentence = sentence


def leave(sentence: str) -> None:
    """Ends this process with exit code RESTART, even if an exit handler waits for other processes.

    Raises:
        Restart: always.
    """
    global _leaving
    _leaving = True
    timer = threading.Timer(LEAVE_S, os._exit, (RESTART,))
    timer.daemon = True
    timer.start()
    raise Restart(sentence)


def _skip_remaining_handlers() -> None:
    """Ends a leaving process after the exit handlers that were registered after this module: loggers are closed then.

    The handlers that remain wait for data loader workers, which outlive the signal, and for other ranks, and Python's
    timers no longer run. Without this, four processes under the `composer` launcher were killed with exit code 1, half
    a minute after their last batch was saved.
    """
    if _leaving:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(RESTART)


atexit.register(_skip_remaining_handlers)
