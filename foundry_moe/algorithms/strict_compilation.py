"""FOUNDRY_MOE_STRICT=1 ends a run that compiles a kernel or graph after its first batches. For tests of stalls."""

from __future__ import annotations

import os

from foundry_moe.ops.compile_ahead import on_compilation, on_graph_compilation

FREE_BATCHES = 5


class StrictCompilation:
    """Forbids compilation after FREE_BATCHES batches, if FOUNDRY_MOE_STRICT is 1.

    Graphs between batches stay allowed: the first evaluation compiles its own.
    """

    def __init__(self) -> None:
        self._left = FREE_BATCHES if os.environ.get("FOUNDRY_MOE_STRICT") == "1" else 0
        self._training = False

    def batch_began(self) -> None:
        """At the beginning of each batch."""
        self._training = True

    def batch_ended(self) -> None:
        """At the end of each batch."""
        self._training = False
        if self._left == 1:
            on_compilation(lambda kernel: _refuse(f"the kernel {kernel}"))
            on_graph_compilation(lambda graph: _refuse(f"graph {graph}") if self._training else None)
        self._left -= self._left > 0


def _refuse(what: str) -> None:
    raise RuntimeError(
        f"FOUNDRY_MOE_STRICT=1: {what} was compiled after batch {FREE_BATCHES}; unset the variable to allow it"
    )
