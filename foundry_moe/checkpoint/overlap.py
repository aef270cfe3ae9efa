"""Copies from a GPU that go on while the next step's forward and backward run, until the weights are to change.

A copy engine of the GPU makes them, on a stream of their own, so a save costs the step what launching them costs. Where
the sources would change, `release` lets the GPU's later work wait for what is not copied yet; the CPU goes on.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from foundry_moe.checkpoint.errors import CheckpointError


def addresses(tensors: Iterable[Tensor]) -> frozenset[int]:
    """Where this rank's parts begin: a state dict's tensors are other objects on the same memory."""
    parts = (t.to_local() if isinstance(t, DTensor) else t for t in tensors)
    return frozenset(part.data_ptr() for part in parts if part.device.type == "cuda")


class Copies:
    """Copies under way. `sources` must not change until `release`; that they did not is checked."""

    def __init__(self, sources: dict[str, Tensor], done: Any) -> None:
        self._sources = sources
        self._versions = {name: tensor._version for name, tensor in sources.items()}
        self._done = done  # an event, recorded behind the copies
        self._lock = threading.Lock()
        self._changed: list[str] | None = None  # known once the sources may change

    def release(self) -> None:
        """To be called before the sources change: what the current stream does from here on comes after the copies."""
        with self._lock:
            if self._changed is None:
                self._look()
                torch.cuda.current_stream().wait_event(self._done)

    def wait(self) -> None:
        """Waits for the copies, in the thread that saves.

        Raises:
            CheckpointError: sources changed before `release`, so the copies may mix two steps.
        """
        self._done.synchronize()
        with self._lock:
            if self._changed is None:
                self._look()
            changed = self._changed
            self._sources = {}
        if changed:
            raise CheckpointError(
                f"{len(changed)} tensors changed while they were copied, {changed[0]} among them: weights may change "
                "in the optimizer's step only; set async: false if another algorithm writes them"
            )

    def _look(self) -> None:
        self._changed = [name for name, tensor in self._sources.items() if tensor._version != self._versions[name]]
