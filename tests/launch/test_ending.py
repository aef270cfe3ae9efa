"""How real runs on two processes end, under Composer's own launcher, torchrun and ours: exit code and last line."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from foundry_moe.checkpoint import open_store
from foundry_moe.checkpoint.ledger import Ledger
from foundry_moe.launch.ending import StopSignals
from tests.helpers.demo import BIN, DEMO, ROOT, run
from tests.helpers.entrypoint import kill_group, wait_for
from tests.helpers.sockets import reachable

COMMAND = (str(BIN / "foundry-moe"), "train", "-n", "2")
COMPOSER = (str(BIN / "composer"), "-n", "2")
TORCHRUN = (str(BIN / "torchrun"), "--standalone", "--nproc-per-node=2")
OUR_TORCHRUN = (sys.executable, "-m", "foundry_moe.launch.torchrun", "--standalone", "--nproc-per-node=2")
START_S, STOP_S = 300, 60


class Run:
    """A run in a session of its own, and what it and its launcher print, in one file."""

    def __init__(self, folder: Path, launcher: tuple[str, ...], arguments: list[str]) -> None:
        self.printed = folder / "printed"
        script = [] if launcher is COMMAND else [f"{ROOT}/foundry_moe/train.py"]
        words = [*launcher, *script, str(DEMO), *arguments, "eval_interval=0"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        with self.printed.open("w") as out:
            self.launcher = subprocess.Popen(
                words, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )

    def wait_for(self, words: str) -> None:
        wait_for(lambda: words in self.printed.read_text() or self.launcher.poll() is not None, START_S)
        assert self.launcher.poll() is None, self.printed.read_text()[-5000:]

    def ranks(self) -> list[psutil.Process]:
        children = psutil.Process(self.launcher.pid).children()
        return [child for child in children if "train.py" in " ".join(child.cmdline())]

    def end(self) -> tuple[int, list[str]]:
        """The exit code, and the lines that were printed once nothing prints any more."""
        wait_for(lambda: self.launcher.poll() is not None, STOP_S)
        time.sleep(1.0)  # the last line may be printed after the launcher has ended
        return self.launcher.returncode, self.printed.read_text().splitlines()


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("launcher", "number", "group", "code"),
    [
        (COMMAND, signal.SIGINT, True, 75),  # Ctrl-C
        (COMMAND, signal.SIGTERM, False, 75),
        (COMPOSER, signal.SIGINT, True, 75),
        pytest.param(COMPOSER, signal.SIGTERM, False, 75, marks=pytest.mark.slow),
        pytest.param(COMPOSER, signal.SIGTERM, True, 75, marks=pytest.mark.slow),
        pytest.param(COMPOSER, signal.SIGINT, False, 75, marks=pytest.mark.slow),
        pytest.param(OUR_TORCHRUN, signal.SIGINT, True, 75, marks=pytest.mark.slow),
        (TORCHRUN, signal.SIGTERM, False, 1),
    ],
)
def test_the_last_line_says_which_batch_is_safe(tiny_arguments, tmp_path, launcher, number, group, code) -> None:
    started = Run(tmp_path, launcher, [*tiny_arguments(tmp_path), "max_duration=100000ba"])
    try:
        started.wait_for("batch 2/")
        open_to_all = reachable(started.launcher.pid)
        (os.killpg if group else os.kill)(started.launcher.pid, number)
        ended, lines = started.end()
    finally:
        kill_group(started.launcher)
    if launcher is not TORCHRUN:  # torch's own launcher, as docs/explanation/security.md says
        assert open_to_all == []
    newest = Ledger(open_store(str(tmp_path / "checkpoints"))).newest_first()[0].step
    assert ended == code, "\n".join(lines)
    assert f"batch {newest} is saved" in lines[-1] and "Start the run again to resume it." in lines[-1], lines[-10:]
    assert lines[-1].startswith("Stopped by SIG") and sum("Stopped by" in line for line in lines) == 1
    assert "Begin global rank 1" not in "\n".join(lines)
    if launcher is COMMAND:
        expected = ("starting ", "run ", "dMoE", "mesh ", "batch ", "First batch, ", "Checkpoint of batch ")
        assert [line for line in lines if not line.startswith(expected) and "WARNING" not in line] == lines[-1:]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("nohup", [False, True])
def test_a_closed_terminal_loses_no_batch_and_nohup_outlives_it(tiny_arguments, tmp_path, nohup) -> None:
    ours, theirs = pty.openpty()
    attach = (
        "import fcntl, os, signal, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
        "signal.signal(signal.SIGHUP, signal.SIG_DFL); os.execvp(sys.argv[1], sys.argv[1:])"
    )
    words = [sys.executable, "-c", attach, *(["nohup"] if nohup else []), *COMMAND, str(DEMO)]
    words += [*tiny_arguments(tmp_path), "max_duration=20ba", "eval_interval=0"]
    with (tmp_path / "printed").open("w+") as out:
        prints = out if nohup else theirs
        process = subprocess.Popen(words, cwd=ROOT, stdin=theirs, stdout=prints, stderr=prints, start_new_session=True)
        os.close(theirs)
        said = ""
        try:
            while "batch 2/" not in said and process.poll() is None:
                said += out.read() if nohup else os.read(ours, 10000).decode()
                time.sleep(0.05)
            os.close(ours)
            assert process.wait(STOP_S) == (0 if nohup else 75), said
        finally:
            kill_group(process)
    newest = Ledger(open_store(str(tmp_path / "checkpoints"))).newest_first()[0].step
    assert newest == 20 if nohup else 2 <= newest < 20


@pytest.mark.timeout(400)
@pytest.mark.parametrize("launcher", [COMMAND, COMPOSER, pytest.param(OUR_TORCHRUN, marks=pytest.mark.slow)])
def test_a_stop_of_one_rank_before_training_is_one_sentence(tiny_arguments, tmp_path, launcher) -> None:
    started = Run(tmp_path, launcher, tiny_arguments(tmp_path))
    try:
        started.wait_for("run ")  # rank 0 begins to import Composer, rank 1 too
        started.ranks()[1].send_signal(signal.SIGTERM)
        code, lines = started.end()
    finally:
        kill_group(started.launcher)
    assert code == 75, "\n".join(lines)
    assert lines[-1].startswith("Stopped by SIGTERM while no batch was trained"), lines
    assert "Traceback" not in "\n".join(lines)


@pytest.mark.parametrize("launcher", [COMMAND, COMPOSER, TORCHRUN])
def test_a_folder_that_cannot_be_written_is_one_sentence_on_two_ranks(tiny_arguments, tmp_path, launcher) -> None:
    arguments = [*tiny_arguments(tmp_path), "callbacks.elastic_checkpoint.folder=/proc/run"]
    done = run(*launcher, *([] if launcher is COMMAND else ["foundry_moe/train.py"]), DEMO, *arguments)
    text = done.stdout + done.stderr
    assert done.returncode == (1 if launcher is TORCHRUN else 2), text  # torchrun's own code for all failures
    assert text.count("error: ") == 1 and "error: could not write probe in /proc/run" in text, text
    assert "DistNetworkError" not in text and "Begin global rank 1" not in text


@pytest.mark.timeout(400)
@pytest.mark.parametrize("launcher", [COMPOSER, TORCHRUN])
def test_a_run_that_ends_leaves_no_process_group_and_again_is_one_sentence(tiny_arguments, tmp_path, launcher) -> None:
    arguments = [*tiny_arguments(tmp_path), "max_duration=2ba", "eval_interval=0"]
    arguments = [word for word in arguments if "run_report" not in word]
    without_report = tmp_path / "run.yaml"
    text = DEMO.read_text()
    without_report.write_text(text[: text.index("  run_report:")])
    for words in ([], ["this run is complete: max_duration (2ba) is reached, nothing to train"]):
        done = run(*launcher, "tests/launch/ending_worker.py", without_report, *arguments)
        lines = done.stdout.splitlines()
        assert done.returncode == 0, done.stdout + done.stderr
        assert [line for line in lines if line.startswith("this run")] == words
        at_exit = [line for line in lines if line.startswith("process group at exit")]
        ranks = 1 if launcher is COMPOSER else 2  # Composer's launcher shows rank 0's output
        assert at_exit == ["process group at exit: False"] * ranks
        assert "Traceback" not in done.stderr


def test_uneven_microbatches_under_plain_ddp_are_one_sentence_on_two_ranks(tmp_path) -> None:
    done = run(*COMPOSER, "tests/launch/uneven_worker.py", tmp_path)
    text = done.stdout + done.stderr
    assert done.returncode == 2, text
    assert text.count("error: ") == 1 and "batch 3 does not have the same number of microbatches" in text, text
    assert "Traceback" not in text


@pytest.mark.quick
def test_a_signal_in_training_is_recorded_and_reaches_nobody_else() -> None:
    """Before and after it goes to the thread of `exit_on`, which reads the file of wakeups."""
    reads, writes = os.pipe()
    for end in (reads, writes):
        os.set_blocking(end, False)
    before, seen = signal.set_wakeup_fd(writes), []
    handler = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))

    def send() -> bytes:
        os.kill(os.getpid(), signal.SIGUSR1)
        try:
            return os.read(reads, 9)
        except BlockingIOError:
            return b""

    try:
        signals, alone = StopSignals(["SIGUSR1"]), bytes([signal.SIGUSR1])
        assert send() == alone
        signals.remove()  # without `install`
        assert send() == alone
        signals.install()
        signals.install()  # `fit` a second time
        assert send() == b"" and signals.reason == "SIGUSR1"
        signals.remove()
        assert send() == alone and seen == [signal.SIGUSR1] * 3
    finally:
        signal.signal(signal.SIGUSR1, handler)
        signal.set_wakeup_fd(before)
        os.close(reads)
        os.close(writes)


START = """
import os, signal, sys, threading, time
from foundry_moe.launch.ending import exit_on, wait_to_end
exit_on(["SIGTERM"])
signal.signal(signal.SIGTERM, lambda number, frame: print("an import's handler", flush=True))
exit_on(["SIGTERM"])
"""
CASES = {
    "at once": ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(20)", 75, "Stopped by SIGTERM while no batch"),
    "in a worker": (
        "pid = os.fork()\n"
        "if not pid:\n"
        "    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL\n"
        "    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(3))\n"
        "    os.kill(os.getpid(), signal.SIGTERM); time.sleep(20)\n"
        "code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]); time.sleep(0.2); sys.exit(code)",
        3,
        "",
    ),
    "after a lost peer": (
        "threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start(); wait_to_end(20, 7)",
        7,
        "",
    ),
}


@pytest.mark.quick
@pytest.mark.parametrize("case", CASES)
def test_a_signal_ends_the_process_that_gets_it_with_the_code_of_where_it_is(case: str) -> None:
    program, code, words = CASES[case]
    command = [sys.executable, "-W", "ignore", "-c", START + program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert words in done.stderr and bool(words) == bool(done.stderr), done.stderr


CLOSED = """
import fcntl, os, signal, sys, termios, time
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests may run under nohup
from foundry_moe.launch import ending
if sys.argv[1] == "training":
    stop = ending.StopSignals(["SIGHUP"])
    stop.install()
else:
    ending.exit_on(["SIGTERM", "SIGHUP"])
print("ready", flush=True)
end = time.monotonic() + 30
while time.monotonic() < end:
    if sys.argv[1] == "training" and stop.reason:
        print("to nobody", flush=True)
        print("nor here", file=sys.stderr, flush=True)
        os._exit(3)
    time.sleep(0.05)
"""


@pytest.mark.quick
@pytest.mark.parametrize(("does", "code"), [("starting", 75), ("training", 3)])
def test_a_terminal_that_closes_stops_what_writes_to_it(does: str, code: int) -> None:
    terminal, its_end = os.openpty()
    keys: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), its_end)
    child = subprocess.Popen([sys.executable, "-c", CLOSED, does], cwd=ROOT, start_new_session=True, **keys)
    os.close(its_end)
    with open(terminal, "rb", buffering=0) as reader:
        assert reader.readline() == b"ready\r\n"  # all of it: a write to a closed terminal is an error
    assert child.wait(timeout=20) == code
