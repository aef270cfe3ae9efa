"""A training state as a checkpoint has it: tensors with their layouts, and all other values.

A snapshot of it is the input of a save. Only the bytes that this rank will write are copied, into one buffer that has
the layout of the stored object and is reused by the next save; the buffer is pinned if there is a GPU. A load fills its
tensors in place. This module communicates with no rank and no store.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor
from torch.distributed.tensor import DTensor

from foundry_moe.checkpoint.codec import DTYPE_NAMES, DTYPES, decode, encode, inline_tensors
from foundry_moe.checkpoint.errors import MismatchError
from foundry_moe.checkpoint.exchange import Targets
from foundry_moe.checkpoint.layout import Block, Layout, layout_of, narrow_to, plan_writes, replicated
from foundry_moe.checkpoint.manifest import ALIGN_BYTES, Manifest, Row, block_hash, object_key, tensors_in
from foundry_moe.checkpoint.store import Store
from foundry_moe.schema import UserError

INLINE_BYTES = 256  # smaller replicated tensors, such as step counters, are stored in the manifest
STRICT = ("model", "optim")  # sections whose tensors must match exactly in a load
NAMES_SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class ObjectPlan:
    """The blocks of a rank's object, the start of each, and the size of the object."""

    blocks: list[Block]
    starts: list[int]
    size_bytes: int

    def rows(self, names: Sequence[str], hashes: np.ndarray) -> list[Row]:
        """The manifest's rows of these blocks, from the names of the tensors and the blocks' hashes."""
        hashed = zip(self.blocks, self.starts, hashes.tolist(), strict=True)
        return [(names[block.item], block.box, start, digest) for block, start, digest in hashed]


