"""A callback for LLM Foundry, registered by `code_paths`: one rank raises or is killed at a batch."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist
from llmfoundry.registry import callbacks


class FailAt(Callback):
    """On `rank`, before batch `batch`: makes the file `fault`, and raises (`kind: raises`) or is killed (`dies`)."""

    def __init__(self, kind: str, rank: int, batch: int, fault: str) -> None:
        self.kind, self.rank, self.batch, self.fault = kind, rank, batch, Path(fault)

    def batch_start(self, state: State, logger: Logger) -> None:
        if dist.get_global_rank() == self.rank and state.timestamp.batch == self.batch:
            self.fault.touch()
            if self.kind == "raises":
                raise ValueError("the data of batch 1 is torn")
            os.kill(os.getpid(), signal.SIGKILL)


if "fail_at" not in callbacks.get_all():
    callbacks.register("fail_at", func=FailAt)
