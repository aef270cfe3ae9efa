"""A callback for LLM Foundry, registered by `code_paths`: one rank raises or is killed at a batch."""

from __future__ import annotations

import os
import signal

from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist
from llmfoundry.registry import callbacks


class FailAt(Callback):
    """On `rank`, before batch `batch`: raises (`kind: raises`) or is killed (`kind: dies`)."""

    def __init__(self, kind: str, rank: int, batch: int) -> None:
        self.kind, self.rank, self.batch = kind, rank, batch

    def batch_start(self, state: State, logger: Logger) -> None:
        if dist.get_global_rank() == self.rank and state.timestamp.batch == self.batch:
            if self.kind == "raises":
                raise ValueError("the data of batch 1 is torn")
            os.kill(os.getpid(), signal.SIGKILL)


if "fail_at" not in callbacks.get_all():
    callbacks.register("fail_at", func=FailAt)
