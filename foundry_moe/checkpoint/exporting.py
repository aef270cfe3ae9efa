"""A commit's tensors as a set of safetensors files, written piece by piece: memory holds one block, not the model.

The files are what Hugging Face calls a sharded checkpoint: `model-00001-of-00007.safetensors` and an index. The
format is at https://github.com/huggingface/safetensors#format: 8 bytes of length, a JSON header, raw bytes.
"""

from __future__ import annotations

import bisect
import contextlib
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from foundry_moe.checkpoint.codec import DTYPE_NAMES, inline_tensors
from foundry_moe.checkpoint.codec import DTYPES as TORCH_DTYPES
from foundry_moe.checkpoint.errors import CheckpointError
from foundry_moe.checkpoint.layout import Box, intersect, narrow_to
from foundry_moe.checkpoint.ledger import Found
from foundry_moe.checkpoint.range_reads import Fetcher, blocks_of
from foundry_moe.checkpoint.store import Store
from foundry_moe.checkpoint.targets import Part, Target, copied

FILE_BYTES = 5 * 10**9
INDEX = "model.safetensors.index.json"
DTYPES = {
    **{"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "bool": "BOOL"},
    **{"int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8"},
    **{"uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8"},
    **{"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"},
}


@dataclass(frozen=True, kw_only=True)
class Source:
    """One tensor of a commit: stored in blocks as the manifest's `item`, or `inline` in the manifest.

    added: gives the fp64 numbers that are added to a box of it, such as a LoRA adapter's; None = nothing.
    """

    dtype: str
    shape: tuple[int, ...]
    item: int | None = None
    inline: Tensor | None = None
    added: Callable[[Box], Tensor] | None = None

    def sum(self, box: Box, stored: Tensor) -> Tensor:
        """The numbers of a box as they are exported, in the stored dtype."""
        return stored if self.added is None else (stored.double() + self.added(box)).to(stored.dtype)


def sources_of(found: Found, section: str) -> dict[str, Source]:
    """The tensors of a section, `model` as a rule, by name without the section's, in the manifest's order.

    Raises:
        CheckpointError: there is no such section.
    """
    prefix = section + "."
    sources = {
        name.removeprefix(prefix): Source(dtype=entry.dtype, shape=entry.shape, item=item)
        for item, (name, entry) in enumerate(found.manifest.tensors.items())
        if name.startswith(prefix)
    }
    sources |= {
        name.removeprefix(prefix): Source(dtype=DTYPE_NAMES[tensor.dtype], shape=tuple(tensor.shape), inline=tensor)
        for name, tensor in inline_tensors(found.manifest.values).items()
        if name.startswith(prefix)
    }
    if not sources:
        sections = sorted({name.split(".")[0] for name in found.manifest.tensors})
        raise CheckpointError(f"the checkpoint has no section {section!r}; it has: {', '.join(sections)}")
    return sources


def read_whole(store: Store, found: Found, sources: Mapping[str, Source], names: Iterable[str]) -> dict[str, Tensor]:
    """Tensors of a commit whole in memory: for tools that compare, not for training.

    Raises:
        CheckpointError: data is damaged.
    """
    chosen = {name: sources[name] for name in names}
    items = {source.item: name for name, source in chosen.items() if source.item is not None}
    read = Fetcher(store, found.commit.attempt, found.manifest).whole(items)
    inline = {name: source.inline for name, source in chosen.items() if source.inline is not None}
    found_tensors = inline | {items[item]: tensor for item, tensor in read.items()}
    return {
        name: chosen[name].sum(((0,) * tensor.dim(), tuple(tensor.shape)), tensor)
        for name, tensor in found_tensors.items()
    }


def export(store: Store, found: Found, out: Path, *, section: str = "model", file_bytes: int = FILE_BYTES) -> Path:
    """Writes a section of a commit below `out`, as it is; returns the index's path.

    Args:
        file_bytes: a file ends before it would grow beyond this; one tensor may.

    Raises:
        CheckpointError: there is no such section, `out` holds an export already, or data is damaged: then no file
            stays.
    """
    sources = sources_of(found, section)
    index = out / INDEX
    if index.exists():
        raise CheckpointError(f"{index} exists: export to an empty folder")
    targets = [copied(name, name, source.shape) for name, source in sources.items()]
    return write_targets(store, found, sources, targets, out, file_bytes=file_bytes)


def write_targets(
    store: Store,
    found: Found,
    sources: Mapping[str, Source],
    targets: Sequence[Target],
    out: Path,
    *,
    dtype: str | None = None,
    file_bytes: int = FILE_BYTES,
) -> Path:
    """Writes tensors that are cut and put together from a commit's below `out`, and then their index.

    Args:
        dtype: floating-point tensors are cast to it; None = as they are.

    Raises:
        CheckpointError: data is damaged, or safetensors does not have a tensor's dtype.
        OSError: there is no space for the files: looked at before each is filled.
    """
    kinds = {target.name: _dtype_of(target, sources, dtype) for target in targets}
    sizes = {target.name: target.count * TORCH_DTYPES[kinds[target.name]].itemsize for target in targets}
    out.mkdir(parents=True, exist_ok=True)
    groups: list[list[Target]] = [[]]
    filled = 0
    for target in targets:
        if groups[-1] and filled + sizes[target.name] > file_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(target)
        filled += sizes[target.name]
    names: dict[str, str] = {}
    with contextlib.ExitStack() as undo:  # what was written goes if one file fails
        for number, group in enumerate(groups, 1):
            name = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
            partial = out / (name + ".partial")
            undo.callback(partial.unlink, missing_ok=True)
            with open(partial, "wb") as file:
                begins = _begin_file(file, group, kinds, sizes, found.commit.step)
                _fill_file(file, group, begins, {n: TORCH_DTYPES[k] for n, k in kinds.items()}, sources, store, found)
                file.flush()
                os.fsync(file.fileno())
            undo.callback(partial.rename(out / name).unlink, missing_ok=True)
            names |= {target.name: name for target in group}
        undo.pop_all()
    index = out / INDEX
    total = sum(sizes.values())
    index.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": names}, indent=1, sort_keys=True))
    return index


def _dtype_of(target: Target, sources: Mapping[str, Source], dtype: str | None) -> str:
    if not target.parts:
        return dtype or "float32"
    own = sources[target.parts[0].source].dtype
    cast = dtype if dtype and TORCH_DTYPES[own].is_floating_point and not target.keeps_dtype else own
    if cast not in DTYPES:
        raise CheckpointError(f"{target.name} has dtype {cast}, which safetensors does not have")
    return cast


def _begin_file(
    file: IO[bytes], group: Sequence[Target], kinds: Mapping[str, str], sizes: Mapping[str, int], step: int
) -> dict[str, int]:
    """Writes the header and reserves the rest; returns where each tensor begins."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", "step": str(step)}}
    begins, end = {}, 0
    for target in group:
        size = sizes[target.name]
        header[target.name] = {
            "dtype": DTYPES[kinds[target.name]],
            "shape": list(target.shape),
            "data_offsets": [end, end + size],
        }
        begins[target.name] = end
        end += size
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    file.write(len(raw).to_bytes(8, "little") + raw)
    base = file.tell()
    if end:
        file.flush()
        os.posix_fallocate(file.fileno(), base, end)  # a full disk is said now, and not in the middle
    return {name: base + begin for name, begin in begins.items()}


def _fill_file(
    file: IO[bytes],
    group: Sequence[Target],
    begins: Mapping[str, int],
    dtypes: Mapping[str, torch.dtype],
    sources: Mapping[str, Source],
    store: Store,
    found: Found,
) -> None:
    """Brings each block of the commit to its places in the file."""
    pieces: dict[str, list[tuple[int, Target, Part]]] = {}
    for target in group:
        for part in target.parts:
            pieces.setdefault(part.source, []).append((part.box[0][0] if part.box[0] else 0, target, part))
    for placed in pieces.values():
        placed.sort(key=lambda piece: piece[0])

    def put(name: str, box: Box, tensor: Tensor) -> None:
        placed, tensor = pieces[name], sources[name].sum(box, tensor)
        behind = box[0][0] + box[1][0] if box[0] else 1
        for _, target, part in placed[: bisect.bisect_left(placed, behind, key=lambda piece: piece[0])]:
            common = intersect(box, part.box)
            if common is not None:
                piece = part.turned(narrow_to(tensor, box[0], common)).to(dtypes[target.name]).contiguous()
                _write_box(file, begins[target.name], target.shape, part.place_of(common), piece)

    items: dict[int, str] = {}
    for name in pieces:
        source = sources[name]
        if source.inline is not None:
            put(name, ((0,) * len(source.shape), source.shape), source.inline)
        else:
            assert source.item is not None
            items[source.item] = name
    blocks = [
        block
        for block in blocks_of(found.manifest, items)
        if any(intersect(block.box, part.box) for _, _, part in pieces[items[block.item]])
    ]
    for block, tensor in Fetcher(store, found.commit.attempt, found.manifest).pieces(blocks):
        put(items[block.item], block.box, tensor)


def _write_box(file: IO[bytes], begin: int, shape: tuple[int, ...], offsets: tuple[int, ...], piece: Tensor) -> None:
    """Puts a box into its rows of a tensor of that shape, which is contiguous in the file."""
    data = piece.reshape(-1).view(torch.uint8).numpy().data
    sizes, itemsize = tuple(piece.shape), piece.element_size()
    strides = [itemsize * math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    inner = len(sizes)  # dimensions from here on are whole, so that their elements lie together
    while inner > 0 and sizes[inner - 1] == shape[inner - 1]:
        inner -= 1
    run = inner - 1 if inner else 0
    run_bytes = (sizes[run] * strides[run]) if sizes else itemsize
    outer: tuple[int, ...] = sizes[:run]
    for number, coordinate in enumerate(np.ndindex(*outer)):
        where = sum((o + c) * s for o, c, s in zip(offsets, coordinate, strides, strict=False))
        where += offsets[run] * strides[run] if sizes else 0
        file.seek(begin + where)
        file.write(data[number * run_bytes : (number + 1) * run_bytes])


def weight_map(index: Path) -> Mapping[str, str]:
    """For each tensor of an export the file that holds it."""
    return json.loads(index.read_text())["weight_map"]
