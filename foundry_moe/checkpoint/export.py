"""A commit's model as a set of safetensors files, written piece by piece: memory holds one block, not the model.

The files are what Hugging Face calls a sharded checkpoint: `model-00001-of-00007.safetensors` and an index. The
format is at https://github.com/huggingface/safetensors#format: 8 bytes of length, a JSON header, raw bytes.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from foundry_moe.checkpoint.codec import DTYPE_NAMES, tensor_bytes
from foundry_moe.checkpoint.codec import DTYPES as TORCH_DTYPES
from foundry_moe.checkpoint.errors import CheckpointError
from foundry_moe.checkpoint.ledger import Found
from foundry_moe.checkpoint.manifest import TensorEntry
from foundry_moe.checkpoint.range_reads import Fetcher, block_of, coalesce
from foundry_moe.checkpoint.reader import inline_tensors
from foundry_moe.checkpoint.store import Store

FILE_BYTES = 5 * 10**9
DTYPES = {
    **{"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "bool": "BOOL"},
    **{"int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8"},
    **{"uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8"},
    **{"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"},
}


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One tensor of the export: stored in blocks, or as bytes in the manifest."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    item: int | None = None
    raw: bytes | None = None

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * TORCH_DTYPES[self.dtype].itemsize


def pieces_of(found: Found, section: str) -> list[Piece]:
    """The tensors of a section, `model` as a rule, without the section's name, in the manifest's order."""
    prefix = section + "."
    pieces = [
        Piece(name=name.removeprefix(prefix), dtype=entry.dtype, shape=entry.shape, item=item)
        for item, (name, entry) in enumerate(found.manifest.tensors.items())
        if name.startswith(prefix)
    ]
    pieces += [
        Piece(
            name=name.removeprefix(prefix),
            dtype=DTYPE_NAMES[tensor.dtype],
            shape=tuple(tensor.shape),
            raw=tensor_bytes(tensor),
        )
        for name, tensor in inline_tensors(found.manifest.values).items()
        if name.startswith(prefix)
    ]
    for piece in pieces:
        if piece.dtype not in DTYPES:
            raise CheckpointError(f"{piece.name} has dtype {piece.dtype}, which safetensors does not have")
    return pieces


def export(store: Store, found: Found, out: Path, *, section: str = "model", file_bytes: int = FILE_BYTES) -> Path:
    """Writes a section of a commit below `out`; returns the index's path.

    Args:
        file_bytes: a file ends before it would grow beyond this; one tensor may.

    Raises:
        CheckpointError: there is no such section, `out` holds an export already, or data is damaged: then no index is
            written.
    """
    pieces = pieces_of(found, section)
    if not pieces:
        sections = sorted({name.split(".")[0] for name in found.manifest.tensors})
        raise CheckpointError(f"the checkpoint has no section {section!r}; it has: {', '.join(sections)}")
    index = out / "model.safetensors.index.json"
    if index.exists():
        raise CheckpointError(f"{index} exists: export to an empty folder")
    out.mkdir(parents=True, exist_ok=True)
    groups: list[list[Piece]] = [[]]
    for piece in pieces:
        if groups[-1] and sum(p.size_bytes for p in groups[-1]) + piece.size_bytes > file_bytes:
            groups.append([])
        groups[-1].append(piece)
    names: dict[str, str] = {}
    for number, group in enumerate(groups, 1):
        name = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        partial = out / (name + ".partial")
        with open(partial, "wb") as file:
            _write_file(file, group, store, found)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(out / name)
        names |= {piece.name: name for piece in group}
    total = sum(piece.size_bytes for piece in pieces)
    index.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": names}, indent=1, sort_keys=True))
    return index


def _write_file(file: IO[bytes], group: list[Piece], store: Store, found: Found) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt", "step": str(found.commit.step)}}
    end = 0
    for piece in group:
        header[piece.name] = {
            "dtype": DTYPES[piece.dtype],
            "shape": list(piece.shape),
            "data_offsets": [end, end + piece.size_bytes],
        }
        end += piece.size_bytes
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    file.write(len(raw).to_bytes(8, "little") + raw)
    base = file.tell()
    file.truncate(base + end)
    entries = list(found.manifest.tensors.values())
    begins = {piece.item: base + header[piece.name]["data_offsets"][0] for piece in group if piece.item is not None}
    for piece in group:
        if piece.raw is not None:
            file.seek(base + header[piece.name]["data_offsets"][0])
            file.write(piece.raw)
    blocks = [block_of(entries[item], item, index) for item in begins for index in range(len(entries[item].object_B))]
    fetcher = Fetcher(store, found.commit.attempt, found.manifest)
    ranges = coalesce(found.manifest, blocks)
    for part, data in zip(ranges, fetcher.stream(ranges), strict=True):
        if isinstance(data, CheckpointError):
            raise data
        view = data[0]
        for block, start in part.blocks:
            _write_block(
                file, begins[block.item], entries[block.item], block.box, view[start : start + block.size_bytes]
            )


def _write_block(
    file: IO[bytes], begin: int, entry: TensorEntry, box: tuple[tuple[int, ...], tuple[int, ...]], data: memoryview
) -> None:
    """Puts a block into its rows of the tensor, which is contiguous in the file."""
    offsets, sizes = box
    strides = [entry.itemsize * math.prod(entry.shape[dim + 1 :]) for dim in range(len(entry.shape))]
    inner = len(sizes)  # dimensions from here on are whole, so that their elements lie together
    while inner > 0 and sizes[inner - 1] == entry.shape[inner - 1]:
        inner -= 1
    run = inner - 1 if inner else 0
    run_bytes = (sizes[run] * strides[run]) if sizes else entry.itemsize
    outer: tuple[int, ...] = sizes[:run]
    for number, coordinate in enumerate(np.ndindex(*outer)):
        where = sum((o + c) * s for o, c, s in zip(offsets, coordinate, strides, strict=False))
        where += offsets[run] * strides[run] if sizes else 0
        file.seek(begin + where)
        file.write(data[number * run_bytes : (number + 1) * run_bytes])


def weight_map(index: Path) -> Mapping[str, str]:
    """For each tensor of an export the file that holds it."""
    return json.loads(index.read_text())["weight_map"]
