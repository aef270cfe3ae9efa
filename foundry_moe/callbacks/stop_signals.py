"""What asks a run to stop: SIGTERM of Kubernetes and Slurm, warnings that come before it, a launcher that is gone.

A signal is written down and nothing else: the run looks once a batch. Knows processes, neither ranks nor checkpoints.
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
LEAVE_S = 10.0  # for what runs at a process's exit, which may wait for peers that have left
_leaving = False


class StopSignals:
    """Notes the first of `names` that this process gets, from `install` to `remove`."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self._reason: str | None = None
        self._since_s = 0.0
        self._before: dict[int, Any] = {}
        self._launcher = 0  # its process

    def install(self) -> None:
        """Takes the signals over. Outside the main thread Python allows none; then a log line says so."""
        if threading.current_thread() is not threading.main_thread():
            log.warning("Signals are not looked at: the run is not in its process's main thread.")
            return
        for name in self.names:
            number = signal.Signals[name]
            if number not in self._before:
                self._before[number] = signal.signal(number, self._note)
        self._launcher = os.getppid() if _is_launcher(os.getppid()) else 0

    def remove(self) -> None:
        """Gives the signals back to whoever had them."""
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._before = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._reason is None:
            self._reason, self._since_s = signal.Signals(number).name, time.monotonic()

    @property
    def reason(self) -> str | None:
        """The signal's name, or that the launcher is gone; None while nothing asks this process to stop."""
        if self._reason is None and self._launcher and os.getppid() != self._launcher:
            # it was killed, and leaves its processes to train on
            self._reason, self._since_s = "its launcher is gone", time.monotonic()
        return self._reason

    @property
    def age_s(self) -> float:
        """Seconds since this process was asked to stop."""
        return time.monotonic() - self._since_s if self._reason is not None else 0.0


def _is_launcher(pid: int) -> bool:
    """Whether a process is one that starts ranks and waits for them. A shell is none: it may leave a run behind."""
    try:
        words = (PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return False
    return "WORLD_SIZE" in os.environ and any(
        name in os.path.basename(word) for word in words[:4] for name in _LAUNCHERS
    )


class OutliveSignals:
    """A data loader's `worker_init_fn`: its processes get the signal too, and would end the batch that is finished.

    They end `seconds` after it, should nobody have ended them before.
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
    """Lets the processes that a data loader will start outlive the signals."""
    if isinstance(loader, DataLoader) and loader.num_workers and not isinstance(loader.worker_init_fn, OutliveSignals):
        loader.worker_init_fn = OutliveSignals(names, seconds, loader.worker_init_fn)


class Restart(SystemExit):
    """Ends the process with RESTART through whatever script runs it; `sentence` is what the user was told."""

    def __init__(self, sentence: str) -> None:
        super().__init__(RESTART)
        self.sentence = sentence


def leave(sentence: str) -> None:
    """Ends this process with RESTART, also if something waits for other processes at its exit.

    Raises:
        Restart: always.
    """
    global _leaving
    _leaving = True
    timer = threading.Timer(LEAVE_S, os._exit, (RESTART,))
    timer.daemon = True
    timer.start()
    raise Restart(sentence)


def _skip_the_rest() -> None:
    """Ends a process that leaves once all that was registered after this module has run: loggers are closed then.

    What is left waits for data loaders' processes, which outlive the signal, and for peers, and no timer of Python
    runs beside it. Four processes under the `composer` launcher were killed, with exit code 1, half a minute after
    their last batch was saved.
    """
    if _leaving:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(RESTART)


atexit.register(_skip_the_rest)
