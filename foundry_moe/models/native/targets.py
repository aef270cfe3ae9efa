"""Tensors that are cut and put together from others: what another format of the same weights is made of.

A target is named, has a shape, and is tiled by parts; a part is a box of one source tensor, without its first dimension
where that is one expert, transposed where the other format has it so. Independent of formats, files and models.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from foundry_moe.checkpoint.layout import Box


@dataclass(frozen=True, kw_only=True)
class TargetPart:
    """A box of a source tensor and its place in a target.

    source: the tensor's name.
    box: offsets and sizes in the source.
    at: offsets in the target.
    expert: dimension 0 of the box, of size 1, is left out.
    transposed: the two remaining dimensions are swapped.
    """

    source: str
    box: Box
    at: tuple[int, ...]
    expert: bool = False
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """In the target."""
        sizes = self.box[1][1:] if self.expert else self.box[1]
        return tuple(reversed(sizes)) if self.transposed else tuple(sizes)

    def turned(self, tensor: Tensor) -> Tensor:
        """A box of the source as the target has it."""
        tensor = tensor[0] if self.expert else tensor
        return tensor.transpose(0, 1) if self.transposed else tensor


@dataclass(frozen=True, kw_only=True)
class Target:
    """One tensor of the other format.

    is_zero: it has no parts: what the other format has, and the source lacks because it is zero.
    keeps_dtype: it is not cast where others are.
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[TargetPart, ...]
    is_zero: bool = False
    keeps_dtype: bool = False

    @property
    def count(self) -> int:
        """Elements."""
        return math.prod(self.shape)


def copied(name: str, source: str, shape: Iterable[int]) -> Target:
    """A source tensor as it is, under another name."""
    sizes = tuple(shape)
    zeros = (0,) * len(sizes)
    return Target(name=name, shape=sizes, parts=(TargetPart(source=source, box=(zeros, sizes), at=zeros),))


def rows_of(name: str, source: str, shape: Iterable[int], start: int, stop: int) -> Target:
    """Rows of a source tensor of that shape."""
    _, *rest = shape
    sizes, zeros = (stop - start, *rest), (0,) * len(rest)
    return Target(
        name=name, shape=sizes, parts=(TargetPart(source=source, box=((start, *zeros), sizes), at=(0, *zeros)),)
    )


def check_targets(targets: Iterable[Target], sources: Mapping[str, tuple[int, ...]]) -> None:
    """Checks that each element of each source goes to exactly one place, and that every target is filled.

    Raises:
        ValueError: anything else, which is an error in the code that made the targets.
    """
    names: set[str] = set()
    taken = dict.fromkeys(sources, 0)
    boxes: dict[str, set[Box]] = {name: set() for name in sources}
    for target in targets:
        if target.name in names:
            raise ValueError(f"{target.name} would be written twice")
        names.add(target.name)
        filled = 0
        for part in target.parts:
            if part.source not in sources:
                raise ValueError(f"{target.name} would be made of {part.source}, which does not exist")
            if part.box in boxes[part.source]:
                raise ValueError(f"{part.box} of {part.source} would be written twice")
            boxes[part.source].add(part.box)
            taken[part.source] += math.prod(part.box[1])
            filled += math.prod(part.shape)
        if filled != target.count and not target.is_zero:
            raise ValueError(f"{target.name} has {target.count} elements, and {filled} would be written")
    lost = [name for name, count in taken.items() if count != math.prod(sources[name])]
    if lost:
        raise ValueError(f"{lost[0]} and {len(lost) - 1} more tensors would be lost, or only part of them written")


def assemble(target: Target, source: Callable[[str], Tensor], dtype: torch.dtype | None = None) -> Tensor:
    """A target from whole source tensors in memory."""
    if len(target.parts) == 1 and target.parts[0].shape == target.shape:
        part = target.parts[0]
        tensor = part.turned(_box_of(source(part.source), part.box))
        return tensor.to(dtype or tensor.dtype).contiguous()
    whole: Tensor | None = None
    for part in target.parts:
        tensor = part.turned(_box_of(source(part.source), part.box))
        if whole is None:
            whole = torch.zeros(target.shape, dtype=dtype or tensor.dtype, device=tensor.device)
        _box_of(whole, (part.at, part.shape)).copy_(tensor)
    return torch.zeros(target.shape, dtype=dtype) if whole is None else whole


def _box_of(tensor: Tensor, box: Box) -> Tensor:
    for dim, (start, size) in enumerate(zip(*box, strict=True)):
        tensor = tensor.narrow(dim, start, size)
    return tensor
