"""Which parameters of a model are hidden matrices, and which part of them a rank holds. Knows no optimizer.

Shapes: N matrices of a stack, R rows and C columns of one, r rows of it on this rank.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from foundry_moe.layers.experts import MixedExperts
from foundry_moe.parallel.gradients import local_part
from foundry_moe.schema import UserError

# routers, biases, and low-rank factors of ours and of peft, by the parameter's name
_OTHERS = re.compile(r"(^|\.)(gate|router)\.|bias|lora_|_[AB]_E")


@dataclass(frozen=True, kw_only=True)
class Matrices:
    """How a parameter holds its matrices: [R, C], or a stack [N, R, C].

    blocks: rows of each matrix of those that lie below one another, such as gate and up.
    transposed: blocks lie beside one another instead.
    local: ranks of the mesh's dimension `expert` hold other blocks, so that these are of this rank.
    """

    blocks: tuple[slice, ...] = (slice(None),)
    transposed: bool = False
    local: bool = False


@dataclass(frozen=True, kw_only=True)
class Part:
    """The rows that this rank has of some equal matrices of a parameter.

    heights: rows on each rank of `group`; without a group, the rows of this rank, which are all.
    block: of the local tensor's dimension `across`, its stack first. turned: ranks divide the columns of what is
        stored, so rows are these.
    """

    stack: slice
    across: int
    block: slice
    turned: bool
    heights: tuple[int, ...]
    columns: int
    group: dist.ProcessGroup | None

    @property
    def numel(self) -> int:
        """Numbers in the whole matrices."""
        return (self.stack.stop - self.stack.start) * sum(self.heights) * self.columns

    def of(self, local: Tensor) -> Tensor:
        """A view [N, r, C] of this rank's part of the parameter, or of a tensor of its shape."""
        stack = (local if local.dim() == 3 else local[None])[self.stack]
        here = stack[:, self.block] if self.across == 1 else stack[:, :, self.block]
        return here.mT if self.turned else here


def find_matrices(model: nn.Module) -> dict[nn.Parameter, Matrices | None]:
    """All parameters of a model; None for those that are no hidden matrices.

    These are vectors, biases, convolutions, embeddings, the head (of `get_output_embeddings`; without one, matrices as
    large as the largest embedding), the gates of experts, and low-rank adapters.
    """
    heads: set[nn.Parameter] = set()
    module: Any
    for module in model.modules():
        head = module.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None
        heads.update(() if head is None else head.parameters())
    embeddings = [module.weight.shape for module in model.modules() if isinstance(module, nn.Embedding)]
    vocabulary = None if heads else max(embeddings, default=None)
    found: dict[nn.Parameter, Matrices | None] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(path, recurse=False):
            shape = parameter.shape
            hidden = len(shape) in (2, 3) and min(shape[-2:]) > 1 and shape != vocabulary and parameter not in heads
            if hidden and not _OTHERS.search(name) and not isinstance(module, (nn.Embedding, nn.modules.conv._ConvNd)):
                found.setdefault(parameter, _matrices_of(name, module))
            else:
                found[parameter] = None
    return found


def _matrices_of(name: str, module: Any) -> Matrices:
    if isinstance(module, MixedExperts):
        ends = module.ends[module.held.start : module.held.stop + 1]
        return Matrices(blocks=tuple(slice(a - ends[0], b - ends[0]) for a, b in pairwise(ends)), local=True)
    if not name.endswith("gate_up_proj"):
        return Matrices()
    # of transformers: [E, 2F, D], or [E, D, 2F] if transposed; columns of gate and up alternate in some
    transposed = bool(getattr(module, "is_transposed", False))
    if not getattr(module, "is_concatenated", True):
        return Matrices(blocks=(slice(0, None, 2), slice(1, None, 2)), transposed=transposed)
    half = module.get_parameter("gate_up_proj").shape[2 if transposed else 1] // 2
    return Matrices(blocks=(slice(0, half), slice(half, 2 * half)), transposed=transposed)


def parts_of(parameter: Tensor, matrices: Matrices, most: int) -> list[Part]:
    """This rank's parts of a parameter's matrices; equal in number and order on the ranks that share them.

    Args:
        most: numbers in the whole matrices of a part, unless one matrix has more.

    Raises:
        ValueError: two dimensions of a mesh divide the matrices.
    """
    sizes = [1, *local_part(parameter).shape][-3:]
    group, cut = _sharing(parameter, matrices)  # the dimension that ranks divide, 0 = none
    bounds = [0, sizes[cut or 1]]
    if cut:
        sizes[cut] = parameter.shape[cut - 3]
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        each = -(-sizes[cut] // ranks)  # as FSDP2 divides: the last may have fewer
        bounds = [min(number * each, sizes[cut]) for number in range(ranks + 1)]
    across, parts = 2 if matrices.transposed else 1, []
    for block in matrices.blocks:
        start, stop, step = block.indices(sizes[across])
        length = len(range(start, stop, step))
        if cut == across:
            if step != 1:
                raise UserError(
                    "muon: gate and up alternate along the dimension that FSDP2 shards: shard these experts along "
                    "dimension 0 or not at all (with parallelize: mesh.shard 1, or mesh.expert 1 and a mesh.shard that "
                    "divides num_experts)"
                )
            heights = tuple(max(0, min(b, stop) - max(a, start)) for a, b in pairwise(bounds))
            start = max(start, bounds[rank]) - bounds[rank]
            block = slice(start, start + heights[rank])
            columns = sizes[3 - cut]
        elif cut:
            heights, columns = tuple(b - a for a, b in pairwise(bounds)), length
        else:
            heights, columns = ((length,), sizes[2]) if across == 1 else ((sizes[1],), length)
        together = max(1, most // max(1, sum(heights) * columns))
        parts += [
            Part(
                stack=slice(first, min(first + together, sizes[0])),
                across=across,
                block=block,
                turned=cut == 2,
                heights=heights,
                columns=columns,
                group=group,
            )
            for first in range(0, sizes[0], together)
        ]
    return parts


def _sharing(parameter: Tensor, matrices: Matrices) -> tuple[dist.ProcessGroup | None, int]:
    """The group whose ranks divide each matrix, and the dimension, the stack being 0."""
    if not isinstance(parameter, DTensor):
        return None, 0
    mesh, found = parameter.device_mesh, []
    names = mesh.mesh_dim_names or ("",) * mesh.ndim
    for index, (placement, size) in enumerate(zip(parameter.placements, mesh.shape, strict=True)):
        dimension = getattr(placement, "dim", None)
        if size == 1 or dimension is None or (matrices.local and names[index] == "expert"):
            continue
        if dimension + 3 - parameter.dim():
            found.append((index, dimension + 3 - parameter.dim()))
    if len(found) > 1:
        raise UserError(
            f"muon: {len(found)} dimensions of the mesh divide each matrix of a parameter (placements "
            f"{parameter.placements}); it supports FSDP2 and expert parallelism, not tensor parallelism beside them"
        )
    return (mesh.get_group(found[0][0]), found[0][1]) if found else (None, 0)
