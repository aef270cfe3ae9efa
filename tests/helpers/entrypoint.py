"""The demo's tiny run through the image's entrypoint, as a cluster's launch files call it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from tests.helpers import faults
from tests.helpers.kills import ROOT, command

SCRIPT = f"{ROOT}/docker/entrypoint.sh"
START_S, STOP_S = 900, 120  # four processes import Composer first, and may share two cores


def arguments(data: Path, folder: Path, log: Path, batches: int) -> list[str]:
    """Of the entrypoint, from any working directory; two processes train, experts divided over both."""
    words = command(str(data), str(folder), None, log, (1, 1, 2), batches)
    mine = words[words.index("foundry_moe/train.py") + 1 :]
    return [word.replace("yamls/", f"{ROOT}/yamls/").replace("[tests/", f"[{ROOT}/tests/") for word in mine]


def environment(**more: str) -> dict[str, str]:
    """This process's environment with the image's variables and `more`, and without an injected fault."""
    inherited = {name: value for name, value in os.environ.items() if name != faults.VARIABLE}
    image = {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),  # where python is
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "TRAIN_SCRIPT": f"{ROOT}/foundry_moe/train.py",
        "FSDP_VERSION": "2",
        "OMP_NUM_THREADS": "1",
    }
    return inherited | image | more


def wait_for(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not hold in time"
        time.sleep(0.2)


def kill_group(launcher: subprocess.Popen) -> None:
    """Ends what is left of a launch, in its session and below it."""
    if launcher.poll() is None:
        for child in psutil.Process(launcher.pid).children(recursive=True):
            child.kill()
        os.killpg(launcher.pid, signal.SIGKILL)
        launcher.wait()
