"""`composer` that passes a stop signal on to its processes and waits for their last save.

Usage: `foundry-moe train RUN.yaml -n 8`, or `python -m foundry_moe.launch.composer -n 8 SCRIPT ...`

Composer's own launcher treats SIGTERM as an error: it prints a traceback and the output of all ranks, and waits 30 s
at most. This one passes the signal on, waits for `elastic_checkpoint.grace`, and exits with 75. When a process fails,
the others are killed at once, because they cannot complete a save without it. It prints nothing of its own beside the
output of a rank that failed. Composer's private functions that are replaced here are listed in `foundry_moe.launch`.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import subprocess
import sys
import time
from types import FrameType
from typing import Any

import psutil

from foundry_moe.launch.checkpoint_settings import RESTART
from foundry_moe.launch.ending import INTERRUPTED, SLACK_S, stop_settings, stopped_early
from foundry_moe.launch.user_errors import NO_RESTART, USER_ERROR

POLL_S = 0.1
SETTLE_S = 2.0  # for ranks that end with an error that all have
SECOND_S = 1.0  # one Ctrl-C may arrive from the terminal and from a parent process


class _Monitor:
    """Replaces Composer's `_monitor_processes` (as a function) and `_cleanup_processes` (`clean_up`).

    signal: the first that arrived.
    interrupted: whether a SIGINT came more than a second after it, to end the processes at once.
    failure: the first exit code that is neither 0 nor 75; later ones are of processes that were killed because of it.
    """

    def __init__(self, launcher: Any, names: tuple[str, ...], wait_s: float) -> None:
        self.launcher, self.wait_s = launcher, wait_s
        self.signal: int | None = None
        self.interrupted = False
        self._since_s = 0.0
        self.failure: int | None = None
        self._killed = [-signal.Signals[name] for name in names]  # exit codes of processes that cannot handle one yet
        for name in names:
            signal.signal(signal.Signals[name], self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal, self._since_s = number, time.monotonic()
        elif number == signal.SIGINT and time.monotonic() - self._since_s > SECOND_S:
            self.interrupted = True

    def __call__(self, processes: dict[int, subprocess.Popen[str]]) -> None:
        """Returns when all processes have ended, or when Composer is to kill those that have not."""
        passed_on, deadline = False, None
        while True:
            codes = [process.poll() for process in processes.values()]
            killed = next((code for code in codes if code in self._killed), None)
            if killed is None and RESTART in codes:
                # a rank may have been stopped alone, for which the others would wait; a second SIGINT would cut a save
                killed = next((code for code in self._killed if code != -signal.SIGINT), None)
            if killed is not None and self.signal is None:
                self._note(-killed, None)
            if self.failure is None:
                self.failure = next((code for code in codes if code not in (None, 0, RESTART, *self._killed)), None)
            if all(code is not None for code in codes):
                return
            if self.signal is not None and not passed_on:
                passed_on = True
                for process in processes.values():
                    if process.poll() is None:
                        process.send_signal(self.signal)
            leaving = passed_on or RESTART in codes
            if leaving and deadline is None:
                deadline = time.monotonic() + self.wait_s
            late = deadline is not None and time.monotonic() > deadline
            if late or self.interrupted or (self.failure is not None and not passed_on):
                return
            time.sleep(POLL_S)

    def clean_up(self, processes: dict[int, subprocess.Popen[str]]) -> None:
        """Kills the processes that still run, and prints what a failed rank printed unless rank 0 reported the same."""
        end = time.monotonic() + (SETTLE_S if self.failure in (USER_ERROR, *NO_RESTART) else 0.0)
        while any(process.poll() is None for process in processes.values()) and time.monotonic() < end:
            time.sleep(POLL_S)  # all ranks report the same, and rank 0 prints it
        for process in processes.values():
            if process.poll() is None:
                ended = psutil.Process(process.pid)
                for one in [*ended.children(recursive=True), ended]:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        one.kill()
        reported = next((process.wait() for process in processes.values()), 0)
        for rank, process in processes.items():
            code = process.wait()
            if code in (0, RESTART, -signal.SIGKILL, *self._killed) or code == reported in (USER_ERROR, *NO_RESTART):
                continue
            self.launcher._print_process_exit_status(rank, process)
        if reported in self._killed:  # rank 0 could not say so
            print(stopped_early(-reported), file=sys.stderr)


def launch(arguments: list[str]) -> int:
    """Runs Composer's launcher with these arguments.

    Returns:
        The exit code of the first process that failed, 75 for a stop, 130 after a second Ctrl-C, or 0.
    """
    import composer.cli.launcher

    launcher: Any = composer.cli.launcher
    script = next((at for at, word in enumerate(arguments) if word.endswith(".py")), len(arguments))
    config = stop_settings(arguments[script + 1 :])
    monitor = _Monitor(launcher, config.signals, config.grace_s + SLACK_S)
    launcher._monitor_processes = monitor
    launcher._cleanup_processes = monitor.clean_up
    launcher.log.addFilter(lambda record: record.levelno < logging.WARNING)  # its sentences about exit codes
    sys.argv = ["composer", *arguments]
    code = int(launcher.main())
    if monitor.interrupted:
        return INTERRUPTED
    code = code if monitor.failure is None else monitor.failure
    if monitor.signal is not None and code not in (0, USER_ERROR, *NO_RESTART):
        return RESTART
    return code


if __name__ == "__main__":
    sys.exit(launch(sys.argv[1:]))
