"""The demo's tiny run through the image's entrypoint, as a cluster's launch files call it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.chaos.run_kills import ROOT, command

SCRIPT = f"{ROOT}/docker/entrypoint.sh"


def arguments(data: Path, folder: Path, log: Path, batches: int) -> list[str]:
    """Of the entrypoint, from any working directory; two processes train, experts divided over both."""
    words = command(str(data), str(folder), None, log, (1, 1, 2), batches)
    mine = words[words.index("foundry_moe/train.py") + 1 :]
    return [word.replace("yamls/", f"{ROOT}/yamls/").replace("[tests/", f"[{ROOT}/tests/") for word in mine]


def environment(**more: str) -> dict[str, str]:
    """This process's, with what the image has and with `more`, and without a fault to strike."""
    inherited = {name: value for name, value in os.environ.items() if name != "FOUNDRY_MOE_FAULT"}
    image = {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),  # where python is
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "TRAIN_SCRIPT": f"{ROOT}/foundry_moe/train.py",
        "FSDP_VERSION": "2",
        "OMP_NUM_THREADS": "1",
    }
    return inherited | image | more
