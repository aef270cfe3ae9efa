"""Composer's own checkpointing beside `elastic_checkpoint`: where it writes, and how its `load_path` is skipped."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

from composer.callbacks import CheckpointSaver
from composer.core import State
from composer.trainer import trainer
from composer.utils import dist, format_name_with_dist

from foundry_moe.launch.checkpoint_settings import WHERE, CheckpointConfig

log = logging.getLogger(__name__)


def composer_folders(state: State) -> list[str]:
    """Where Composer's checkpoint savers write. An autoresumed `load_path` begins with one of these."""
    folders = []
    for callback in state.callbacks:
        if isinstance(callback, CheckpointSaver):
            uploader = callback.remote_uploader
            folder = callback.folder if uploader is None else uploader.remote_folder
            folders.append(format_name_with_dist(str(folder), state.run_name).rstrip("/"))
    return folders


def check_folders(folders: Sequence[str], config: CheckpointConfig) -> None:
    """Warns where Composer saves too, at twice the cost.

    Raises:
        ValueError: both save to one folder.
    """
    ours = config.folder.removeprefix("file://").rstrip("/")
    for folder in folders:
        if "://" in ours or "://" in folder:
            same = folder == ours
        else:
            same = os.path.realpath(folder) == os.path.realpath(os.path.expanduser(ours))
        if same:
            raise ValueError(f"save_folder and {WHERE}.folder are both {config.folder}: give each a folder of its own")
    if folders and dist.get_global_rank() == 0:
        log.warning(
            "save_folder and elastic_checkpoint both write checkpoints: remove save_folder unless you want Composer's"
        )


class LoadPathSkip:
    """Keeps Composer from loading `load_path`, from `start` to `end`: see `foundry_moe.launch`.

    `load_path` names the starting point of a run. A run that resumes from a commit does not need it, and it may have
    been deleted by then.
    """

    def __init__(self) -> None:
        self._load: Any = None

    def start(self, folder: str) -> None:
        """`folder`: for the log line that says where the run resumes from."""
        if self._load is not None:
            return
        self._load = trainer.checkpoint.load_checkpoint

        def skip(*_: Any, path: str = "load_path", **__: Any) -> None:
            if dist.get_global_rank() == 0:
                log.info("%s is not loaded: the run resumes from a checkpoint in %s", path, folder)

        trainer.checkpoint.load_checkpoint = skip

    def end(self) -> None:
        """Restores Composer's function."""
        if self._load is not None:
            trainer.checkpoint.load_checkpoint, self._load = self._load, None
