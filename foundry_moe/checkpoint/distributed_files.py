"""Tensors of a folder that torch.distributed.checkpoint wrote, of which no byte is trusted.

Its index, `.metadata`, is a pickle. It is read by an unpickler that knows the classes of such an index and no others,
and what they hold is checked before a tensor is made. The tensors themselves are small files of `torch.save`, one
behind the other, each of which is read by `weights_only`.
"""

from __future__ import annotations

import io
import pickle
import re
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from foundry_moe.checkpoint.codec import DTYPE_NAMES, DTYPES
from foundry_moe.checkpoint.coverage import check_places, check_tiling
from foundry_moe.checkpoint.errors import CheckpointError, DamagedError
from foundry_moe.checkpoint.strict import MOST, shown

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
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}")
_DIMS = 64

LoadOne = Callable[[IO[bytes], str], Any]  # (a file of `torch.save`, what to call it in errors) -> what it holds


class _IndexUnpickler(pickle._Unpickler):
    """Knows the classes of an index and hashes only its keys: to hash nested tuples that share their parts takes for
    ever. Python's own unpickler, for that of C cannot be told what to hash; torch's restricted one knows only protocol
    2, and DCP writes protocol 4."""

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

    def _setitems(self: Any) -> None:  # typeshed does not list the methods of this class
        self._of_checked_keys(self.stack[::2])
        self.load_setitems()

    def _dict(self: Any) -> None:  # typeshed does not list the methods of this class
        self._of_checked_keys(self.stack[::2])
        self.load_dict()

    def _refuse(self) -> None:
        raise CheckpointError("it holds a set")

    _CHECKED: ClassVar[dict[int, Any]] = {
        **{pickle.SETITEM[0]: _setitem, pickle.SETITEMS[0]: _setitems, pickle.DICT[0]: _dict},
        **{pickle.ADDITEMS[0]: _refuse, pickle.FROZENSET[0]: _refuse},
    }
    dispatch = {**pickle._Unpickler.dispatch, **_CHECKED}


def _of_plain(known: Callable[..., Any]) -> Callable[..., Any]:
    """A callable that hashes its arguments, for numbers and texts alone."""

    def call(*arguments: Any) -> Any:
        if not all(type(argument) in (int, str) for argument in arguments):
            raise CheckpointError(f"{known} is given {shown(arguments)}")
        return known(*arguments)

    return call


def read_index(folder: Path) -> Metadata:
    """The folder's `.metadata`.

    Raises:
        CheckpointError: it is no such index, or holds anything beside what one is made of.
    """
    with open(folder / ".metadata", "rb") as file:
        try:
            index = _IndexUnpickler(file).load()
        except Exception as error:
            raise CheckpointError(f"{folder / '.metadata'} cannot be read as an index of tensors: {error}") from error
    if type(index) is not Metadata:
        raise CheckpointError(f"{folder / '.metadata'} is a {type(index).__name__} and no index of tensors")
    return index


def read_tensors(folder: Path, prefixes: tuple[str, ...], load_one: LoadOne) -> dict[str, Tensor]:
    """The tensors below the first of `prefixes` that occurs, all if none does, without it.

    Raises:
        CheckpointError: an index or a file that is not as torch.distributed.checkpoint writes it.
    """
    index = read_index(folder)
    try:
        wanted, places = _checked(folder, index, prefixes)
    except (AttributeError, TypeError, ValueError, DamagedError) as error:
        raise CheckpointError(f"{folder / '.metadata'} is no good index: {error}") from error
    tensors = {}
    for name, entry in wanted.items():
        whole = torch.empty(tuple(entry.size), dtype=entry.properties.dtype)
        for offsets, sizes, info in places[name]:
            where = f"{name} in {folder / info.relative_path}"
            with open(folder / info.relative_path, "rb") as file:
                file.seek(info.offset)
                part = load_one(io.BytesIO(file.read(info.length)), where)
            if not isinstance(part, Tensor) or part.dtype != whole.dtype or tuple(part.shape) != sizes:
                raise CheckpointError(f"{where} is not the {list(sizes)} of {whole.dtype} that the index names")
            if sizes:
                whole[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))] = part
            else:
                whole.copy_(part)
        tensors[name] = whole
    prefix = _prefix(list(tensors), prefixes)
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


def _prefix(names: list[str], prefixes: tuple[str, ...]) -> str:
    return next((prefix for prefix in prefixes if any(name.startswith(prefix) for name in names)), "")


Place = tuple[tuple[int, ...], tuple[int, ...], _StorageInfo]


