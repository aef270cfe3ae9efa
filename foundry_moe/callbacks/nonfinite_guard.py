"""The Composer callback `nonfinite_guard`: stops a run whose values are not finite, without `elastic_checkpoint`."""

from __future__ import annotations

from typing import Any

from composer.core import State
from composer.loggers import Logger

from foundry_moe.callbacks.run_watch import RunStatus, RunWatch, WatchingCallback
from foundry_moe.checkpoint.errors import NonfiniteError
from foundry_moe.schema import refuse_unknown

ADVICE = "lower the learning rate or look at the data"


class NonfiniteGuard(WatchingCallback):
    """Stops the run after batches whose loss, gradients or weights are not finite, and says where it began.

    Under `callbacks` in YAML:

        nonfinite_guard: {max_nonfinite: 3}

    `elastic_checkpoint` does this too, and can go back to a checkpoint: both is an error. See
    docs/how-to/resilience.md.

    Args:
        max_nonfinite: how many such batches in a row stop the run.

    Raises:
        ValueError: an unknown key, or a number below 1.
    """

    def __init__(self, max_nonfinite: int = 3, **unknown: Any) -> None:
        refuse_unknown(unknown, ("max_nonfinite",), "callbacks.nonfinite_guard")
        if not isinstance(max_nonfinite, int) or max_nonfinite < 1:
            raise ValueError(f"callbacks.nonfinite_guard.max_nonfinite ({max_nonfinite}) must be a whole number from 1")
        self.max_nonfinite = max_nonfinite
        super().__init__(RunWatch())

    def fit_start(self, state: State, logger: Logger) -> None:
        self._watch.start(state)

    def batch_start(self, state: State, logger: Logger) -> None:
        self._check(self._watch.before_batch(state, busy=False), self.max_nonfinite)

    def fit_end(self, state: State, logger: Logger) -> None:
        self._check(self._watch.between_batches(), 1)

    def _check(self, status: RunStatus, limit: int) -> None:
        if status.bad_batches >= limit:
            raise NonfiniteError(f"{self._watch.describe(status)}; {ADVICE}")
