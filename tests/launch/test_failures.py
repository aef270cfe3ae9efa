"""What a launcher shows of ranks that fail: the cause, once, and not the connections that others lost by it."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from foundry_moe.launch.checkpoint_settings import CheckpointConfig
from foundry_moe.launch.ending import DEFAULTS
from foundry_moe.launch.failures import failures_in, print_cause
from foundry_moe.launch.torchrun import log_folder
from tests.helpers.demo import BIN, ROOT, run

WORKER = str(ROOT / "tests" / "launch" / "failing_worker.py")
HERE = "import sys; from foundry_moe.launch.torchrun import launch_here; sys.exit(launch_here(3, sys.argv[1:]))"
OURS = (sys.executable, "-c", HERE)
COMPOSER = (BIN / "composer", "-n", "3")
TORCHRUN = (BIN / "torchrun", "--standalone", "--nproc-per-node=3")
IN_FOLDER = "import os, sys; os.chdir(sys.argv[1]); os.execv(sys.argv[2], sys.argv[2:])"


@pytest.mark.parametrize(
    ("launcher", "kind", "ranks", "shown", "kept"),
    [
        pytest.param(OURS, "error", "1", "rank 1 failed:\nTraceback", ["rank1"], id="one"),
        pytest.param(OURS, "error", "2,0,1", "ranks 0, 1, 2 failed with the error above", ["rank1", "rank2"], id="all"),
        pytest.param(OURS, "signal", "2", "rank 2 died of SIGSEGV\nFatal Python error", ["rank2"], id="signal"),
        pytest.param(COMPOSER, "error", "1", "Begin global rank 1 STDERR", [], id="composer"),
        pytest.param(TORCHRUN, "error", "1", "Root Cause (first observed failure)", [], id="torchrun"),
    ],
)
def test_the_error_that_other_ranks_only_notice_is_shown_once(tmp_path, launcher, kind, ranks, shown, kept) -> None:
    words = (sys.executable, "-c", IN_FOLDER, tmp_path, *launcher, WORKER, kind, ranks)
    done = run(*words, PYTHONPATH=str(ROOT))
    text = done.stdout + done.stderr
    assert done.returncode == 1 and shown in text, text
    if kind == "error":
        assert "KeyError: 'planted on rank" in text[text.index("Traceback") :], text
    if launcher is OURS:
        assert text.count("Traceback") == (kind == "error"), text
        assert "the output of rank" in text.splitlines()[-1] and "is in failed-2" in text.splitlines()[-1], text
    if launcher is TORCHRUN:  # its summary
        assert "KeyError: 'planted on rank 1'" in text[text.index(shown) :], text
    assert sorted({path.name.split(".")[0] for path in tmp_path.glob("failed-*/*")}) == kept


@pytest.mark.quick
@pytest.mark.parametrize(
    ("folder", "beside"),
    [("~/q/checkpoints", "~/q"), ("file:///tmp/q/checkpoints", "/tmp/q"), ("q/checkpoints", "q"), ("s3://q/run", ".")],
)
def test_logs_of_failed_ranks_are_kept_beside_the_folder_of_checkpoints(folder: str, beside: str) -> None:
    assert log_folder(CheckpointConfig(folder=folder)) == Path(beside).expanduser()
    assert log_folder(DEFAULTS) == Path()


def written(logs: Path, rank: int, line: int, at_s: int) -> None:
    """The error of a rank, from a line of its program."""
    folder = logs / "run" / "attempt_0" / str(rank)
    folder.mkdir(parents=True)
    text = f'Traceback:\n  File "train.py", line {line}\nKeyError: rank {rank}\n'
    (folder / "error.json").write_text(json.dumps({"message": {"extraInfo": {"py_callstack": text}}}))
    (folder / "stderr.log").write_text(f"output of {rank}\n")
    os.utime(folder / "error.json", (at_s, at_s))


@pytest.mark.quick
@pytest.mark.parametrize(
    ("errors", "codes", "shown"),
    [
        ({1: (5, 20), 3: (7, 10)}, {1: 1, 3: 1}, "rank 3 failed:\nTraceback"),  # the first in time
        ({1: (5, 20), 2: (7, 30), 3: (5, 10)}, {1: 1, 2: 1, 3: 1}, "ranks 1, 3 failed:\nTraceback"),
        ({0: (5, 20), 2: (5, 10)}, {0: 1, 2: 1}, "ranks 0, 2 failed with the error above\n"),
        ({0: (5, 10), 2: (7, 20)}, {0: 1, 2: 1}, ""),  # rank 0's is on the console
        ({1: (5, 10)}, {1: 1, 2: -signal.SIGABRT}, "rank 1 failed:\nTraceback"),  # the other lost it
        ({1: (5, 10)}, {1: 1, 2: -signal.SIGKILL}, "rank 2 died of SIGKILL\n"),
        ({}, {2: -signal.SIGABRT, 3: -signal.SIGABRT}, "ranks 2, 3 died of SIGABRT\n"),
        ({}, {0: 1, 3: 7}, "rank 3 ended with exit code 7:\n"),
        ({}, {0: 1}, ""),
    ],
)
def test_the_cause_is_the_first_error_or_a_signal_that_no_error_explains(
    errors: dict[int, tuple[int, int]], codes: dict[int, int], shown: str, tmp_path: Path, capsys
) -> None:
    for rank, (line, at_s) in errors.items():
        written(tmp_path, rank, line, at_s)
    torn = tmp_path / "run" / "attempt_0" / "9"
    torn.mkdir(parents=True)
    (torn / "error.json").write_text('{"message": {"extra')
    assert [failure.rank for failure in failures_in(tmp_path)] == sorted(errors, key=lambda rank: errors[rank][1])
    print_cause(codes, tmp_path)
    said = capsys.readouterr().err
    assert said.startswith(shown) and bool(shown) == bool(said)
