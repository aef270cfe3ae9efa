"""Compares a checkpoint's weights and optimizer states with a record of the run that saved it, without a model."""

from __future__ import annotations

import itertools
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.storage import StorageReader

from foundry_moe.certify.compare import Report, compare
from foundry_moe.certify.record import Quantity, Record, Step
from foundry_moe.certify.sketch import Part, sketch
from foundry_moe.schema import UserError

_READ_BYTES = 2**30  # tensors that are read, and in memory, at a time


@dataclass(frozen=True, kw_only=True)
class StoredTensors:
    """The tensors of a checkpoint by key, without their data.

    read: returns whole tensors on the CPU. faults: sentences on tensors that are stored twice or in part.
    """

    name: str
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, torch.dtype]
    read: Callable[[Sequence[str]], dict[str, Tensor]]
    faults: tuple[str, ...] = ()

    def renamed(self, rename: Callable[[str], str]) -> StoredTensors:
        """The same tensors with other keys."""
        old = {rename(key): key for key in self.shapes}
        return StoredTensors(
            name=self.name,
            shapes={new: self.shapes[key] for new, key in old.items()},
            dtypes={new: self.dtypes[key] for new, key in old.items()},
            read=lambda keys: dict(zip(keys, self.read([old[key] for key in keys]).values(), strict=True)),
            faults=self.faults,
        )


def stored_by_dcp(reader: StorageReader, name: str, checkpoint_id: Any = None) -> StoredTensors:
    """Of a checkpoint of torch.distributed.checkpoint. Reads its index, a pickle for PyTorch's own readers."""
    reader.reset(checkpoint_id)
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, True)
    index = metadata.state_dict_metadata
    entries = {key: entry for key, entry in index.items() if isinstance(entry, TensorStorageMetadata)}

    def read(keys: Sequence[str]) -> dict[str, Tensor]:
        found = {key: torch.empty(entries[key].size, dtype=entries[key].properties.dtype) for key in keys}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(found, checkpoint_id=checkpoint_id, storage_reader=reader, no_dist=True)
        return found

    return StoredTensors(
        name=name,
        shapes={key: tuple(entry.size) for key, entry in entries.items()},
        dtypes={key: entry.properties.dtype for key, entry in entries.items()},
        read=read,
        faults=tuple(fault for key, entry in entries.items() for fault in _faults_of(key, entry)),
    )


def _faults_of(key: str, entry: TensorStorageMetadata) -> Iterator[str]:
    stored, whole = sum(math.prod(chunk.sizes) for chunk in entry.chunks), math.prod(entry.size)
    twice = any(itertools.starmap(_overlap, itertools.combinations(entry.chunks, 2)))
    if twice:
        yield f"{key} is stored twice in part: its shards overlap"
    elif stored != whole:
        yield f"{key} has {whole} elements, and its shards {stored}"


def _overlap(one: ChunkStorageMetadata, other: ChunkStorageMetadata) -> bool:
    return all(
        a < b + other_size and b < a + size
        for a, size, b, other_size in zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    )


def stored_in_safetensors(files: Sequence[Path], name: str) -> StoredTensors:
    """Of a model in safetensors files, which hold no optimizer states."""
    places: dict[str, Path] = {}
    shapes, dtypes, faults = {}, {}, []
    for file in files:
        with safe_open(file, "pt") as opened:
            for key in opened.keys():  # noqa: SIM118 - not a mapping
                if key in places:
                    faults.append(f"{key} is stored twice: in {places[key].name} and {file.name}")
                places[key] = file
                meta = opened.get_slice(key)
                shapes[key] = tuple(meta.get_shape())
                dtypes[key] = _SAFETENSORS.get(meta.get_dtype(), torch.float32)

    def read(keys: Sequence[str]) -> dict[str, Tensor]:
        found = {}
        for key in keys:
            with safe_open(places[key], "pt") as opened:
                found[key] = opened.get_tensor(key)
        return found

    return StoredTensors(name=name, shapes=shapes, dtypes=dtypes, read=read, faults=tuple(faults))


