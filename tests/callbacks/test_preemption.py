"""Signals are recorded and handlers restored; data loader workers outlive them; a dead launcher is noticed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from foundry_moe.callbacks.run_watch import shield_workers
from foundry_moe.launch import ending
from foundry_moe.launch.ending import OutliveSignals, Restart, StopSignals


def test_the_first_signal_is_recorded_and_handlers_are_restored() -> None:
    got: list[int] = []
    of_others = signal.getsignal(signal.SIGTERM)  # Composer's, if it is imported
    before = signal.signal(signal.SIGUSR1, lambda number, frame: got.append(number))
    try:
        signals = StopSignals(["SIGTERM", "SIGUSR1"])
        signals.install()
        assert signals.reason is None and signals.age_s == 0.0
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.reason == "SIGUSR1" and signals.age_s >= 0.0 and not got
        signals.remove()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert got == [signal.SIGUSR1]
        signals.install()  # of the next `fit`
        os.kill(os.getpid(), signal.SIGUSR1)
        assert got == [signal.SIGUSR1]
        signals.remove()
        assert signal.getsignal(signal.SIGTERM) == of_others
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.quick
def test_a_second_ctrl_c_ends_the_process_and_the_launcher_s_copy_of_the_first_does_not(monkeypatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr(ending, "leave_at_once", lambda code, sentence: ended.append(code))
    signals = StopSignals(["SIGINT"])
    for later_s, count in ((0.0, 0), (0.1, 0), (2.0, 1)):
        signals._since_s -= later_s
        signals._note(signal.SIGINT, None)
        assert len(ended) == count


@pytest.mark.parametrize(
    ("parent", "world", "noticed"),
    [
        (["python", "-m", "composer.cli.launcher", "-n", "4"], "4", True),
        (["/opt/venv/bin/python", "/opt/venv/bin/torchrun", "train.py"], "4", True),
        (["/bin/bash", "run.sh"], "4", False),  # a shell may leave a run in the background
        (["/home/composer/bin/python", "sweep.py"], "4", False),
        (["/home/composer/bin/python", "sweep.py"], "ours", True),  # which calls `launch_here`
        (["python", "-m", "composer.cli.launcher"], None, False),
    ],
)
def test_a_launcher_that_died_stops_the_run(monkeypatch, tmp_path, parent, world, noticed) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if world:
        monkeypatch.setenv("WORLD_SIZE", world)
    monkeypatch.setenv(ending.LAUNCHER, "77" if world == "ours" else "76")
    (tmp_path / "77").mkdir()
    (tmp_path / "77" / "cmdline").write_bytes("\0".join(parent).encode())
    monkeypatch.setattr(ending, "PROC", tmp_path)
    monkeypatch.setattr(os, "getppid", lambda: 77)
    signals = StopSignals([])
    signals.install()
    assert signals.reason is None
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert (signals.reason == "its launcher has died") is noticed


class Numbers(Dataset):
    """Zero to seven, and the process that gave each."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, os.getpid()])


def test_a_data_loader_s_process_outlives_the_signal() -> None:
    begun: list[int] = []
    loader = DataLoader(Numbers(), batch_size=1, num_workers=1, prefetch_factor=1, worker_init_fn=begun.append)
    shield_workers(loader, ["SIGTERM"], 30.0)
    shield_workers(loader, ["SIGTERM"], 30.0)
    assert isinstance(loader.worker_init_fn, OutliveSignals) and loader.worker_init_fn.then == begun.append
    OutliveSignals([], 30.0, begun.append)(5)
    assert begun == [5], "the loader's own function runs too"
    seen = []
    for batch in loader:
        index, process = batch[0].tolist()
        seen.append(index)
        if index == 1:
            os.kill(process, signal.SIGTERM)
    assert seen == list(range(8))
    shield_workers(None, ["SIGTERM"], 1.0)
    shield_workers(DataLoader(Numbers()), ["SIGTERM"], 1.0)


def test_leaving_has_the_exit_code_of_a_restart() -> None:
    code = "from foundry_moe.launch.ending import leave\ntry: leave('x')\nexcept Exception: pass\n"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 75
    assert issubclass(Restart, SystemExit)


def test_leaving_waits_for_loggers_and_not_for_other_exit_handlers() -> None:
    """At exit loggers close; handlers of multiprocessing wait for workers, and freed modules for other ranks."""
    code = """
import atexit, time
class Peer:
    def __del__(self):
        time.sleep(100)
atexit.register(time.sleep, 100)  # as multiprocessing does, before anything of ours is imported
from foundry_moe.launch import ending
ending.LEAVE_S = 1000  # no timer ends it
atexit.register(print, "closed")
peer = Peer()
print("imported", flush=True)
ending.leave('x')
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "imported\n"
    assert process.stdout.read() == "closed\n" and process.wait(60) == 75
