"""Prints why ranks on this machine failed: the first error that is no lost connection, and which ranks had it.

Each rank writes its error to a file when it is raised (`user_errors.run_cleanly`), and may end after ranks that have
lost their connection to it. This module must not know torch's agent.
"""

from __future__ import annotations

import json
import shutil
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from foundry_moe.schema import name_ranks

LAST_LINES = 60  # of a failed rank's output
MOST_RANKS = 20  # named in a sentence


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The error that one rank wrote. `frames`: the lines of its traceback that name a place."""

    rank: int
    traceback: str
    time_ns: int

    @property
    def frames(self) -> tuple[str, ...]:
        return tuple(line for line in self.traceback.splitlines() if line.startswith('  File "'))


def failures_in(logs: Path) -> list[Failure]:
    """The errors that ranks wrote below torchrun's folder of logs, the first one first."""
    found = []
    for path in logs.glob("*/attempt_0/*/error.json"):
        with suppress(OSError, ValueError, KeyError, TypeError):  # a rank that was killed while it wrote
            text = json.loads(path.read_text())["message"]["extraInfo"]["py_callstack"]
            found.append(Failure(rank=int(path.parent.name), traceback=text, time_ns=path.stat().st_mtime_ns))
    return sorted(found, key=lambda failure: failure.time_ns)


def print_cause(codes: Mapping[int, int], logs: Path) -> None:
    """Prints the errors of ranks other than 0, which the console does not show.

    Args:
        codes: exit codes of the ranks that ended before the launcher ended the others; by signal if below 0.
        logs: torchrun's folder of the ranks' output.
    """
    failures = failures_in(logs)
    # after an error of a rank others may abort; any other signal comes from outside or is the error
    died = [rank for rank, code in codes.items() if code < 0 and not (failures and code == -signal.SIGABRT)]
    if died:
        print(f"{name_ranks(died, MOST_RANKS)} died of {signal.Signals(-codes[died[0]]).name}", file=sys.stderr)
        _print_output(died[0], logs)
    elif failures:
        first = failures[0]
        same = sorted(failure.rank for failure in failures if failure.frames == first.frames)
        if 0 not in same:
            print(f"{name_ranks(same, MOST_RANKS)} failed:\n{first.traceback.rstrip()}", file=sys.stderr)
        elif len(same) > 1:
            print(f"{name_ranks(same, MOST_RANKS)} failed with the error above", file=sys.stderr)
    elif cause := [rank for rank, code in codes.items() if rank or code not in (0, 1)]:
        print(f"rank {cause[0]} ended with exit code {codes[cause[0]]}:", file=sys.stderr)
        _print_output(cause[0], logs)


def keep_logs(codes: Mapping[int, int], logs: Path, folder: Path) -> None:
    """Moves the output of ranks that failed to a new folder in `folder`; rank 0's is on the console.

    A folder that cannot be written is a warning.
    """
    failed = sorted({*codes, *(failure.rank for failure in failures_in(logs))} - {0})
    files = [(rank, path) for rank in failed for path in _output(rank, logs) if path.stat().st_size]
    if not files:
        return
    kept = folder / f"failed-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}"
    try:
        kept.mkdir(parents=True, exist_ok=True)
        for rank, path in files:
            shutil.copyfile(path, kept / f"rank{rank}.{path.name}")
    except OSError as error:
        print(f"warning: the output of failed ranks could not be kept in {kept}: {error.strerror}", file=sys.stderr)
    else:
        print(f"the output of {name_ranks(failed, MOST_RANKS)} is in {kept}", file=sys.stderr)


def _output(rank: int, logs: Path) -> list[Path]:
    return sorted(logs.glob(f"*/attempt_0/{rank}/std*.log"))


def _print_output(rank: int, logs: Path) -> None:
    for path in _output(rank, logs):
        print(*path.read_text(errors="replace").splitlines()[-LAST_LINES:], sep="\n", file=sys.stderr)