_SAFETENSORS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def compare_checkpoint(
    record: Record, stored: StoredTensors, step: int | None = None, *, tolerance: float | None = None
) -> Report:
    """Compares a checkpoint with the weights and optimizer states of the run that saved it.

    A parameter's key may have a prefix, the same for all weights (`model.`), and another for all states of the
    optimizer (`optim.state.`), whose keys end with the state's name: the prefixes that most parameters have.

    Args:
        step: after which it was saved; None: the record's last.
        tolerance: relative; None: 1e-9 if all weights have the record's types, else as of `compare`.

    Raises:
        UserError: the record has no such step, or the checkpoint no parameter of the record.
    """
    moments = {moment.number: moment for moment in (record.begin, *record.steps)}
    step = record.steps[-1].number if step is None else step
    if step not in moments:
        raise UserError(f"{record.name} has no step {step}: give --step one of {', '.join(map(str, moments))}")
    weights = _keys_of(stored, record, "")
    if not weights:
        name = next(iter(record.shapes))
        raise UserError(f"{stored.name} holds no parameter of {record.name}, such as {name}: see --names")
    kinds = {"weight": weights}
    for kind in moments[step].kinds:
        if kind.startswith("state "):
            kinds[kind] = _keys_of(stored, record, "." + kind.removeprefix("state "))
    notes: tuple[str, ...] = ()
    if len(kinds) > 1 and not any(keys for kind, keys in kinds.items() if kind != "weight"):
        notes = (f"{stored.name} holds no optimizer states, so the weights alone are compared",)
        kinds = {"weight": weights}
        record = replace(record, begin=_weights_of(record.begin), steps=tuple(map(_weights_of, record.steps)))
    saved = Record(
        name=stored.name,
        ranks=record.ranks,
        projections=record.projections,
        shapes={name: stored.shapes[key] for name, key in weights.items()},
        dtypes={name: str(stored.dtypes[key]).removeprefix("torch.") for name, key in weights.items()},
        held=record.held,  # what differs may be what one rank of the run had
        begin=Step(number=step, kinds={kind: _sketches(stored, record, keys) for kind, keys in kinds.items()}),
        steps=(),
    )
    report = compare(record, saved, tolerance=tolerance)
    return replace(report, symptoms=(*stored.faults, *report.symptoms), notes=(*notes, *report.notes))


def _weights_of(step: Step) -> Step:
    return replace(step, kinds={kind: found for kind, found in step.kinds.items() if not kind.startswith("state ")})


def _keys_of(stored: StoredTensors, like: Record, ending: str) -> dict[str, str]:
    """Keys by parameter, with the prefix that most parameters have; the shortest of equal ones."""
    prefixes = Counter(
        key[: len(key) - len(name + ending)]
        for name in like.shapes
        for key in stored.shapes
        if key.endswith(name + ending) and key[: len(key) - len(name + ending)][-1:] in ("", ".")
    )
    if not prefixes:
        return {}
    prefix = min(prefixes, key=lambda found: (-prefixes[found], len(found), found))
    return {name: key for name in like.shapes if (key := prefix + name + ending) in stored.shapes}


def _sketches(stored: StoredTensors, like: Record, keys: Mapping[str, str]) -> Quantity:
    rows: dict[str, list[list[float]] | None] = dict.fromkeys(like.shapes)
    part: list[str] = []
    bytes_ = 0
    for at, (name, key) in enumerate(keys.items()):
        if stored.shapes[key] == like.shapes[name]:
            part.append(name)
            bytes_ += math.prod(stored.shapes[key]) * stored.dtypes[key].itemsize
        if part and (bytes_ >= _READ_BYTES or at == len(keys) - 1):
            tensors = stored.read([keys[name] for name in part])
            for one in part:
                tensor = tensors[keys[one]]
                whole = Part(tensor, (0,) * tensor.dim(), tuple(tensor.shape))
                rows[one] = sketch([whole], like.projections).tolist()
            part, bytes_ = [], 0
    return Quantity(rows=rows, apart={})
