"""A commit in formats that others read: safetensors files, or PyTorch's own.

Safetensors have Hugging Face's sharded layout: `model-00001-of-00007.safetensors` and an index. Memory holds one file
and its sources, not the model.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from foundry_moe.checkpoint.ledger import Found
from foundry_moe.checkpoint.store import Store
from foundry_moe.models.blocks import whole
from foundry_moe.models.native.targets import Target, assemble, targets_of
from foundry_moe.schema import UserError

INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, kw_only=True)
class Source:
    """One tensor of a commit: stored in blocks under the manifest's name, or `inline`, in memory.

    dtype: it is read as; only the sum with `added` may have another than the tensor.
    added: gives an fp64 tensor that is added to it, such as the product of a LoRA adapter; None = nothing.
    """

    dtype: str
    shape: tuple[int, ...]
    stored: str = ""
    inline: Tensor | None = None
    added: Callable[[], Tensor] | None = None

    @staticmethod
    def of(tensor: Tensor) -> Source:
        """A tensor in memory."""
        return Source(dtype=DTYPE_NAMES[tensor.dtype], shape=tuple(tensor.shape), inline=tensor)


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Tensors of a commit, by name."""

    store: Store
    found: Found
    sources: Mapping[str, Source]

    @staticmethod
    def of(store: Store, found: Found) -> Weights:
        """The model's tensors by name, in the manifest's order."""
        prefix = "model."
        manifest = found.manifest
        every = {name: Source(dtype=e.dtype, shape=e.shape, stored=name) for name, e in manifest.tensors.items()}
        every |= {name: Source.of(tensor) for name, tensor in inline_tensors(manifest.values).items()}
        sources = {name.removeprefix(prefix): source for name, source in every.items() if name.startswith(prefix)}
        if not sources:
            sections = sorted({name.split(".")[0] for name in manifest.tensors})
            raise CheckpointError(f"the checkpoint has no section 'model'; it has: {', '.join(sections)}")
        return Weights(store=store, found=found, sources=sources)

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Tensors whole in memory."""
        chosen = {name: self.sources[name] for name in names}
        stored = [source.stored for source in chosen.values() if source.stored]
        read = exchange.read_whole(self.store, self.found, stored)
        tensors = {}
        for name, source in chosen.items():
            tensor = read[source.stored] if source.inline is None else source.inline
            tensors[name] = (
                tensor if source.added is None else (tensor.double() + source.added()).to(DTYPES[source.dtype])
            )
        return tensors


@contextmanager
def beside(out: Path, *, folder: bool = True) -> Iterator[Path]:
    """A new folder next to `out`; it, or the file of `out`'s name in it, becomes `out` at the end.

    After an error it is removed.

    Raises:
        ValueError: `out` is in use.
        CheckpointError: `out` cannot be written.
    """
    out = out.resolve()
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    try:
        if out.exists() and (not folder or not out.is_dir() or any(out.iterdir())):
            raise UserError(f"{out} exists{' and is not empty' if folder else ''}: name a new path")
        partial.mkdir(parents=True)
        yield partial
        (partial if folder else partial / out.name).rename(out)
    except OSError as error:
        raise CheckpointError(f"{out} cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def export(store: Store, found: Found, out: Path, *, file_bytes: float) -> dict[str, str]:
    """Writes the model of a commit to the folder `out`, as it is; returns the file of each tensor, as the index has it.

    A file ends before it would grow beyond `file_bytes`; one tensor may.
    """
    weights = Weights.of(store, found)
    targets = targets_of(whole(name, name, *source.shape) for name, source in weights.sources.items())
    with beside(out) as partial:
        return write_targets(weights, targets, partial, file_bytes=file_bytes)


def write_targets(
    weights: Weights, targets: Sequence[Target], out: Path, *, dtype: str | None = None, file_bytes: float
) -> dict[str, str]:
    """Writes tensors to the folder `out`, each assembled from parts of a commit's tensors, and then their index.

    Floating-point tensors are cast to `dtype`; None = as they are.
    """
    dtypes = {target.name: _dtype_of(target, weights.sources, dtype) for target in targets}
    sizes = {target.name: target.count * dtypes[target.name].itemsize for target in targets}
    groups: list[list[Target]] = [[]]
    filled = 0
    for target in targets:
        if groups[-1] and filled + sizes[target.name] > file_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(target)
        filled += sizes[target.name]
    names: dict[str, str] = {}
    for number, group in enumerate(groups, 1):
        name = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        held = weights.read({part.ours for target in group for part in target.parts})
        tensors = {target.name: assemble(target, held.__getitem__, dtypes[target.name]) for target in group}
        try:
            save_file(tensors, out / name, {"format": "pt", "step": str(weights.found.commit.step)})
        except (SafetensorError, OSError, KeyError) as error:
            raise CheckpointError(f"{out / name} cannot be written: {error}") from error
        names |= {target.name: name for target in group}
    index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": names}
    (out / INDEX).write_text(json.dumps(index, indent=1, sort_keys=True))
    return names


def _dtype_of(target: Target, sources: Mapping[str, Source], dtype: str | None) -> torch.dtype:
    own = DTYPES[sources[target.parts[0].ours].dtype]
    return DTYPES[dtype] if dtype and own.is_floating_point and not target.keeps_dtype else own


def export_state(store: Store, found: Found, out: Path, kind: str) -> int:
    """Writes the state, which memory holds once, as PyTorch's own functions do; returns how many tensors it has.

    Args:
        kind: `dcp`, a folder for `FileSystemReader`, or `torch`, one file of `torch.save`.
    """
    contents = Contents(found.manifest)
    stored = exchange.read_whole(store, found, list(found.manifest.tensors))
    state: dict[str, Any] = {}
    for name, path in contents.paths.items():
        set_element(state, path, stored[name] if name in stored else contents.value(name))
    with beside(out, folder=kind == "dcp") as partial, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            if kind == "dcp":
                dcp.save(state, storage_writer=dcp.FileSystemWriter(partial), no_dist=True)
            else:
                torch.save(state, partial / out.name)
        except CheckpointException as failed:
            reason, _ = next(iter(failed.failures.values()))
            raise CheckpointError(f"{out} cannot be written: {reason}") from failed
    return sum(isinstance(contents.leaves[name], Tensor) for name in contents.paths)
