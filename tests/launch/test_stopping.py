"""The launchers, with small processes in place of training: who gets a signal, who is waited for, and the exit code."""

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

from foundry_moe.launch import torchrun
from foundry_moe.launch.ending import DEFAULTS, stop_settings
from tests.helpers.launching import free_port
from tests.helpers.stop_worker import ROOT, WORKER


def start(tmp_path: Path, launcher: tuple[str, ...], kind: str) -> subprocess.Popen[str]:
    (tmp_path / "worker.py").write_text(WORKER)
    (tmp_path / "run.yaml").write_text("callbacks: {elastic_checkpoint: {folder: x, grace: 20s}}\n")
    arguments = [str(tmp_path / "run.yaml"), f"folder={tmp_path}", f"kind={kind}"]
    words = [sys.executable, *launcher, str(tmp_path / "worker.py"), *arguments]
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": paths, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return subprocess.Popen(words, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)


def names(tmp_path: Path, pattern: str) -> list[str]:
    return sorted(path.name for path in tmp_path.glob(pattern))


TORCHRUN = ("-m", "foundry_moe.launch.torchrun", "--standalone", "--nproc-per-node=2", "--max-restarts=1")
# what `foundry-moe train` calls
HERE = ("-c", "import sys; from foundry_moe.launch.torchrun import launch_here; sys.exit(launch_here(2, sys.argv[1:]))")


@pytest.mark.timeout(200)
@pytest.mark.parametrize(("launcher", "number"), [(TORCHRUN, signal.SIGUSR1), (HERE, signal.SIGTERM)])
def test_a_signal_is_passed_on_once_and_the_save_waited_for(tmp_path, launcher, number) -> None:
    process = start(tmp_path, launcher, "long")
    while len(names(tmp_path, "life-*")) < 2:
        assert process.poll() is None, process.stderr and process.stderr.read()
        time.sleep(0.1)
    process.send_signal(number)
    time.sleep(0.4)
    process.send_signal(number)  # impatience does not shorten the save
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 75, said
    assert "Traceback" not in said
    assert names(tmp_path, "saved-*") == ["saved-0", "saved-1"]
    assert (tmp_path / "signal-0").read_text() == number.name


def test_a_second_ctrl_c_ends_the_run_before_its_save_is_complete(tmp_path) -> None:
    process = start(tmp_path, HERE, "slow")
    while len(names(tmp_path, "life-*")) < 2:
        assert process.poll() is None, process.stderr and process.stderr.read()
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    time.sleep(1.5)  # a second one within a second is the same key
    assert names(tmp_path, "signal-*") == ["signal-0", "signal-1"] and process.poll() is None
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=20)[1]
    assert process.returncode == 130, said
    assert said.splitlines()[-1].startswith("Ended by a second SIGINT before the save was complete")
    assert "Traceback" not in said and not names(tmp_path, "saved-*")


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("launcher", "kind", "code", "lives"),
    [
        (TORCHRUN, "1", 1, 2),  # may pass: started anew, and the other not asked for a save that it cannot make
        (TORCHRUN, "3", 3, 1),  # numbers that are not finite
        (TORCHRUN, "4", 4, 1),  # another process has taken over: a restart would take the folder back
        (HERE, "4", 4, 1),
        (TORCHRUN, "75", 75, 2),  # one rank was asked to stop
        pytest.param(HERE, "1", 1, 1, marks=pytest.mark.slow),
    ],
)
def test_a_process_that_ends_ends_the_others(tmp_path, launcher, kind, code, lives) -> None:
    process = start(tmp_path, launcher, kind)
    said = process.communicate(timeout=120)[1]
    assert process.returncode == code, said
    assert len(names(tmp_path, "life-1-*")) == lives
    if kind != "75" and launcher is TORCHRUN:
        assert not names(tmp_path, "saved-*")


def test_a_signal_to_one_process_before_it_can_handle_any_stops_the_run(tmp_path) -> None:
    process = start(tmp_path, HERE, "early")
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 75, said
    assert said.splitlines()[-1].startswith("Stopped by SIGTERM while no batch was trained") and "exited" not in said


def test_settings_are_the_run_s(tmp_path) -> None:
    path = tmp_path / "run.conf"
    path.write_text("callbacks: {elastic_checkpoint: {folder: '${nope}', signals: [SIGUSR2]}}\n")
    assert stop_settings([str(path)]) == DEFAULTS, "the run says what is wrong with it"
    overrides = ["callbacks.elastic_checkpoint.folder=a", "callbacks.elastic_checkpoint.grace=100s"]
    config = stop_settings([str(path), *overrides])
    assert config.grace_s == 100 and config.signals == ("SIGUSR2",)
    of_ranks = "loggers.tensorboard.log_dir=${oc.env:VARIABLE_OF_RANKS}"
    assert stop_settings([str(path), *overrides, of_ranks]) == config
    assert stop_settings([]) == stop_settings(["script", "x"]) == DEFAULTS and DEFAULTS.grace_s == 25


def test_a_stop_before_the_processes_start_is_one_line(tmp_path) -> None:
    server = "from foundry_moe.launch import fork_server\nfork_server.import_modules = lambda: time.sleep(600)\n"
    (tmp_path / "worker.py").write_text(f"import time\n{server}fork_server.serve()\n")
    endpoint = f"--rdzv-endpoint=localhost:{free_port()}"  # where the second node never comes
    words = ["--nnodes=2", "--rdzv-backend=foundry", endpoint, "--rdzv-conf=is_host=false", str(tmp_path / "worker.py")]
    command = [sys.executable, "-m", "foundry_moe.launch.torchrun", *words]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    while not (servers := psutil.Process(process.pid).children()):
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=10)[1]
    assert process.returncode == 75
    assert said.splitlines()[-1].startswith("Stopped by SIGTERM while no batch was trained") and "Trace" not in said
    psutil.wait_procs(servers, timeout=5)
    assert not any(server.is_running() for server in servers)


@pytest.mark.quick
def test_a_run_on_one_machine_ignores_the_environment_of_a_cluster(monkeypatch) -> None:
    for name, value in {"NNODES": "2:2", "MAX_RESTARTS": "3", "RDZV_BACKEND": "etcd"}.items():
        monkeypatch.setenv(f"PET_{name}", value)
    started: list[Any] = []
    monkeypatch.setattr(torchrun.run, "run", started.append)
    for name in ("exit_on", "_raise_signals"):  # handlers would stay
        monkeypatch.setattr(torchrun, name, lambda names: None)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    assert torchrun.launch_here(1, ["script.py"]) == 0
    assert (started[0].nnodes, started[0].max_restarts, started[0].rdzv_backend) == ("1:1", 0, "foundry")


STARTING = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.write(2, f"terminal: {sys.stderr.isatty()}, threads: {os.environ['OMP_NUM_THREADS']}\\n".encode())  # at once
time.sleep(60)
"""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("processes", [1, 2])
def test_rank_0_has_the_terminal_and_ctrl_c_while_starting_is_one_line(tmp_path, processes) -> None:
    (tmp_path / "worker.py").write_text(STARTING)
    here = HERE[1].replace("launch_here(2", f"launch_here({processes}")
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", here, str(tmp_path / "worker.py")], env=environment, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    said = ""
    while "terminal: " not in said:
        said += os.read(ours, 1000).decode()
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 75
    said += os.read(ours, 10000).decode()
    os.close(ours)
    first, last = said.splitlines()
    assert first == "terminal: True, threads: 1" and last.startswith("Stopped by SIGINT while no batch was trained")
