"""Weights of other formats as a folder's first commit, from which a run begins as from any checkpoint.

Reads safetensors and plain state dicts that `torch.save` wrote. Files that can hold code, such as Composer's
checkpoints and folders that torch.distributed.checkpoint wrote, are read only if the user trusts them and says so. The
weights are held in memory once.
"""

from __future__ import annotations

import warnings
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from foundry_moe.checkpoint.codec import DTYPE_NAMES
from foundry_moe.checkpoint.engine import CheckpointEngine, Policy
from foundry_moe.checkpoint.errors import CheckpointError
from foundry_moe.checkpoint.ledger import Ledger
from foundry_moe.checkpoint.store import Store
from foundry_moe.checkpoint.strict import shown
from foundry_moe.commands.parsers import TRUST
from foundry_moe.models.pretrained import safetensors_in

PREFIXES = ("state.model.", "model.")  # Composer's, and a common one
SHARED = 4  # tensors that share memory, as tied embeddings do, may be this many times as large as their file


def import_weights(
    source: str,
    store: Store,
    *,
    prefix: str = "",
    trust_pickle: bool = False,
    rename: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None,
) -> tuple[int, int]:
    """Commits the weights of `source` as step 0; returns how many tensors and bytes.

    Args:
        prefix: put before each name.
        trust_pickle: read pickles as Python does, which runs whatever code is in them.
        rename: gives all tensors the names and layouts of a run; it may raise ValueError.

    Raises:
        ValueError: an index of safetensors that is invalid, or a symbolic link out of the folder.
        CheckpointError: no such source, a format that is not known, a file that needs `trust_pickle`, or a folder that
            holds commits already.
    """
    if Ledger(store).newest_first():
        raise CheckpointError(f"{store.url} holds checkpoints already: import into an empty folder")
    weights = {prefix + name: tensor for name, tensor in read_weights(Path(source), trust_pickle).items()}
    if rename is not None:
        weights = rename(weights)
    if not weights:
        raise CheckpointError(f"{source} holds no tensors")
    for name, tensor in weights.items():
        if not name.isprintable():
            raise CheckpointError(f"{source}: {shown(name)} cannot be a tensor's name")
        if tensor.layout is not torch.strided or tensor.device.type != "cpu" or tensor.dtype not in DTYPE_NAMES:
            raise CheckpointError(f"{source}: {shown(name)} is a {tensor.layout} of {tensor.dtype}, which is no weight")
    info = {"weights_only": True, "source": source if source.isprintable() else ascii(source)}
    engine = CheckpointEngine(store, policy=Policy(asynchronous=False, max_failures=2), info=info)
    engine.save({"model": weights}, 0)
    report = engine.wait()
    assert report is not None
    if report.error is not None:
        raise CheckpointError(report.error)
    return len(weights), sum(tensor.nbytes for tensor in weights.values())


def read_weights(source: Path, trust_pickle: bool = False) -> dict[str, Tensor]:
    """The model's tensors by name."""
    if not source.exists():
        raise CheckpointError(f"{source}: there is no such file or folder")
    if source.is_dir():
        files = safetensors_in(source)
        if files:
            return _read_all(files)
        if not (source / ".metadata").is_file():
            raise CheckpointError(f"{source} holds neither .metadata nor safetensors files")
        if not trust_pickle:
            raise CheckpointError(f"{source}: the index of torch.distributed.checkpoint is a pickle: {TRUST}")
        return _read_distributed(source)
    if not source.is_file():
        raise CheckpointError(f"{source} is neither a file nor a folder")
    if source.suffix == ".safetensors":
        return _read_all([source])
    return _read_torch(source, trust_pickle)


def _read_all(files: Iterable[Path]) -> dict[str, Tensor]:
    """The tensors of several safetensors files, each of which is in one of them."""
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            found = load_file(file)
        except (SafetensorError, OSError, ValueError, KeyError) as error:
            raise CheckpointError(f"{file} cannot be read as safetensors: {error}") from error
        twice = sorted(found.keys() & tensors.keys())
        if twice:
            raise CheckpointError(f"{file} holds {shown(twice[0])}, which another file of the folder holds too")
        tensors |= found
    return tensors


def _read_torch(file: Path, trust_pickle: bool) -> dict[str, Tensor]:
    """A state dict, alone or as `state.model`, `model` or `state_dict` of a larger one."""
    try:
        if trust_pickle:
            content: Any = torch.load(file, map_location="cpu", weights_only=False)
        else:
            with zipfile.ZipFile(file) as archive:
                if any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist()):
                    raise CheckpointError("it is compressed, as torch.save does not")
            content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)  # no more memory than its size
    except Exception as error:
        reason = next((line for line in str(error).splitlines() if "GLOBAL" in line), str(error).split("\n")[0])
        raise CheckpointError(
            f"{file} cannot be read: {reason.strip()}; save its state dict by itself, or, {TRUST}"
        ) from error
    size = file.stat().st_size
    for path in (("state", "model"), ("model",), ("state_dict",), ()):
        inner = content
        for key in path:
            inner = inner.get(key) if isinstance(inner, Mapping) else None
        if isinstance(inner, Mapping) and inner and all(isinstance(value, Tensor) for value in inner.values()):
            if not all(isinstance(name, str) for name in inner):
                raise CheckpointError(f"{file} holds tensors whose names are not text")
            total = sum(tensor.numel() * tensor.element_size() for tensor in inner.values())
            if total > SHARED * size:  # a few stored elements that claim to be many
                raise CheckpointError(f"{file}: its tensors would have {total} bytes, and the file has {size}")
            return dict(inner)
    raise CheckpointError(f"{file} holds no state dict: it is a {type(content).__name__} of other things")


def _read_distributed(folder: Path) -> dict[str, Tensor]:
    """The tensors below the first of `PREFIXES` that occurs, all if none does, without it."""
    reader = dcp.FileSystemReader(folder)
    try:
        index = reader.read_metadata().state_dict_metadata
        entries = {name: entry for name, entry in index.items() if isinstance(entry, TensorStorageMetadata)}
        prefix = next((p for p in PREFIXES if any(name.startswith(p) for name in entries)), "")
        wanted = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype)
            for name, entry in entries.items()
            if name.startswith(prefix)
        }
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(wanted, storage_reader=reader, no_dist=True)
    except (Exception, CheckpointException) as error:
        failures = error.failures if isinstance(error, CheckpointException) else {0: (error, None)}
        said = "; ".join(" ".join(str(reason).split())[:400] for reason, _ in failures.values())
        raise CheckpointError(f"{folder} cannot be read: {said}") from error
    return {name.removeprefix(prefix): tensor for name, tensor in wanted.items()}
