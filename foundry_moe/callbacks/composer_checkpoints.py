"""How Composer's `load_path` is skipped in a run that resumes from a commit."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from composer.trainer import trainer
from composer.utils import dist

log = logging.getLogger(__name__)


def skip_load_path(folder: str) -> Callable[[], None]:
    """Keeps Composer from loading `load_path` until the function that is returned is called: see `foundry_moe.launch`.

    `load_path` names the starting point of a run, or what `autoresume` has found. A run that resumes from a commit in
    `folder` does not need it, and it may have been deleted by then.
    """
    load = trainer.checkpoint.load_checkpoint

    def skip(*_: Any, path: str = "load_path", **__: Any) -> None:
        if dist.get_global_rank() == 0:
            log.info("%s is not loaded: the run resumes from a checkpoint in %s", path, folder)

    def restore() -> None:
        trainer.checkpoint.load_checkpoint = load

    trainer.checkpoint.load_checkpoint = skip
    return restore
