"""A snapshot of a state dict: its description, and the staged bytes that this rank writes.

Only the bytes that this rank will write are copied, into one buffer that has the layout of the stored object and is
reused by the next save. The buffer is pinned if there is a GPU. This module communicates with no rank and no store.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor
from torch.distributed.tensor import DTensor

from foundry_moe.checkpoint.codec import DTYPE_NAMES, decode, encode, tensors_in
from foundry_moe.checkpoint.layout import Block, Layout, layout_of, narrow_to, plan_writes
from foundry_moe.checkpoint.manifest import ALIGN_BYTES, block_hash, object_key
from foundry_moe.checkpoint.store import Store

INLINE_BYTES = 256  # smaller replicated tensors, such as step counters, are stored in the manifest


def place(blocks: list[Block]) -> tuple[list[int], int]:
    """The start of each block of a rank in its object, and the object's size in bytes."""
    starts, end = [], 0
    for block in blocks:
        starts.append(end)
        end = -(-(end + block.size_bytes) // ALIGN_BYTES) * ALIGN_BYTES
    return starts, (starts[-1] + blocks[-1].size_bytes if blocks else 0)


class StagingBuffer:
    """Memory that is reused by all saves, so that its pages are allocated and pinned once."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def reserve(self, size_bytes: int, *, pinned: bool) -> Tensor:
        """A uint8 tensor of `size_bytes`, valid until the next call."""
        if self._memory.numel() < size_bytes or self._memory.is_pinned() is not pinned:
            self._memory = torch.empty(0, dtype=torch.uint8)  # free the old one first
            self._memory = torch.zeros(size_bytes, dtype=torch.uint8, pin_memory=pinned)
        return self._memory[:size_bytes]


@dataclass(frozen=True, kw_only=True)
class Staged:
    """A rank's object in memory: its blocks, and the start of each."""

    blocks: list[Block]
    starts: list[int]
    raw: Tensor  # uint8

    def block(self, index: int, dtype: torch.dtype) -> Tensor:
        """A block's elements."""
        block, start = self.blocks[index], self.starts[index]
        return self.raw[start : start + block.size_bytes].view(dtype).view(block.box[1])

    def hashes(self) -> np.ndarray:
        """The blocks' hashes, uint64."""
        view = self.raw.numpy().data
        placed = zip(self.blocks, self.starts, strict=True)
        return np.array([block_hash(view[at : at + block.size_bytes]) for block, at in placed], dtype=np.uint64)

    def write(self, store: Store, attempt: str, rank: int) -> None:
        """Writes the object unless it is empty."""
        if self.raw.numel():
            store.put(f"{attempt}/{object_key(rank)}", self.raw.numpy().data)


@dataclass(frozen=True, kw_only=True)
class Flat:
    """A flattened state dict: its tensors and layouts by path, and all other values as JSON."""

    tensors: dict[str, Tensor]
    layouts: dict[str, Layout]
    values: Any

    @property
    def planned(self) -> list[tuple[Layout, int]]:
        return [(self.layouts[name], tensor.element_size()) for name, tensor in self.tensors.items()]

    def digest(self) -> str:
        """Equal on ranks whose state dicts have equal tensors and layouts, and therefore equal plans."""
        hasher = xxhash.xxh3_128()
        grids: dict[int, str] = {}
        for name, tensor in self.tensors.items():
            layout = self.layouts[name]
            grid = grids.setdefault(id(layout.grid), repr(layout.grid))
            hasher.update(f"{name}|{tensor.dtype}|{layout.shape}|{layout.sharded}|".encode())
            hasher.update(xxhash.xxh3_64_digest(grid.encode()))
        return hasher.hexdigest()


def flatten(state_dict: Mapping[str, Any], world_size: int, *, inline: bool = True) -> Flat:
    """Takes a nested state dict apart.

    Raises:
        TypeError: a value that cannot be stored; its path is named.
        ValueError: a tensor that cannot be stored: its placement or its dtype.
    """
    tensors: dict[str, Tensor] = {}
    layouts: dict[str, Layout] = {}

    paths: set[str] = set()

    def take(path: str, tensor: Tensor) -> Any:
        if path in paths:
            raise ValueError(f"two tensors have the path {path}: rename a key that contains a dot")
        if len(path) > 4096 or not path.isprintable():
            raise ValueError(f"a tensor has the path {path!a}, which a checkpoint cannot hold: rename its key")
        paths.add(path)
        if inline and not isinstance(tensor, DTensor) and tensor.nbytes <= INLINE_BYTES:
            return encode(tensor)
        if tensor.dtype not in DTYPE_NAMES or tensor.layout is not torch.strided:
            raise ValueError(f"{path} has dtype {tensor.dtype} and layout {tensor.layout}: it cannot be stored")
        tensors[path] = tensor
        layouts[path] = layout_of(tensor, world_size, path)
        return {"$ref": path}

    return Flat(values=encode(state_dict, tensor=take), tensors=tensors, layouts=layouts)


def local_part(tensor: Tensor) -> Tensor:
    """The local part of a tensor, detached."""
    with torch.no_grad():  # to_local() through autograd is four times slower
        return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The input of a save, independent of the live model. `staged` is this rank's part of the tensors."""

    rank: int
    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]]
    layouts: list[Layout]
    digest: str
    staged: Staged
    values: Any

    def staged_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The staged blocks with their tensors' names."""
        described = list(self.tensors.items())
        for index, block in enumerate(self.staged.blocks):
            name, (dtype, _) = described[block.item]
            yield name, self.staged.block(index, dtype)


