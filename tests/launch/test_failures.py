"""What a launcher shows of ranks that fail: the cause, once, and not the connections that others lost by it."""

from __future__ import annotations

import sys

import pytest

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
