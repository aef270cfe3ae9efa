"""What launchers need to know of a run that may be asked to stop: by which signals, and how long it may take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from foundry_moe.checkpoint.settings import CheckpointConfig, checkpoint_config

SLACK_S = 3.0  # beyond `grace`, to leave once the save is done
DEFAULTS = CheckpointConfig(folder="unknown")


def stop_settings(words: Sequence[str]) -> CheckpointConfig:
    """Of the training script's arguments, `RUN.yaml key=value ...`: `elastic_checkpoint`'s keys.

    What cannot be read has the defaults: it is for the run itself to say what is wrong with it.
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
