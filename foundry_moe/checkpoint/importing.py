"""Weights of other formats as a folder's first commit, from which a run begins as from any checkpoint.

Read are safetensors, a plain state dict saved by `torch.save`, Composer's single-file checkpoints, and folders that
torch.distributed.checkpoint wrote, Composer's sharded ones among them. Nothing in them is run: pickles are read by
`weights_only` and by an unpickler with a list of classes, and what asks for more is refused, unless the user trusts
it and says so. The weights are held in memory once.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from foundry_moe.checkpoint.codec import DTYPE_NAMES
from foundry_moe.checkpoint.distributed_files import check_archive, read_tensors
from foundry_moe.checkpoint.engine import CheckpointEngine, Policy
from foundry_moe.checkpoint.errors import CheckpointError
from foundry_moe.checkpoint.ledger import Ledger
from foundry_moe.checkpoint.safetensors_files import safetensors_in
from foundry_moe.checkpoint.store import Store
from foundry_moe.checkpoint.strict import shown

PREFIXES = ("state.model.", "model.")  # Composer's, and a common one
SHARED = 4  # tensors that share memory, as tied embeddings do, may be so many times as large as their file
TRUST = "if you trust whoever made it, add --trust-pickle, which lets it run code"
_REBUILD, _SCALAR = np.zeros(0).__reduce__()[0], np.float64(0).__reduce__()[0]
# beside tensors: Composer's times, versions and random states
_HARMLESS: list[Any] = [
    datetime.timedelta,
    torch.torch_version.TorchVersion,
    np.ndarray,
    np.dtype,
    *(type(np.dtype(name)) for name in ("b1", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8")),
    *((_REBUILD, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")),
    *((_SCALAR, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")),
]


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
        CheckpointError: no such source, a format that is not known, a pickle of more than tensors and plain values, or
            a folder that holds commits already.
    """
    if Ledger(store).newest_first():
        raise CheckpointError(f"{store.url} holds checkpoints already: import into an empty folder")
    weights = {prefix + name: tensor for name, tensor in read_weights(Path(source), trust_pickle).items()}
    if rename is not None:
        try:
            weights = rename(weights)
        except ValueError as error:
            raise CheckpointError(str(error)) from error
    if not weights:
        raise CheckpointError(f"{source} holds no tensors")
    for name, tensor in weights.items():
        if not name.isprintable():
            raise CheckpointError(f"{source}: {shown(name)} cannot be a tensor's name")
        if tensor.layout is not torch.strided or tensor.device.type != "cpu" or tensor.dtype not in DTYPE_NAMES:
            raise CheckpointError(f"{source}: {shown(name)} is a {tensor.layout} of {tensor.dtype}, which is no weight")
    engine = CheckpointEngine(
        store,
        policy=Policy(asynchronous=False, max_failures=2),
        info={"weights_only": True, "source": source if source.isprintable() else ascii(source)},
    )
    try:
        engine.save({"model": weights}, 0)
    except ValueError as error:
        raise CheckpointError(f"{source}: {error}") from error
    report = engine.wait()
    assert report is not None
    if report.error is not None:
        raise CheckpointError(report.error)
    return len(weights), sum(tensor.nbytes for tensor in weights.values())


def read_weights(source: Path, trust_pickle: bool = False) -> dict[str, Tensor]:
    """The model's tensors by name.

    Raises:
        CheckpointError: see `import_weights`.
    """
    if not source.exists():
        raise CheckpointError(f"{source}: there is no such file or folder")
    if source.is_dir():
        try:
            files = safetensors_in(source)
        except ValueError as error:
            raise CheckpointError(str(error)) from error
        if files:
            return _read_all(files)
        if not (source / ".metadata").is_file():
            raise CheckpointError(f"{source} holds neither .metadata nor safetensors files")
        if trust_pickle:
            return _read_distributed_trusted(source)
        try:
            return read_tensors(source, PREFIXES, _load_tensors)
        except CheckpointError as error:
            raise CheckpointError(f"{error}; {TRUST}") from error
    if not source.is_file():
        raise CheckpointError(f"{source} is neither a file nor a folder")
    if source.suffix == ".safetensors":
        return _read_safetensors(source)
    return _read_torch(source, trust_pickle)


