"""Weights of other formats as a folder's first commit, from which a run begins as from any checkpoint.

Read are safetensors, a plain state dict saved by `torch.save`, Composer's single-file checkpoints, and folders that
torch.distributed.checkpoint wrote, Composer's sharded ones among them. The last keep their index as pickle: import
only what you trust. The weights are held in memory once.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from foundry_moe.checkpoint.codec import DTYPES
from foundry_moe.checkpoint.commits import Ledger
from foundry_moe.checkpoint.engine import CheckpointEngine, Policy
from foundry_moe.checkpoint.errors import CheckpointError
from foundry_moe.checkpoint.store import Store

COMPOSER_MODEL = "state.model."
_TENSOR_PARTS = {
    ("collections", "OrderedDict"),
    ("torch._utils", "_rebuild_tensor"),
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch._utils", "_rebuild_parameter"),
    ("torch.storage", "UntypedStorage"),
    ("torch", "Size"),
}
_TORCH_NAMES = {str(dtype).removeprefix("torch.") for dtype in DTYPES.values()}


def import_weights(source: str, store: Store, *, prefix: str = "") -> tuple[int, int]:
    """Commits the weights of `source` as step 0; returns how many tensors and bytes.

    Raises:
        CheckpointError: no such source, a format that is not known, or a folder that holds commits already.
    """
    if Ledger(store).newest_first():
        raise CheckpointError(f"{store.url} holds checkpoints already: import into an empty folder")
    weights = {prefix + name: tensor for name, tensor in read_weights(Path(source)).items()}
    if not weights:
        raise CheckpointError(f"{source} holds no tensors")
    engine = CheckpointEngine(
        store, policy=Policy(asynchronous=False, max_failures=2), info={"weights_only": True, "source": source}
    )
    engine.save({"model": weights}, 0)
    report = engine.wait()
    assert report is not None
    if report.error is not None:
        raise CheckpointError(report.error)
    return len(weights), sum(tensor.nbytes for tensor in weights.values())


def read_weights(source: Path) -> dict[str, Tensor]:
    """The model's tensors by name.

    Raises:
        CheckpointError: see `import_weights`.
    """
    if not source.exists():
        raise CheckpointError(f"{source}: there is no such file or folder")
    if (source / ".metadata").is_file():
        return _read_distributed(source)
    if source.is_dir():
        index = source / "model.safetensors.index.json"
        files = sorted(
            {source / name for name in json.loads(index.read_text())["weight_map"].values()}
            if index.is_file()
            else source.glob("*.safetensors")
        )
        if not files:
            raise CheckpointError(f"{source} holds neither .metadata nor safetensors files")
        return {name: tensor for file in files for name, tensor in _read_safetensors(file).items()}
    if source.suffix == ".safetensors":
        return _read_safetensors(source)
    return _read_torch(source)


def _read_safetensors(file: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(file)


def _read_torch(file: Path) -> dict[str, Tensor]:
    """A state dict, alone or as `state.model`, `model` or `state_dict` of a larger one."""
    try:
        content: Any = torch.load(file, map_location="cpu", weights_only=False, pickle_module=_TensorsAlone)
    except Exception as error:
        raise CheckpointError(
            f"{file} cannot be read as tensors alone ({str(error).splitlines()[0]}); save its state dict by itself"
        ) from error
    for path in (("state", "model"), ("model",), ("state_dict",), ()):
        inner = content
        for key in path:
            inner = inner.get(key) if isinstance(inner, Mapping) else None
        if isinstance(inner, Mapping) and inner and all(isinstance(value, Tensor) for value in inner.values()):
            return dict(inner)
    raise CheckpointError(f"{file} holds no state dict: it is a {type(content).__name__} of other things")


class _Ignored:
    """Stands for any object of a pickle that is no tensor; takes whatever the pickle does to it."""

    def __new__(cls, *args: Any, **kwargs: Any) -> _Ignored:
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def __setstate__(self, state: Any) -> None: ...
    def __setitem__(self, key: Any, value: Any) -> None: ...
    def append(self, value: Any) -> None: ...
    def extend(self, values: Any) -> None: ...
    def add(self, value: Any) -> None: ...


class _TensorsAlone:
    """A pickle module for `torch.load` that makes tensors and runs nothing else: Composer's checkpoints hold timestamps
    and random states, and are refused by `weights_only`."""

    __name__ = "pickle"

    class Unpickler(pickle.Unpickler):
        """Knows what tensors are made of by name."""

        def find_class(self, module: str, name: str) -> Any:
            if (module, name) in _TENSOR_PARTS or (module == "torch" and name in _TORCH_NAMES):
                return super().find_class(module, name)
            return _Ignored

    load, loads = pickle.load, pickle.loads


def _read_distributed(folder: Path) -> dict[str, Tensor]:
    reader = dcp.FileSystemReader(folder)
    metadata = reader.read_metadata().state_dict_metadata
    names = {name for name, entry in metadata.items() if isinstance(entry, TensorStorageMetadata)}
    prefix = next((p for p in (COMPOSER_MODEL, "model.") if any(name.startswith(p) for name in names)), "")
    wanted = {}
    for name in sorted(names):
        entry = metadata[name]
        if name.startswith(prefix) and isinstance(entry, TensorStorageMetadata):
            wanted[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
    dcp.load(wanted, storage_reader=reader, no_dist=True)
    return {name.removeprefix(prefix): tensor for name, tensor in wanted.items()}
