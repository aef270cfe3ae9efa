"""A commit in formats that others read: safetensors files, or PyTorch's own.

Safetensors are what Hugging Face calls a sharded checkpoint: `model-00001-of-00007.safetensors` and an index. Memory
holds one file and what it is made of, not the model.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException

from foundry_moe.checkpoint import exchange
from foundry_moe.checkpoint.codec import DTYPE_NAMES, DTYPES, inline_tensors
from foundry_moe.checkpoint.dcp_reader import Contents
from foundry_moe.checkpoint.errors import CheckpointError
from foundry_moe.checkpoint.layout import Box
from foundry_moe.checkpoint.ledger import Found
from foundry_moe.checkpoint.store import Store
from foundry_moe.models.native.targets import Target, assemble, copied

FILE_BYTES = 5 * 10**9
INDEX = "model.safetensors.index.json"


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
    stored = list(found.manifest.tensors)
    names_of = {stored[source.item]: name for name, source in chosen.items() if source.item is not None}
    read = exchange.read_whole(store, found, names_of)
    inline = {name: source.inline for name, source in chosen.items() if source.inline is not None}
    found_tensors = inline | {names_of[name]: tensor for name, tensor in read.items()}
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
        CheckpointError: data is damaged, safetensors does not have a tensor's dtype, or a file cannot be written.
    """
    dtypes = {target.name: _dtype_of(target, sources, dtype) for target in targets}
    sizes = {target.name: target.count * dtypes[target.name].itemsize for target in targets}
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
            undo.callback((out / name).unlink, missing_ok=True)
            whole = read_whole(store, found, sources, {part.source for target in group for part in target.parts})
            tensors = {target.name: assemble(target, whole.__getitem__, dtypes[target.name]) for target in group}
            try:
                save_file(tensors, out / name, {"format": "pt", "step": str(found.commit.step)})
            except (SafetensorError, OSError, KeyError) as error:
                raise CheckpointError(f"{out / name} cannot be written: {error}") from error
            names |= {target.name: name for target in group}
        undo.pop_all()
    index = out / INDEX
    total = sum(sizes.values())
    index.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": names}, indent=1, sort_keys=True))
    return index


def _dtype_of(target: Target, sources: Mapping[str, Source], dtype: str | None) -> torch.dtype:
    if not target.parts:
        return DTYPES[dtype or "float32"]
    own = DTYPES[sources[target.parts[0].source].dtype]
    return DTYPES[dtype] if dtype and own.is_floating_point and not target.keeps_dtype else own


def export_state(store: Store, found: Found, out: Path, kind: str, section: str | None = None) -> int:
    """Writes the state, which memory holds once, as PyTorch's own functions do; returns how many tensors it has.

    Args:
        kind: `dcp`, a folder for `FileSystemReader`, or `torch`, one file of `torch.save`.
        section: this part of the state alone, for example `model`.

    Raises:
        CheckpointError: `out` exists, there is no such section, or data is damaged: then nothing is written.
    """
    there = out / ".metadata" if kind == "dcp" else out
    if there.exists():
        raise CheckpointError(f"{there} exists: name a new path")
    contents = Contents(found.manifest)
    paths = {name: path for name, path in contents.paths.items() if section in (None, path[0])}
    if not paths:
        sections = sorted({str(path[0]) for path in contents.paths.values()})
        raise CheckpointError(f"the checkpoint has no section {section!r}; it has: {', '.join(sections)}")
    stored = exchange.read_whole(store, found, [name for name in found.manifest.tensors if name in paths])
    state: dict[str, Any] = {}
    for name, path in paths.items():
        set_element(state, path, stored[name] if name in stored else contents.value(name))
    if kind == "dcp":
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            try:
                dcp.save(state, storage_writer=dcp.FileSystemWriter(out), no_dist=True)
            except CheckpointException as failed:
                reason, _ = next(iter(failed.failures.values()))
                raise CheckpointError(f"{out} cannot be written: {reason}") from failed
    else:
        out.parent.mkdir(parents=True, exist_ok=True)
        partial = out.with_name(out.name + ".partial")
        torch.save(state, partial)
        partial.rename(out)
    return sum(isinstance(contents.leaves[name], Tensor) for name in paths)


def weight_map(index: Path) -> Mapping[str, str]:
    """For each tensor of an export the file that holds it."""
    return json.loads(index.read_text())["weight_map"]
