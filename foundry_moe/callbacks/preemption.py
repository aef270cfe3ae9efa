"""Preemption: records requests to stop (signals of Kubernetes, Slurm and a terminal, a launcher that has died).

A signal handler only records the signal; the run checks it once per batch. This module must not know ranks or
checkpoints. `launch.ending` ends the process.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from torch.utils.data import DataLoader

from foundry_moe.launch.ending import INTERRUPTED, launcher_of, leave_at_once

log = logging.getLogger(__name__)

SECOND_S = 1.0  # within this time, a SIGINT is the launcher's copy of a Ctrl-C in the terminal, not a second Ctrl-C


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
        for name in self.names:
            number = signal.Signals[name]
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
