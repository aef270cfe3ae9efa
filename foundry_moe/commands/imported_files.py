"""Weights of other formats as a folder's first commit, from which a run begins as from any checkpoint.

Read are safetensors, a plain state dict saved by `torch.save`, Composer's single-file checkpoints, and folders that
torch.distributed.checkpoint wrote, Composer's sharded ones among them. Nothing in them is run: pickles are read by
`weights_only` and by an unpickler with a list of classes, and what asks for more is refused, unless the user trusts
it and says so. The weights are held in memory once.
"""

from __future__ import annotations

import datetime
import io
import math
import pickle
import warnings
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from foundry_moe.checkpoint.codec import DTYPE_NAMES, DTYPES
from foundry_moe.checkpoint.engine import CheckpointEngine, Policy
from foundry_moe.checkpoint.errors import CheckpointError, DamagedError
from foundry_moe.checkpoint.ledger import Ledger
from foundry_moe.checkpoint.manifest import check_tiling
from foundry_moe.checkpoint.store import Store
from foundry_moe.checkpoint.strict import DIMS, MOST, integer, shown
from foundry_moe.models.pretrained import inside, safetensors_in

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
_DCP = "torch.distributed.checkpoint"
_KNOWN = {
    *((f"{_DCP}.metadata", name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")),
    *((f"{_DCP}.metadata", f"{kind}StorageMetadata") for kind in ("Tensor", "Bytes", "Chunk")),
    (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"),
    (f"{_DCP}.filesystem", "_StorageInfo"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    *(("torch", str(dtype).removeprefix("torch.")) for dtype in DTYPES.values()),
}


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
        CheckpointError: no such source, a format that is not known, a pickle of more than tensors and plain values, or
            a folder that holds commits already.
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
    """The model's tensors by name.

    Raises:
        CheckpointError: see `import_weights`.
    """
    if not source.exists():
        raise CheckpointError(f"{source}: there is no such file or folder")
    if source.is_dir():
        files = safetensors_in(source)
        if files:
            return _read_all(files)
        if not (source / ".metadata").is_file():
            raise CheckpointError(f"{source} holds neither .metadata nor safetensors files")
        return _read_distributed(source, trust_pickle)
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
    size = file.stat().st_size
    try:
        if trust_pickle:
            content: Any = torch.load(file, map_location="cpu", weights_only=False)
        else:
            with open(file, "rb") as opened, torch.serialization.safe_globals(_HARMLESS):
                check_archive(opened, str(file))
                content = torch.load(opened, map_location="cpu", weights_only=True)
    except Exception as error:
        reason = next((line for line in str(error).splitlines() if "GLOBAL" in line), str(error).split("\n")[0])
        raise CheckpointError(
            f"{file} cannot be read: {reason.strip()}; save its state dict by itself, or, {TRUST}"
        ) from error
    for path in (("state", "model"), ("model",), ("state_dict",), ()):
        inner = content
        for key in path:
            inner = inner.get(key) if isinstance(inner, Mapping) else None
        if isinstance(inner, Mapping) and inner and all(isinstance(value, Tensor) for value in inner.values()):
            if not all(isinstance(name, str) for name in inner):
                raise CheckpointError(f"{file} holds tensors whose names are no texts")
            total = sum(tensor.numel() * tensor.element_size() for tensor in inner.values())
            if total > SHARED * size:  # a few stored elements that claim to be many
                raise CheckpointError(f"{file}: its tensors would have {total} bytes, and the file has {size}")
            return dict(inner)
    raise CheckpointError(f"{file} holds no state dict: it is a {type(content).__name__} of other things")


def check_archive(file: IO[bytes], where: str) -> None:
    """That a file is what `torch.save` has written since 2020: an archive, not compressed, and no program.

    The file is rewound.

    Raises:
        CheckpointError: anything else, such as a pickle from its first byte on, an old tar, or TorchScript.
    """
    size = file.seek(0, io.SEEK_END)
    file.seek(0)
    if file.read(4) != b"PK\3\4":
        raise CheckpointError(f"{where} is no archive of torch.save but a bare pickle, a tar, or nothing of the kind")
    file.seek(0)
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise CheckpointError(f"{where} is damaged: {error}") from error
    if any(member.filename.rpartition("/")[2] == "constants.pkl" for member in members):
        raise CheckpointError(f"{where} is TorchScript, which is a program")
    if any(member.compress_type != zipfile.ZIP_STORED for member in members):
        raise CheckpointError(f"{where} is compressed, as torch.save does not")
    if sum(member.file_size for member in members) > size:
        raise CheckpointError(f"{where} claims to hold more than its {size} bytes")
    file.seek(0)


def _read_distributed(folder: Path, trust_pickle: bool) -> dict[str, Tensor]:
    """The tensors below the first of `PREFIXES` that occurs, all if none does, without it."""
    reader = dcp.FileSystemReader(folder) if trust_pickle else _CheckedReader(folder)
    try:
        index = reader.read_metadata()
        entries = {name: e for name, e in index.state_dict_metadata.items() if isinstance(e, TensorStorageMetadata)}
        prefix = next((p for p in PREFIXES if any(name.startswith(p) for name in entries)), "")
        entries = {name: entry for name, entry in sorted(entries.items()) if name.startswith(prefix)}
        if not trust_pickle:
            _check_index(folder, index, entries)
        wanted = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in entries.items()}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(wanted, storage_reader=reader, no_dist=True)
    except (Exception, CheckpointException) as error:
        failures = error.failures if isinstance(error, CheckpointException) else {0: (error, None)}
        said = "; ".join(" ".join(str(reason).split())[:400] for reason, _ in failures.values())
        raise CheckpointError(f"{folder} cannot be read: {said}" + ("" if trust_pickle else f"; {TRUST}")) from error
    return {name.removeprefix(prefix): tensor for name, tensor in wanted.items()}


class _CheckedReader(dcp.FileSystemReader):
    """DCP's reader, for folders of which no byte is trusted: its index is a pickle, and each tensor in its files is an
    archive of `torch.save`, which DCP reads by `weights_only`."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with open(Path(self.path) / ".metadata", "rb") as file:
            index = _IndexUnpickler(file).load()
        if type(index) is not Metadata:
            raise CheckpointError(f".metadata is a {type(index).__name__} and no index of tensors")
        return index

    def _slice_file(self, file: Any, sinfo: _StorageInfo) -> IO[bytes]:
        part = io.BytesIO(super()._slice_file(file, sinfo).read())
        check_archive(part, f"a part of {sinfo.relative_path}")
        return part


def _check_index(folder: Path, index: Metadata, entries: Mapping[str, TensorStorageMetadata]) -> None:
    """That the chunks of each tensor tile it, lie in files of the folder, and need no more memory than these have.

    Raises:
        Exception: an index that is not as DCP writes it.
    """
    files = {file.name: file.stat().st_size for file in inside(folder, sorted(folder.glob("*.distcp")))}
    for info in index.storage_data.values():
        if info.relative_path not in files:
            raise DamagedError(f"a tensor is in {shown(info.relative_path)}, which is no file of the folder")
        end = integer(info.offset, "a place in a file") + integer(info.length, "a length in a file")
        if end > files[info.relative_path]:
            raise DamagedError(f"a tensor ends at byte {end} of {info.relative_path}, which is shorter")
    total = 0
    for name, entry in entries.items():
        dtype, shape = entry.properties.dtype, _counts(entry.size)
        if type(dtype) is not torch.dtype or dtype not in DTYPE_NAMES:
            raise DamagedError(f"{shown(name)} has the dtype {shown(dtype)}, which a checkpoint cannot hold")
        boxes = sorted({(_counts(chunk.offsets), _counts(chunk.sizes)) for chunk in entry.chunks})
        boxes = [box for box in boxes if 0 not in box[1]]
        offsets = np.array([box[0] for box in boxes], dtype=np.int64).reshape(len(boxes), len(shape))
        sizes = np.array([box[1] for box in boxes], dtype=np.int64).reshape(len(boxes), len(shape))
        check_tiling(name, shape, offsets, sizes)
        total += math.prod(shape) * dtype.itemsize
    if total > sum(files.values()):
        raise DamagedError(f"its tensors would have {total} bytes, and its files have {sum(files.values())}")


def _counts(sizes: Any) -> tuple[int, ...]:
    counts = tuple(integer(size, "a size") for size in sizes)
    if len(counts) > DIMS or math.prod(max(count, 1) for count in counts) > MOST:
        raise DamagedError(f"{shown(counts)} is no shape")
    return counts


class _IndexUnpickler(pickle._Unpickler):
    """Accepts the classes of an index alone, and hashes only its keys: hashing nested tuples that share their parts
    takes for ever. The C version of the unpickler has no hook for what is hashed, and torch's restricted one reads
    protocol 2, where DCP writes protocol 4."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _KNOWN:
            raise CheckpointError(f"it asks for {shown(f'{module}.{name}')}")
        found = super().find_class(module, name)
        return _of_plain(found) if name in ("OrderedDict", "_MEM_FORMAT_ENCODING", "_get_layout") else found

    def _of_checked_keys(self, keys: Iterable[Any]) -> None:
        for key in keys:
            place = key.offset or () if type(key) is MetadataIndex else ()
            name = key.fqn if type(key) is MetadataIndex else key
            if type(name) is not str or not all(type(number) is int for number in place):
                raise CheckpointError("a dictionary's key is neither a name nor a place in a tensor")

    def _setitem(self: Any) -> None:  # typeshed does not list the methods of this class
        self._of_checked_keys([self.stack[-2]])
        self.load_setitem()

    def _setitems(self: Any) -> None:
        self._of_checked_keys(self.stack[::2])
        self.load_setitems()

    def _refuse(self: Any) -> None:
        raise CheckpointError("it holds a set, or a dictionary in a form that DCP does not write")

    dispatch = pickle._Unpickler.dispatch | {pickle.SETITEM[0]: _setitem, pickle.SETITEMS[0]: _setitems}
    dispatch |= dict.fromkeys((pickle.DICT[0], pickle.ADDITEMS[0], pickle.FROZENSET[0]), _refuse)


def _of_plain(known: Callable[..., Any]) -> Callable[..., Any]:
    """A callable that hashes its arguments, for numbers and texts alone."""

    def call(*arguments: Any) -> Any:
        if not all(type(argument) in (int, str) for argument in arguments):
            raise CheckpointError(f"{known} is given {shown(arguments)}")
        return known(*arguments)

    return call
