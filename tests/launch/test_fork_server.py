"""Training processes forked from the launcher's server: whose children they are, restarts, and without a server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.kills import ROOT

SCRIPT = """
import json, os, signal, sys, time
import psutil
from foundry_moe.launch import fork_server
from foundry_moe.launch.ending import LAUNCHER, launcher_of
folder, kind = sys.argv[1:]
sys.path.insert(0, folder)
fork_server.MODULES = ("slow_imports", "slow_imports:warm", "no_such_module")
if kind == "cuda":
    fork_server._cuda_is_open = lambda: True
fork_server.serve()
import slow_imports
life, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
launcher = psutil.Process(os.getppid())
said = {
    "launcher": "foundry_moe.launch.torchrun" in launcher.cmdline() and launcher_of(launcher.pid) == LAUNCHER,
    "own session": os.getsid(0) == os.getpid(),
    "imported": slow_imports.PID != os.getpid(),
    "warmed": slow_imports.WARMED == [1],
    "world": os.environ["WORLD_SIZE"],
    "threads": slow_imports.THREADS == os.environ["OMP_NUM_THREADS"] == "1",
    "term": signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
}
with open(f"{folder}/life-{life}-{rank}", "w") as file:
    json.dump(said, file)
while len([name for name in os.listdir(folder) if name.startswith(f"life-{life}-")]) < 2:
    time.sleep(0.02)
if life == "0":
    if kind == "lost" and rank == "0":
        server = next(child for child in launcher.children() if "RANK" not in child.environ())
        server.kill()
    if rank == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
sys.exit(4 if kind == "final" else 0)
"""
IMPORTS = """
import os, pathlib, signal
PID, THREADS = os.getpid(), os.environ.get("OMP_NUM_THREADS")
signal.signal(signal.SIGTERM, lambda number, frame: None)  # as an import of Composer does
WARMED = []
def warm():
    WARMED.append(1)
with open(pathlib.Path(__file__).parent / "imports", "a") as file:
    file.write("x")
"""


def launch(folder: Path, kind: str, **environment: str) -> tuple[int, dict[str, dict[str, object]], int]:
    """Exit code, what each process of each life said, and how often the modules were imported."""
    (folder / "script.py").write_text(SCRIPT)
    (folder / "slow_imports.py").write_text(IMPORTS)
    words = ["--standalone", "--nproc-per-node=2", "--max-restarts=1", str(folder / "script.py"), str(folder), kind]
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    others = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, "-m", "foundry_moe.launch.torchrun", *words],
        env={**others, "PYTHONPATH": paths, **environment},
        capture_output=True,
        text=True,
        timeout=150,
    )
    said = {path.name.removeprefix("life-"): json.loads(path.read_text()) for path in folder.glob("life-*")}
    assert sorted(said) == ["0-0", "0-1", "1-0", "1-1"], done.stderr[-3000:]
    assert all(
        one["launcher"] and one["own session"] and one["threads"] and one["world"] == "2" for one in said.values()
    ), said
    return done.returncode, said, len((folder / "imports").read_text())


def test_processes_of_all_starts_share_one_import_and_belong_to_the_launcher(tmp_path) -> None:
    code, said, imports = launch(tmp_path, "final")
    assert code == 4 and imports == 1
    assert all(one["imported"] and one["warmed"] and one["term"] for one in said.values()), said


@pytest.mark.parametrize(
    ("kind", "environment", "imports"),
    [("lost", {}, 3), ("cuda", {}, 5), ("off", {"FOUNDRY_MOE_FORK_SERVER": "0"}, 4)],
)
def test_without_the_server_processes_start_as_torchrun_starts_them(tmp_path, kind, environment, imports) -> None:
    code, said, seen = launch(tmp_path, kind, **environment)
    assert code == 0 and seen == imports and not said["1-0"]["imported"]
