"""The file of a record: a line of JSON that describes the parameters, and a line for each recorded step.

Reading it checks everything that is used: a record may come from anywhere. No tensors, no pickles. Lines of steps may
lack `settings`, which older records do not have.

Shapes: U units of a tensor (see `sketch`), J projections.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foundry_moe.certify.sketch import STACK, units_of
from foundry_moe.schema import UserError

FILE = "record.jsonl"
FORMAT = "foundry_moe record 2"
NONE = -1.0  # in place of a sum of squares: there is no such tensor
NUMBERS = 4  # that a rank sends after its sketches: sum of losses, microbatches, tokens, batch; then settings

Rows = list[list[float]]  # [U, 1 + J]


class Held(NamedTuple):
    """A rank's part of a parameter. begin, size: of its box in the whole."""

    shape: list[int]
    begin: list[int]
    size: list[int]
    dtype: str


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """One kind of tensors at one step. rows: by parameter; None = there is none. apart: see `RecordWriter.combine`."""

    rows: Mapping[str, Rows | None]
    apart: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step. number: from 1; the state before the first recorded step has the number of the step before.

    loss: mean of each rank's microbatches; empty where it was not given. tokens, batch: 0 where they were not given.
    settings: the optimizer's numbers at this step, by parameter and key; without parameters that it does not have.
    """

    number: int
    loss: tuple[float, ...] = ()
    microbatches: int = 0  # of the rank that has most
    tokens: int = 0
    batch: int = 0
    kinds: Mapping[str, Quantity] = field(default_factory=dict)
    settings: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @property
    def mean_loss(self) -> float | None:
        return sum(self.loss) / len(self.loss) if self.loss else None


@dataclass(frozen=True, kw_only=True)
class Record:
    """A run. held: by parameter, what each rank has of it; None = nothing."""

    name: str
    ranks: int
    projections: int
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]
    held: Mapping[str, Sequence[tuple[tuple[int, ...], tuple[int, ...]] | None]]
    begin: Step
    steps: tuple[Step, ...]

    def units_held(self, name: str, rank: int) -> range:
        """Indices of a stack that a rank has."""
        part = self.held[name][rank]
        return range(part[0][0], part[0][0] + part[1][0]) if part is not None and part[0] else range(0)

    def divisions(self, name: str) -> int:
        """Into how many parts a stack is divided along its first dimension."""
        return len({part[0][0] for part in self.held[name] if part is not None and part[0]}) or 1


class RecordWriter:
    """Appends lines; rank 0 alone. On a GPU a step's line waits for `flush`, for its numbers are still computed.

    Raises:
        ValueError: the folder has a record; ranks disagree on a parameter's shape, or hold less than the whole of it.
    """

    def __init__(self, folder: Path, held: Sequence[Mapping[str, Held]], projections: int) -> None:
        self.path, self.held, self.width = folder / FILE, held, 1 + projections
        self._waiting: list[tuple[dict[str, Any], list[str], list[Tensor], Sequence[str], torch.cuda.Event | None]] = []
        self.whole: dict[str, Held] = {}
        for of_rank in held:
            for name, part in of_rank.items():
                if self.whole.setdefault(name, part).shape != part.shape:
                    raise UserError(f"{name} has shapes {self.whole[name].shape} and {part.shape} on two ranks")
        for name, whole in self.whole.items():
            boxes = {(tuple(h[name].begin), tuple(h[name].size)) for h in held if name in h}
            if (found := sum(math.prod(size) for _, size in boxes)) != (total := math.prod(whole.shape)):
                raise UserError(f"{name} has {total} elements, and ranks hold {found} in different boxes: see box_of")
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self.path.open("x").close()
        except FileExistsError:
            raise UserError(f"{self.path} exists: give each run, and each resume, a folder of its own") from None
        self.append(
            {
                "format": FORMAT,
                "ranks": len(held),
                "projections": projections,
                "parameters": {
                    name: {
                        "shape": whole.shape,
                        "dtype": whole.dtype,
                        "held": [[h[name].begin, h[name].size] if name in h else None for h in held],
                    }
                    for name, whole in self.whole.items()
                },
            }
        )

    def append(self, line: Mapping[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(line, allow_nan=True) + "\n")

    def append_step(
        self, line: dict[str, Any], kinds: list[str], everyone: Sequence[Tensor], keys: Sequence[str] = ()
    ) -> None:
        """Adds a step whose numbers may still be computed.

        Args:
            everyone: of each rank, fp64: the sketches of each kind, flat, then `NUMBERS` others, then the settings of
                each parameter by key, NaN where there is none.
        """
        copied, copies = None, list(everyone)
        if everyone[0].is_cuda:
            copies = [torch.empty(len(part), dtype=part.dtype, pin_memory=True) for part in everyone]
            for copy, part in zip(copies, everyone, strict=True):
                copy.copy_(part, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
        self._waiting.append((line, kinds, copies, keys, copied))
        if copied is None:
            self.flush()

    def flush(self) -> None:
        """Writes the steps that wait."""
        while self._waiting:
            line, kinds, everyone, keys, copied = self._waiting.pop(0)
            if copied is not None:
                copied.synchronize()
            parts = []
            for part, held in zip(everyone, self.held, strict=True):
                settings = len(held) * len(keys)
                parts.append(part.split([len(part) - NUMBERS - settings, NUMBERS, settings]))
            numbers = [of_rank.tolist() for _, of_rank, _ in parts]
            rows = [of_rank.view(len(kinds), -1, self.width) for of_rank, _, _ in parts]
            found = {
                "loss": [loss / count for loss, count, _, _ in numbers if count],
                "microbatches": int(max(count for _, count, _, _ in numbers)),
                "tokens": int(sum(tokens for _, _, tokens, _ in numbers)),
                "batch": sum(int(batch) for *_, batch in numbers) % 2**52,
                "settings": self._settings([of_rank for _, _, of_rank in parts], keys),
            }
            of_kinds = {kind: self._combine([part[i] for part in rows]) for i, kind in enumerate(kinds)}
            self.append({**line, **(found if "step" in line else {}), **of_kinds})

    def _settings(self, everyone: Sequence[Tensor], keys: Sequence[str]) -> list[tuple[dict[str, float], list[str]]]:
        """Settings and the parameters that have them, as the first rank with settings of a parameter says."""
        of_parameter: dict[str, tuple[tuple[str, float], ...]] = {}
        for of_rank, held in zip(everyone, self.held, strict=True):
            for name, row in zip(held, of_rank.view(len(held), len(keys)).tolist(), strict=True):
                if found := tuple((k, number) for k, number in zip(keys, row, strict=True) if not math.isnan(number)):
                    of_parameter.setdefault(name, found)
        names: dict[tuple[tuple[str, float], ...], list[str]] = {}
        for name, found in of_parameter.items():
            names.setdefault(found, []).append(name)
        return [(dict(found), of_group) for found, of_group in names.items()]

    def _combine(self, everyone: Sequence[Tensor]) -> dict[str, Any]:
        """The sketches of whole tensors from those of all ranks' shards.

        apart: of parameters whose replicas differ, the largest difference of two sketches over the norm.
        """
        rows: dict[str, Tensor | None] = dict.fromkeys(self.whole)
        owners: dict[tuple[str, tuple[int, ...]], Tensor] = {}
        apart: dict[str, float] = {}
        for of_rank, held in zip(everyone, self.held, strict=True):
            missing, at = (of_rank[:, 0] == NONE).tolist(), 0
            for name, part in held.items():
                units = units_of(tuple(part.size))
                mine, lost, at = of_rank[at : at + units], any(missing[at : at + units]), at + units
                if not math.prod(part.size):
                    continue
                owner = owners.get((name, tuple(part.begin)))
                if owner is not None:
                    if (off := _apart(owner, mine)) > 0:
                        apart[name] = max(apart.get(name, 0.0), off)
                    continue
                owners[name, tuple(part.begin)] = mine
                if lost:
                    continue
                if (whole := rows[name]) is None:
                    whole = rows[name] = mine.new_zeros(units_of(tuple(part.shape)), self.width)
                first = part.begin[0] if len(part.shape) >= STACK else 0
                whole[first : first + len(mine)] += mine
        return {
            "rows": {name: None if found is None else found.tolist() for name, found in rows.items()},
            "apart": apart,
        }


def _apart(one: Tensor, other: Tensor) -> float:
    if torch.equal(one, other):
        return 0.0
    if bool(((one[:, 0] == NONE) != (other[:, 0] == NONE)).any()):
        return math.inf
    one, other = (torch.cat([rows[:, :1].clamp(min=0).sqrt(), rows[:, 1:]], dim=1) for rows in (one, other))
    scale = torch.maximum(one[:, :1], other[:, :1])
    found = float(((one - other).abs() / scale.where(scale > 0, torch.inf)).max())
    return math.inf if math.isnan(found) else found


def read_record(folder: str | Path) -> Record:
    """Reads a folder's record, as far as its last complete line.

    Raises:
        ValueError: there is none, or it has another format; names the file and the line.
    """
    path = Path(folder)
    path = path / FILE if path.is_dir() else path
    if not path.is_file():
        raise UserError(f"{folder} holds no {FILE}: give the folder that a Recorder wrote")
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]  # the last may be torn
    number = 1
    try:
        head = json.loads(lines[0]) if lines else {}
        if head.get("format") != FORMAT:
            raise UserError(f"its format is {str(head.get('format'))[:60]!r}, not {FORMAT!r}")
        parameters = head["parameters"]
        steps = []
        for number, line in enumerate(lines[1:], 2):  # noqa: B007 - the error below names it
            steps.append(_step(json.loads(line), parameters, 1 + int(head["projections"])))
        record = Record(
            name=str(folder),
            ranks=int(head["ranks"]),
            projections=int(head["projections"]),
            shapes={name: tuple(map(int, p["shape"])) for name, p in parameters.items()},
            dtypes={name: str(p["dtype"]) for name, p in parameters.items()},
            held={name: [_part(part) for part in p["held"]] for name, p in parameters.items()},
            begin=steps[0] if steps else Step(number=0),
            steps=tuple(steps[1:]),
        )
        if any(len(parts) != record.ranks for parts in record.held.values()):
            raise UserError("a parameter's `held` has not one entry per rank")
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError, OverflowError) as error:
        raise UserError(f"{path}, line {number}: this is no record: {str(error)[:200]}") from None
    if not record.steps:
        raise UserError(f"{path} holds no step: did the optimizer step while the Recorder was there?")
    return record


def _part(part: Any) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    return None if part is None else (tuple(map(int, part[0])), tuple(map(int, part[1])))


def _step(line: Mapping[str, Any], parameters: Mapping[str, Any], width: int) -> Step:
    kinds = {}
    for kind, found in line.items():
        if isinstance(found, dict):
            rows = {name: found["rows"].get(name) for name in parameters}
            for name, of_tensor in rows.items():
                units = units_of(tuple(parameters[name]["shape"]))
                if of_tensor is not None and [len(row) for row in of_tensor] != [width] * units:
                    raise UserError(f"{kind} of {name} is not of {units} rows of {width} numbers")
            kinds[kind] = Quantity(
                rows={k: None if v is None else [[float(x) for x in row] for row in v] for k, v in rows.items()},
                apart={str(name): float(value) for name, value in found["apart"].items()},
            )
    return Step(
        number=int(line["step"] if "step" in line else line["begin"]),
        loss=tuple(float(x) for x in line.get("loss") or ()),
        microbatches=int(line.get("microbatches", 0)),
        tokens=int(line.get("tokens", 0)),
        batch=int(line.get("batch", 0)),
        kinds=kinds,
        settings={
            str(name): {str(key): float(number) for key, number in of_group.items()}
            for of_group, names in line.get("settings", ())
            for name in names
        },
    )
