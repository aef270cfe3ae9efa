"""A callback for LLM Foundry runs that appends each batch's loss and samples to a file, whoever is killed next."""

from __future__ import annotations

import json
import os
from typing import Any

import torch.distributed as torch_dist
import xxhash
from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist
from llmfoundry.registry import callbacks

from foundry_moe.checkpoint.codec import tensor_bytes
from tests.helpers.faults import kill_from_environment


class LossLog(Callback):
    """One JSON line per batch: number, loss, world size, and a hash of each sample of all ranks."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.samples: list[str] = []

    def after_dataloader(self, state: State, logger: Logger) -> None:
        mine = [xxhash.xxh3_64_hexdigest(tensor_bytes(row)) for row in state.batch["input_ids"]]
        every: list[Any] = [mine]
        if torch_dist.is_initialized():
            every = [None] * dist.get_world_size()
            torch_dist.all_gather_object(every, mine)
        self.samples = sorted(sample for part in every for sample in part)

    def batch_end(self, state: State, logger: Logger) -> None:
        if dist.get_global_rank() != 0:
            return
        line = {
            "batch": state.timestamp.batch.value,
            "loss": float(state.total_loss_dict["loss/train/total"]),
            "world": dist.get_world_size(),
            "samples": self.samples,
        }
        with open(self.path, "a") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())


kill_from_environment()
if "loss_log" not in callbacks.get_all():
    callbacks.register("loss_log", func=LossLog)
