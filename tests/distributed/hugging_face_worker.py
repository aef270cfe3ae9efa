"""Runs LLM Foundry's trainer on each rank of a launch, for what it leaves in folders; nothing is compared here."""

from __future__ import annotations

import os
from functools import partialmethod
from typing import Any

import torch
from omegaconf import OmegaConf


def train_all(path: str, runs: list[dict[str, Any]], environment: dict[str, str]) -> list[str | None]:
    """Several runs, one after another; returns each one's error."""
    os.environ.update({"FSDP_VERSION": "2", "NODE_RANK": "0", **environment})
    torch.use_deterministic_algorithms(True, warn_only=True)
    from composer.loggers import RemoteUploaderDownloader
    from llmfoundry.command_utils import train

    # Uploads in threads, an option of Composer's own: each of its processes imports Composer anew, and a rank has four.
    threads = partialmethod(RemoteUploaderDownloader.__init__, use_procs=False)
    RemoteUploaderDownloader.__init__ = threads  # type: ignore[assignment,method-assign]
    errors: list[str | None] = []
    for overrides in runs:
        config = OmegaConf.load(path)
        for key, value in overrides.items():
            OmegaConf.update(config, key, value, merge=False, force_add=True)
        try:
            train(config).close()
            errors.append(None)
        except ValueError as error:
            errors.append(str(error))
    return errors
