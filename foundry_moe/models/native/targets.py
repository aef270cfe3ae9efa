"""Tensors of another format that are put together from ours: the reverse of `pretrained.fill`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from foundry_moe.models.blocks import WeightPart
from foundry_moe.schema import UserError


@dataclass(frozen=True)
class Target:
    """One tensor of the other format, which its parts tile."""

    parts: tuple[WeightPart, ...]

    @property
    def name(self) -> str:
        return self.parts[0].theirs

    @property
    def shape(self) -> tuple[int, ...]:
        return self.parts[0].their_shape

    @property
    def count(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def keeps_dtype(self) -> bool:
        """Whether it is not cast where others are."""
        return any(part.fp32 for part in self.parts)


def targets_of(parts: Iterable[WeightPart]) -> list[Target]:
    """The tensors of the other format, in the order of their first parts."""
    found: dict[str, list[WeightPart]] = {}
    for part in parts:
        found.setdefault(part.theirs, []).append(part)
    return [Target(tuple(parts)) for parts in found.values()]


def check_targets(targets: Iterable[Target], sources: Mapping[str, tuple[int, ...]]) -> None:
    """Checks that each element of each source goes to exactly one place, and that every target is filled."""
    taken = dict.fromkeys(sources, 0)
    seen: set[tuple[str, int | None, int]] = set()
    for target in targets:
        for part in target.parts:
            if part.ours not in sources:
                raise UserError(f"{target.name} would be made of {part.ours}, which does not exist")
            place = (part.ours, part.expert, part.first_row)
            if place in seen:
                raise UserError(f"{part.ours} would be written twice, to {target.name} too")
            seen.add(place)
            if sources[part.ours][1:] == (part.shape[1:] if part.expert is None else part.shape):
                taken[part.ours] += math.prod(part.shape)
        filled = sum(math.prod(part.shape) for part in target.parts)
        if filled != target.count:
            raise UserError(f"{target.name} has {target.count} elements, and {filled} would be written")
    lost = [name for name, count in taken.items() if count != math.prod(sources[name])]
    if lost:
        raise UserError(f"{lost[0]} and {len(lost) - 1} more tensors would not be written, or not once")


def assemble(target: Target, source: Callable[[str], Tensor], dtype: torch.dtype | None = None) -> Tensor:
    """A target from whole source tensors in memory."""
    whole: Tensor | None = None
    for part in target.parts:
        tensor = source(part.ours)[part.of_ours]
        tensor = tensor.mT if part.transposed else tensor
        if tensor.shape == target.shape:
            return tensor.to(dtype or tensor.dtype).contiguous()
        if whole is None:
            whole = torch.zeros(target.shape, dtype=dtype or tensor.dtype, device=tensor.device)
        whole[part.box()] = tensor
    assert whole is not None, "a target has parts"
    return whole