def place(blocks: list[Block]) -> ObjectPlan:
    """Places the blocks of a rank in its object, in their order."""
    starts, end = [], 0
    for block in blocks:
        starts.append(-(-end // ALIGN_BYTES) * ALIGN_BYTES)
        end = starts[-1] + block.size_bytes
    return ObjectPlan(blocks=blocks, starts=starts, size_bytes=end)


class Staging:
    """A rank's object in memory. All saves use the same memory, so that its pages are allocated and pinned once."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def begin(self, plan: ObjectPlan, *, pinned: bool) -> None:
        """Provides memory for an object, before its blocks are filled."""
        if self._memory.numel() < plan.size_bytes or self._memory.is_pinned() is not pinned:
            self._memory = torch.empty(0, dtype=torch.uint8)  # free the old one first
            self._memory = torch.zeros(plan.size_bytes, dtype=torch.uint8, pin_memory=pinned)
        self.plan, self.raw = plan, self._memory[: plan.size_bytes]

    def block(self, index: int, dtype: torch.dtype) -> Tensor:
        block, start = self.plan.blocks[index], self.plan.starts[index]
        return self.raw[start : start + block.size_bytes].view(dtype).view(block.box[1])

    def hashes(self) -> np.ndarray:
        view = self.raw.numpy().data
        placed = zip(self.plan.blocks, self.plan.starts, strict=True)
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
        for name, tensor in self.tensors.items():
            hasher.update(f"{name}|{tensor.dtype}|".encode() + self.layouts[name].digest)
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
            raise UserError(f"two tensors have the path {path}: rename a key that contains a dot")
        if len(path) > 4096 or not path.isprintable():
            raise UserError(f"a tensor has the path {path!a}, which a checkpoint cannot hold: rename its key")
        paths.add(path)
        if inline and not isinstance(tensor, DTensor) and tensor.nbytes <= INLINE_BYTES:
            return encode(tensor)
        if tensor.dtype not in DTYPE_NAMES or tensor.layout is not torch.strided:
            raise UserError(f"{path} has dtype {tensor.dtype} and layout {tensor.layout}: it cannot be stored")
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
    """The input of a save, independent of the live model."""

    rank: int
    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]]  # dtype and shape, by path
    digest: str  # see `Flat.digest`
    plans: dict[int, ObjectPlan]  # of this rank; on rank 0 of all ranks
    staged: Staging  # this rank's object
    values: Any  # all others, as JSON


class Snapshotter:
    """Takes snapshots of one training state. Plans are computed once for each layout."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self._staging = Staging()
        self._plans: tuple[str, dict[int, ObjectPlan]] = ("", {})  # with the digest of their layouts

    def take(self, state_dict: Mapping[str, Any]) -> Snapshot:
        """Copies what this rank will write. The live tensors may change once this returns."""
        flat = flatten(state_dict, self.world_size)
        digest = flat.digest()
        if digest != self._plans[0]:
            blocks_of = plan_writes(flat.planned, rank=self.rank or None)  # rank 0 plans for all
            self._plans = digest, {rank: place(blocks) for rank, blocks in blocks_of.items()}
        plans = self._plans[1]
        plan = plans.get(self.rank, place([]))
        tensors, layouts = list(flat.tensors.values()), list(flat.layouts.values())
        on_gpu = any(tensor.device.type == "cuda" for tensor in tensors)
        self._staging.begin(plan, pinned=on_gpu)
        locals_: dict[int, Tensor] = {}
        for index, block in enumerate(plan.blocks):
            if block.item not in locals_:
                locals_[block.item] = local_part(tensors[block.item])
            local, ((origin, sizes),) = locals_[block.item], layouts[block.item].boxes_of(self.rank)
            assert tuple(local.shape) == sizes, (tuple(local.shape), sizes)
            target = self._staging.block(index, tensors[block.item].dtype)
            target.copy_(narrow_to(local, origin, block.box), non_blocking=on_gpu)
        if on_gpu:
            torch.cuda.current_stream().synchronize()
        return Snapshot(
            rank=self.rank,
            tensors={name: (tensor.dtype, flat.layouts[name].shape) for name, tensor in flat.tensors.items()},
            digest=digest,
            plans=plans,
            staged=self._staging,
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
    tensors = [(path, decode(node)) for path, tag, node in nodes if tag == "$tensor" and is_trained(path)]
    described = list(snapshot.tensors.items())
    for index, block in enumerate(snapshot.staged.plan.blocks):
        name, (dtype, _) = described[block.item]
        tensors.append((name, snapshot.staged.block(index, dtype)))
    for path, tensor in tensors:
        if is_trained(path) and tensor.dtype.is_floating_point and tensor.numel():
            # torch.aminmax has no 8-bit floats
            extremes = torch.aminmax(tensor.float() if tensor.dtype.itemsize == 1 else tensor)
            if not all(bool(torch.isfinite(extreme)) for extreme in extremes):
                return False
    return True


def targets_in(
    state_dict: Mapping[str, Any],
    manifest: Manifest,
    *,
    rank: int,
    world_size: int,
    sections: Collection[str] | None = None,
) -> tuple[Targets, dict[str, Any]]:
    """The tensors of a state dict as targets of a load, on any mesh, and the whole state as it was saved, with these
    tensors. Sections `model` and `optim` must match the checkpoint; other sections may lack or add tensors.

    Args:
        sections: those of the checkpoint that are read; None = all.

    Raises:
        MismatchError: the checkpoint belongs to another model.
        DamagedError: values cannot be read.
    """
    flat = flatten(state_dict, world_size, inline=False)
    tensors, layouts = dict(flat.tensors), dict(flat.layouts)
    stored, entries = manifest.values, manifest.tensors
    if sections is not None:
        stored = {key: value for key, value in stored.items() if key in sections}
        entries = {name: entry for name, entry in entries.items() if name.partition(".")[0] in sections}
    small = inline_tensors(stored)
    here = {name: (layouts[name].shape, DTYPE_NAMES[tensor.dtype]) for name, tensor in tensors.items()}
    saved = {name: (entry.shape, entry.dtype) for name, entry in entries.items()}
    saved |= {name: (tuple(tensor.shape), DTYPE_NAMES[tensor.dtype]) for name, tensor in small.items()}
    _check_same(here, saved, manifest.info.get("step"))
    for name, entry in entries.items():
        if here.get(name) != saved[name]:  # of another section: read in full on every rank
            tensors[name] = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
            layouts[name] = replicated(entry.shape, world_size)
    for name, tensor in small.items():
        if here.get(name) == saved[name]:
            for box in layouts[name].boxes_of(rank):
                local_part(tensors[name]).copy_(narrow_to(tensor, (0,) * tensor.ndim, box))
        else:
            tensors.pop(name, None)  # of another section: returned as it was saved
    places = {name: [(box, local_part(tensors[name])) for box in layouts[name].boxes_of(rank)] for name in entries}
    values = copy.deepcopy(stored)
    for path, tag, node in tensors_in(values):
        if tag == "$tensor" and path in tensors:
            del node["$tensor"]
            node["$ref"] = path
    return Targets(manifest, rank, layouts, places), decode(values, tensor=tensors.__getitem__)


def _check_same(
    here: Mapping[str, tuple[tuple[int, ...], str]], saved: Mapping[str, tuple[tuple[int, ...], str]], step: Any
) -> None:
    """Raises MismatchError unless shapes and dtypes of the strict sections are equal."""
    problems = []
    for name in sorted(here.keys() | saved.keys()):
        if name.split(".")[0] not in STRICT or here.get(name) == saved.get(name):
            continue
        if name not in saved:
            problems.append(f"{name} is not in the checkpoint")
        elif name not in here:
            problems.append(f"{name} {list(saved[name][0])} is not in this model")
        else:
            (shape, dtype), (shape_there, dtype_there) = here[name], saved[name]
            problems.append(f"{name} is {dtype} {list(shape)} here and {dtype_there} {list(shape_there)} there")
    if problems:
        more = f"; and {len(problems) - NAMES_SHOWN} more" if len(problems) > NAMES_SHOWN else ""
        raise MismatchError(
            f"the checkpoint of step {step} belongs to another model or optimizer: {'; '.join(problems[:NAMES_SHOWN])}"
            f"{more}. Nothing was loaded: give this run another folder, or the model, optimizer and `freeze` that the "
            "checkpoint was written with"
        )
