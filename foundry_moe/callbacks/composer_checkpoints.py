"""How Composer's `load_path` is skipped in a run that resumes from a commit."""

from __future__ import annotations

import logging
from typing import Any

from composer.trainer import trainer
from composer.utils import dist

log = logging.getLogger(__name__)


class LoadPathSkip:
    """Keeps Composer from loading `load_path`, from `start` to `end`: see `foundry_moe.launch`.

    `load_path` names the starting point of a run, or what `autoresume` has found. A run that resumes from a commit does
    not need it, and it may have been deleted by then.
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
