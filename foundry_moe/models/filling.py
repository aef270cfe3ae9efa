"""Fills tensors of ours, whole or a rank's share, from tensors of theirs: a module's, or slices of files.

Shapes: E experts, F expert width, D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch import Tensor

from foundry_moe.models.families import Part


class Sliced(Protocol):
    """A tensor, or what gives parts of one, as `safetensors`' slices do."""

    def __getitem__(self, box: tuple[slice, ...], /) -> Tensor: ...


@torch.no_grad()
def fill(local: Tensor, begin: tuple[int, ...], parts: Iterable[Part], theirs: Callable[[str], Sliced]) -> None:
    """Fills `local`, which is our tensor from `begin` on, a part at a time; only what it needs is read.

    Args:
        local: a whole tensor or a box of it; not of autograd.
        parts: those of this tensor, in any order.
        theirs: a tensor of theirs by its name in a `Part`.
    """
    for part in parts:
        target, offset = local, begin
        if part.expert is not None:
            if not begin[0] <= part.expert < begin[0] + local.shape[0]:
                continue
            target, offset = local[part.expert - begin[0]], begin[1:]
        if target.numel() == 0:
            continue
        sizes = tuple(target.shape)
        found = theirs(part.theirs)[part.box(offset, sizes)]
        found = found.reshape(sizes[::-1]).t() if part.transposed else found.reshape(sizes)
        target.copy_(found)
        if part.scale != 1:
            target.mul_(part.scale)


def by_tensor(parts: Iterable[Part]) -> dict[str, list[Part]]:
    """Parts by the name of our tensor."""
    found: dict[str, list[Part]] = {}
    for part in parts:
        found.setdefault(part.ours, []).append(part)
    return found
