"""FOUNDRY_MOE_STRICT=1: a Triton kernel that is compiled after the first batches ends the run. For tests of stalls."""

from __future__ import annotations

import os

from foundry_moe_kernels.compilations import on_compilation

FREE_BATCHES = 5


class StrictCompilation:
    """Counts batches; from the fifth on, if the environment asks for it, forbids compilation."""

    def __init__(self) -> None:
        self._left = FREE_BATCHES if os.environ.get("FOUNDRY_MOE_STRICT") == "1" else 0

    def batch_ended(self) -> None:
        """At the end of each batch."""
        if self._left == 1:
            on_compilation(_refuse)
        self._left -= self._left > 0


def _refuse(kernel: str) -> None:
    raise RuntimeError(
        f"FOUNDRY_MOE_STRICT=1: the kernel {kernel} was compiled after batch {FREE_BATCHES}; a run without this "
        "variable waits for it and goes on"
    )
