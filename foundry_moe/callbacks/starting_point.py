"""What `load_path` names is where a run begins: it is not read once the folder of checkpoints holds a commit.

It may well be gone by then, and a restart must not need it.
"""

from __future__ import annotations

import logging
from typing import Any

from composer.trainer import trainer
from composer.utils import dist

from foundry_moe.checkpoint.ledger import Ledger
from foundry_moe.checkpoint.store import Store

log = logging.getLogger(__name__)


class StartingPoint:
    """Keeps Composer from loading `load_path`, from `skip_if_committed` to `restore`.

    Composer takes the path from its trainer's arguments, which no callback sees; what it loads with is a function of
    its module `checkpoint`, to be replaced there as its documentation of `load_exclude_algorithms` does.
    """

    def __init__(self) -> None:
        self._load: Any = None

    def skip_if_committed(self, store: Store) -> None:
        """Collective; rank 0 looks."""
        found = [dist.get_global_rank() == 0 and bool(Ledger(store).newest_first())]
        dist.broadcast_object_list(found)
        if found[0] and self._load is None:
            self._load = trainer.checkpoint.load_checkpoint

            def skip(*_: Any, path: str = "load_path", **__: Any) -> None:
                if dist.get_global_rank() == 0:
                    log.info("%s is not read: %s holds checkpoints to go on from", path, store.url)

            trainer.checkpoint.load_checkpoint = skip

    def restore(self) -> None:
        """Gives Composer its function back."""
        if self._load is not None:
            trainer.checkpoint.load_checkpoint, self._load = self._load, None
