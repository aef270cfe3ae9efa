"""The Composer callback `nonfinite_guard`: stops a run whose numbers are not finite, where nothing else does."""

from __future__ import annotations

from typing import Any

from composer.core import State
from composer.loggers import Logger

from foundry_moe.callbacks.elastic_checkpoint import ADVICE, ElasticCheckpoint
from foundry_moe.callbacks.watch import RunWatch, Verdict, WatchingCallback
from foundry_moe.checkpoint.errors import NonfiniteError
from foundry_moe.checkpoint.settings import GUARDED_TWICE
from foundry_moe.schema import refuse_unknown


class NonfiniteGuard(WatchingCallback):
    """Stops the run after batches whose loss, gradients or weights are not finite, and says where it began.

    Under `callbacks` in YAML:

        nonfinite_guard: {max_nonfinite: 3}

    `elastic_checkpoint` does this too, and can go back to a checkpoint: both is an error. See docs/resilience.md.

    Args:
        max_nonfinite: so many in a row.

    Raises:
        ValueError: an unknown key, or a number below 1.
    """

    def __init__(self, max_nonfinite: int = 3, **unknown: Any) -> None:
        refuse_unknown(unknown, ("max_nonfinite",), "callbacks.nonfinite_guard")
        if not isinstance(max_nonfinite, int) or max_nonfinite < 1:
            raise ValueError(f"callbacks.nonfinite_guard.max_nonfinite ({max_nonfinite}) must be a whole number from 1")
        self.max_nonfinite = max_nonfinite
        super().__init__(RunWatch())

    def init(self, state: State, logger: Logger) -> None:
        if any(isinstance(callback, ElasticCheckpoint) for callback in state.callbacks):
            raise ValueError(GUARDED_TWICE)

    def fit_start(self, state: State, logger: Logger) -> None:
        self._watch.start(state)

    def batch_start(self, state: State, logger: Logger) -> None:
        self._check(self._watch.before_batch(state, busy=False), self.max_nonfinite)

    def fit_end(self, state: State, logger: Logger) -> None:
        self._check(self._watch.elsewhere(), 1)

    def _check(self, verdict: Verdict, limit: int) -> None:
        if verdict.bad_batches >= limit:
            raise NonfiniteError(f"{self._watch.what_happened(verdict)}; {ADVICE}")
