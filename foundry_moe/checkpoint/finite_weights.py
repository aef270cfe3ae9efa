"""Whether what was staged for a checkpoint is finite: its weights, and what the optimizer keeps of them.

Looked at in the save's thread, in the staged copy, so that no step waits for it. Tensors that are no optimizer's, such
as masks among a model's buffers, may hold infinities.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from foundry_moe.checkpoint.codec import decode
from foundry_moe.checkpoint.snapshot import Snapshot


def is_finite(snapshot: Snapshot) -> bool:
    """Whether all that this rank has staged of trained tensors is finite; rank 0 looks at small ones as well."""
    parameters = _parameters(snapshot.values)
    trained = {name for name in snapshot.tensors if _is_trained(name, parameters)}
    if not all(_tensor_is_finite(tensor) for name, tensor in snapshot.staged_tensors() if name in trained):
        return False
    if snapshot.rank != 0:  # small tensors are values of the manifest, and rank 0's
        return True
    return all(_tensor_is_finite(tensor) for tensor in _small_tensors(snapshot.values, parameters))


def _parameters(values: Any) -> set[str]:
    """Names of what the optimizer has a state of; none where no optimizer is saved."""
    optimizer = values.get("optim") if isinstance(values, Mapping) else None
    state = optimizer.get("state") if isinstance(optimizer, Mapping) else None
    return set(state) if isinstance(state, Mapping) else set()


def _is_trained(name: str, parameters: set[str]) -> bool:
    section, _, rest = name.partition(".")
    return rest.startswith("state.") if section == "optim" else section == "model" and _is_weight(rest, parameters)


def _is_weight(name: str, parameters: set[str]) -> bool:
    return not parameters or name in parameters


def _small_tensors(values: Any, parameters: set[str]) -> Iterator[Tensor]:
    if not isinstance(values, Mapping):
        return
    model, optimizer = values.get("model"), values.get("optim")
    if isinstance(model, Mapping):
        yield from _tensors(value for name, value in model.items() if _is_weight(name, parameters))
    if parameters and isinstance(optimizer, Mapping):
        states = (state for state in optimizer["state"].values() if isinstance(state, Mapping))
        # `step` is a count for each parameter: most of what is small, and never bad
        yield from _tensors(value for state in states for leaf, value in state.items() if leaf != "step")


def _tensors(encoded: Iterable[Any]) -> Iterator[Tensor]:
    return (decode(value) for value in encoded if isinstance(value, Mapping) and "$tensor" in value)


def _tensor_is_finite(values: Tensor) -> bool:
    if not values.dtype.is_floating_point or not values.numel():
        return True
    if values.dtype.itemsize == 1:  # torch has no extremes of 8-bit floats
        values = values.float()
    return all(bool(torch.isfinite(extreme)) for extreme in torch.aminmax(values))