def _read_all(files: Iterable[Path]) -> dict[str, Tensor]:
    """The tensors of several safetensors files, each of which is in one of them."""
    tensors: dict[str, Tensor] = {}
    for file in files:
        found = _read_safetensors(file)
        twice = sorted(found.keys() & tensors.keys())
        if twice:
            raise CheckpointError(f"{file} holds {shown(twice[0])}, which another file of the folder holds too")
        tensors |= found
    return tensors


def _read_safetensors(file: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(file)
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{file} cannot be read as safetensors: {error}") from error


def _load_tensors(file: IO[bytes], where: str) -> Any:
    """What a file of `torch.save` holds, if it is made of tensors and plain values."""
    size = check_archive(file, where)
    try:
        with torch.serialization.safe_globals(_HARMLESS):
            content = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        reason = next((line for line in str(error).splitlines() if "GLOBAL" in line), str(error).split("\n")[0])
        raise CheckpointError(f"{where} cannot be read as tensors alone ({reason.strip()})") from error
    _check_sizes(content if isinstance(content, Mapping) else {"": content}, size, where)
    return content


def _check_sizes(content: Mapping[Any, Any], size_bytes: int, where: str) -> None:
    """Refuses tensors of a few stored elements that claim to be many."""
    total, todo, seen = 0, list(content.values()), 0
    while todo and seen < 10**7:
        item, seen = todo.pop(), seen + 1
        if isinstance(item, Tensor):
            if item.layout is not torch.strided or item.device.type != "cpu" or item.dtype not in DTYPE_NAMES:
                continue  # no weight is one
            total += item.numel() * item.element_size()
        elif isinstance(item, Mapping):
            todo.extend(item.values())
        elif isinstance(item, list | tuple):
            todo.extend(item)
    if total > SHARED * size_bytes:
        raise CheckpointError(f"{where}: its tensors would have {total} bytes, and the file has {size_bytes}")


def _read_torch(file: Path, trust_pickle: bool) -> dict[str, Tensor]:
    """A state dict, alone or as `state.model`, `model` or `state_dict` of a larger one."""
    try:
        if trust_pickle:
            content: Any = torch.load(file, map_location="cpu", weights_only=False)
        else:
            with open(file, "rb") as opened:
                content = _load_tensors(opened, str(file))
    except CheckpointError as error:
        raise CheckpointError(f"{error}; save its state dict by itself, or, {TRUST}") from error
    except Exception as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    for path in (("state", "model"), ("model",), ("state_dict",), ()):
        inner = content
        for key in path:
            inner = inner.get(key) if isinstance(inner, Mapping) else None
        if isinstance(inner, Mapping) and inner and all(isinstance(value, Tensor) for value in inner.values()):
            if not all(isinstance(name, str) for name in inner):
                raise CheckpointError(f"{file} holds tensors whose names are no texts")
            return dict(inner)
    raise CheckpointError(f"{file} holds no state dict: it is a {type(content).__name__} of other things")


def _read_distributed_trusted(folder: Path) -> dict[str, Tensor]:
    """As torch.distributed.checkpoint reads it: the index is unpickled."""
    try:
        reader = dcp.FileSystemReader(folder)
        metadata = reader.read_metadata().state_dict_metadata
        names = {name for name, entry in metadata.items() if isinstance(entry, TensorStorageMetadata)}
        prefix = next((p for p in PREFIXES if any(name.startswith(p) for name in names)), "")
        wanted = {}
        for name in sorted(names):
            entry = metadata[name]
            if name.startswith(prefix) and isinstance(entry, TensorStorageMetadata):
                wanted[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
        dcp.load(wanted, storage_reader=reader, no_dist=True)
    except Exception as error:
        raise CheckpointError(f"{folder} cannot be read: {error}") from error
    return {name.removeprefix(prefix): tensor for name, tensor in wanted.items()}
