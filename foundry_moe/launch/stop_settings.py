"""The signals that stop a run, and its grace period, as launchers read them from the run's YAML."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from foundry_moe.checkpoint.settings import CheckpointConfig, checkpoint_config

SLACK_S = 3.0  # beyond `grace`, for the exit after the save
DEFAULTS = CheckpointConfig(folder="unknown")


def stop_settings(words: Sequence[str]) -> CheckpointConfig:
    """The keys of `elastic_checkpoint` from the training script's arguments, `RUN.yaml key=value ...`.

    Defaults where they cannot be read: the run itself reports what is wrong.
    """
    if not words or not words[0].endswith((".yaml", ".yml")):
        return DEFAULTS
    try:
        from omegaconf import OmegaConf

        from foundry_moe.launch.run_config import load_run

        found: Any = OmegaConf.select(load_run(words[0], list(words[1:])), "callbacks.elastic_checkpoint")
        keys: Any = None if found is None else OmegaConf.to_container(found, resolve=True)
        return DEFAULTS if keys is None else checkpoint_config(keys)
    except Exception:
        return DEFAULTS
