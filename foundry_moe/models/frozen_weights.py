"""Frozen weights that checkpoints leave out: their names, and a digest of them.

The digest is a sum over all elements, so that it does not depend on the mesh that holds them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn

from foundry_moe.checkpoint.collective_errors import Ranks
from foundry_moe.checkpoint.layout import Box, layout_of
from foundry_moe.checkpoint.training_state import local_part
from foundry_moe.schema import WRAPPERS

_MIX = (-0x61C8864680B583EB, -0x4B47D0C5A8A9B4E5)  # odd, of 64 bits
_CHUNK = 2**22  # elements at a time
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def frozen_names(model: nn.Module) -> set[str]:
    """Names in the model's state dict of parameters that are not trained."""
    return {WRAPPERS.sub("", name) for name, parameter in model.named_parameters() if not parameter.requires_grad}


def digest(tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None = None) -> str:
    """The digest of names, dtypes, shapes and values. Collective over the group."""
    ranks = Ranks(group)
    total = sum(_digest(name, tensor, ranks.rank, ranks.size) for name, tensor in tensors.items())
    return f"{ranks.decide(lambda: total, lambda totals: sum(totals)) % 2**64:016x}"


def _digest(name: str, tensor: Tensor, rank: int, world_size: int) -> int:
    """This rank's share: of the boxes that several ranks hold, the first rank's count."""
    boxes = [box for box, ranks in layout_of(tensor, world_size, name).chunks if min(ranks) == rank]
    seed = xxhash.xxh3_64_intdigest(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode()) | 1
    return sum(seed * _sum(local_part(tensor), box, tuple(tensor.shape)) for box in boxes)


def _sum(part: Tensor, box: Box, shape: tuple[int, ...]) -> int:
    if not part.ndim:
        part, box, shape = part[None], ((0,), (1,)), (1,)
    rows = max(1, _CHUNK // max(part[0].numel(), 1))
    total = 0
    for first in range(0, part.shape[0], rows):
        some = part[first : first + rows].contiguous()
        values = some.view(_INTEGERS[some.element_size()]).to(torch.int64)
        index = torch.zeros((), dtype=torch.int64, device=part.device)
        for dim, size in enumerate(shape):
            start = box[0][dim] + (first if dim == 0 else 0)
            places = torch.arange(start, start + some.shape[dim], device=part.device)
            index = index[..., None] * size + places
        mixed = (values ^ (index * _MIX[0])) * _MIX[1]
        total += int(((mixed ^ (mixed >> 29)) * _MIX[0]).sum())
    return total
