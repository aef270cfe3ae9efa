"""The training command: `composer -n 8 foundry_moe/train.py run.yaml key=value ...`.

Calls LLM Foundry's trainer. Before that it checks the run without slow imports, and sets FSDP_VERSION=2, so that
`fsdp_config` means FSDP2. A run that was complete already ends without an error. Ranks that do not fit the mesh wait
(`mesh.spares`).
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from foundry_moe.launch.run_config import check_device, check_files, check_whole_run, load_run, plain, ranks_that_train
from foundry_moe.launch.run_values import check_fit
from foundry_moe.launch.spares import dismiss, launched_ranks, take_place, wait_as_spare
from foundry_moe.launch.user_errors import run_cleanly
from foundry_moe.schema import section

# warnings of Composer and torch about their own code, every few batches
_NOISE = ("To copy construct from a tensor", "'pin_memory' argument is set as true but no accelerator is found")

USAGE = "usage: composer -n PROCESSES foundry_moe/train.py RUN.yaml [key=value ...]"


def train(arguments: list[str]) -> int:
    """Trains; see the module's text. Returns the exit code."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if arguments else 2
    if missing := [name for name in ("composer", "llmfoundry") if find_spec(name) is None]:
        raise ValueError(
            f"the training command needs {' and '.join(missing)}, which the base install leaves out: "
            "pip install 'foundry_moe[foundry]'"
        )
    run = load_run(arguments[0], arguments[1:], USAGE)
    settings = plain(run)
    config = check_whole_run(settings)
    check_files(settings)
    launched, ranks = launched_ranks(), ranks_that_train(settings, config)
    check_fit(settings, used=ranks, config=config)
    check_device(settings)
    if not take_place(ranks):
        wait_as_spare()
        return 0
    os.environ.setdefault("FSDP_VERSION", "2")
    make_wandb_folder(settings)
    for message in _NOISE:
        warnings.filterwarnings("ignore", message=message)

    from llmfoundry.command_utils import train as train_with_foundry

    from foundry_moe.callbacks.run_report import TrainingComplete

    try:
        train_with_foundry(run)
    except TrainingComplete as done:
        print(done)
    dismiss(launched - ranks)
    return 0


def make_wandb_folder(run: Mapping[str, Any]) -> None:
    """Creates the folder of `loggers.wandb.init_kwargs.dir`: wandb ignores one that does not exist and uses /tmp."""
    if folder := section(run, "loggers", "wandb", "init_kwargs").get("dir"):
        Path(folder).mkdir(parents=True, exist_ok=True)


def main() -> None:
    """Entry point of the script."""
    sys.exit(run_cleanly(lambda: train(sys.argv[1:])))


if __name__ == "__main__":
    main()