def _checked(
    folder: Path, index: Metadata, prefixes: tuple[str, ...]
) -> tuple[dict[str, TensorStorageMetadata], dict[str, list[Place]]]:
    """The tensors that are wanted, and for each where its chunks are; they tile it and lie in files that are there."""
    entries = {name: entry for name, entry in index.state_dict_metadata.items() if type(entry) is TensorStorageMetadata}
    if not all(type(name) is str for name in entries):
        raise DamagedError("a tensor's name is no text")
    prefix = _prefix(list(entries), prefixes)
    wanted = {name: entry for name, entry in entries.items() if name.startswith(prefix)}
    stored = {}
    for key, info in index.storage_data.items():
        if type(key) is MetadataIndex and type(info) is _StorageInfo:
            stored[key.fqn, None if key.offset is None else tuple(key.offset)] = info
    places: dict[str, list[Place]] = {}
    files: dict[str, tuple[int, int]] = {}  # number and size of each
    rows: list[tuple[int, int, int]] = []
    boxes = []
    for name, entry in wanted.items():
        if type(entry.properties.dtype) is not torch.dtype or entry.properties.dtype not in DTYPE_NAMES:
            raise DamagedError(
                f"{shown(name)} has the dtype {shown(entry.properties.dtype)}, which a checkpoint cannot hold"
            )
        shape = _counts(entry.size)
        chunks = {(_counts(chunk.offsets), _counts(chunk.sizes)) for chunk in entry.chunks}
        places[name] = []
        for offsets, sizes in sorted(chunks):
            if len(offsets) != len(shape) or len(sizes) != len(shape):
                raise DamagedError(f"a chunk of {shown(name)} has other dimensions than it")
            if 0 in sizes:
                continue
            info = stored.get((name, offsets)) or stored.get((name, None))
            if info is None:
                raise DamagedError(f"a chunk of {shown(name)} is in no file")
            rows.append(_row(folder, name, sizes, entry.properties.dtype, info, files))
            places[name].append((offsets, sizes, info))
        boxes.append((shape, places[name]))
    names = list(wanted)
    check_tiling(
        names,
        [shape for shape, _ in boxes],
        [_rows([place[0] for place in mine], len(shape)) for shape, mine in boxes],
        [_rows([place[1] for place in mine], len(shape)) for shape, mine in boxes],
    )
    columns = np.array(rows, dtype=np.int64).reshape(len(rows), 3)
    check_places([size for _, size in files.values()], columns[:, 0], columns[:, 1], columns[:, 2], 1)
    return wanted, places


def _row(
    folder: Path,
    name: str,
    sizes: tuple[int, ...],
    dtype: torch.dtype,
    info: _StorageInfo,
    files: dict[str, tuple[int, int]],
) -> tuple[int, int, int]:
    """A chunk's file, by its number, first byte and length."""
    path, begin, length = info.relative_path, info.offset, info.length
    if type(path) is not str or not _FILE.fullmatch(path) or not (folder / path).is_file():
        raise DamagedError(f"{shown(name)} is in {shown(path)}, which is no file of the folder")
    if getattr(info, "transform_descriptors", None):
        raise DamagedError(f"{shown(name)} is stored compressed")
    if path not in files:
        files[path] = len(files), (folder / path).stat().st_size
    if not all(type(number) is int and 0 <= number <= MOST for number in (begin, length)):
        raise DamagedError(f"the place of {shown(name)} in {path} is no pair of counts")
    count = dtype.itemsize
    for size in sizes:
        count *= size
    if length < count:
        raise DamagedError(f"{shown(name)} has {count} bytes in {length} of {path}")
    return files[path][0], begin, length


def _counts(sizes: Any) -> tuple[int, ...]:
    counts = tuple(sizes)
    if len(counts) > _DIMS or not all(type(count) is int and 0 <= count <= MOST for count in counts):
        raise DamagedError(f"{shown(counts)} is no shape")
    product = 1
    for count in counts:
        product *= max(count, 1)
    if product > MOST:
        raise DamagedError(f"{shown(counts)} has more than {MOST} elements")
    return counts


def _rows(rows: list[tuple[int, ...]], width: int) -> np.ndarray:
    return np.array(rows, dtype=np.int64).reshape(len(rows), width)


def check_archive(file: IO[bytes], where: str) -> int:
    """That a file is what `torch.save` has written since 2020: an archive, not compressed, and no program.

    Returns:
        Its size in bytes. The file is rewound.

    Raises:
        CheckpointError: anything else; which is a pickle from its first byte on, an old tar, or TorchScript.
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
    return size