class Snapshotter:
    """Takes snapshots of one training state. Plans are computed once for each layout."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self._buffer = StagingBuffer()
        self._plans: dict[str, tuple[list[Block], list[int], int]] = {}

    def take(self, state_dict: Mapping[str, Any]) -> Snapshot:
        """Copies what this rank will write. The live tensors may change once this returns."""
        flat = flatten(state_dict, self.world_size)
        digest = flat.digest()
        if digest not in self._plans:
            blocks = plan_writes(flat.planned, rank=self.rank)[self.rank]
            self._plans = {digest: (blocks, *place(blocks))}
        blocks, starts, size_bytes = self._plans[digest]
        tensors, layouts = list(flat.tensors.values()), list(flat.layouts.values())
        on_gpu = any(tensor.device.type == "cuda" for tensor in tensors)
        staged = Staged(blocks=blocks, starts=starts, raw=self._buffer.reserve(size_bytes, pinned=on_gpu))
        locals_: dict[int, Tensor] = {}
        for index, block in enumerate(blocks):
            if block.item not in locals_:
                locals_[block.item] = local_part(tensors[block.item])
            local, ((origin, sizes),) = locals_[block.item], layouts[block.item].boxes_of(self.rank)
            assert tuple(local.shape) == sizes, (tuple(local.shape), sizes)
            target = staged.block(index, tensors[block.item].dtype)
            target.copy_(narrow_to(local, origin, block.box), non_blocking=on_gpu)
        if on_gpu:
            torch.cuda.current_stream().synchronize()
        return Snapshot(
            rank=self.rank,
            tensors={name: (tensor.dtype, flat.layouts[name].shape) for name, tensor in flat.tensors.items()},
            layouts=layouts,
            digest=digest,
            staged=staged,
            values=flat.values,
        )


def is_finite(snapshot: Snapshot) -> bool:
    """Whether this rank's staged weights and optimizer state are finite; rank 0 also checks the small tensors in the
    manifest. Runs in the save's thread, so that no step waits for it. Buffers that no optimizer updates, such as masks,
    may hold infinities."""
    optimizer = snapshot.values.get("optim")
    state = optimizer.get("state") if isinstance(optimizer, Mapping) else None
    parameters = set(state) if isinstance(state, Mapping) else set()

    def is_trained(path: str) -> bool:
        section, _, rest = path.partition(".")
        if section == "optim":  # most small tensors are `step` counters, which are always finite
            return rest.startswith("state.") and not rest.endswith(".step")
        return section == "model" and (not parameters or rest in parameters)

    nodes = tensors_in(snapshot.values) if snapshot.rank == 0 else ()
    small = ((path, decode(node)) for path, tag, node in nodes if tag == "$tensor" and is_trained(path))
    staged = ((path, tensor) for path, tensor in snapshot.staged_tensors() if is_trained(path))
    return all(_tensor_is_finite(tensor) for _, tensor in itertools.chain(staged, small))


def _tensor_is_finite(values: Tensor) -> bool:
    if not values.dtype.is_floating_point or not values.numel():
        return True
    if values.dtype.itemsize == 1:  # torch.aminmax has no 8-bit floats
        values = values.float()
    return all(bool(torch.isfinite(extreme)) for extreme in torch.aminmax(values))
