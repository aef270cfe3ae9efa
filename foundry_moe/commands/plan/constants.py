"""The speed of a machine: the constants of the planner's estimates, and their file.

`benchmarks/calibrate.py` measures them. Those of H100s and H200s are shipped. This module imports neither torch nor
numpy, because the command line's parser reads `CHIPS`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

from foundry_moe.schema import UserError, fits, from_mapping

FORMAT = 1
LINKS = ("all_to_all", "all_gather", "reduce_scatter", "network")


class Chip(NamedTuple):
    """memory_gib: as CUDA reports it, which is less than data sheets say."""

    capability: tuple[int, int]
    memory_gib: float


CHIPS = {
    "a100": Chip((8, 0), 80.0),
    "a10": Chip((8, 6), 22.0),
    "l40s": Chip((8, 9), 44.0),
    "h100": Chip((9, 0), 80.0),
    "h200": Chip((9, 0), 139.0),
    "b200": Chip((10, 0), 178.0),
    "rtx-pro-6000": Chip((12, 0), 95.0),
}


def _check_positive(values: Mapping[str, object]) -> None:
    """Raises ValueError for a value that is not a number above 0."""
    for name, value in values.items():
        if not fits(value, float) or value <= 0:  # type: ignore[operator]
            raise UserError(f"{name} ({value!r}) must be a number above 0")


@dataclass(frozen=True, kw_only=True)
class Link:
    """Latency of a message, and bytes per second that leave one GPU."""

    latency_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        _check_positive(asdict(self))

    def seconds(self, sent_bytes: float, messages: int) -> float:
        """Of messages with `sent_bytes` in all."""
        return messages * self.latency_s + sent_bytes / self.bytes_per_s


@dataclass(frozen=True, kw_only=True)
class Constants:
    """The speed of one kind of machine. Every rate is that of one GPU.

    format: of the file.
    device: the GPU's name. gpus: the number of GPUs that were measured together. source: date and method.
    assumed: names of constants that were not measured on this machine.
    dense_flops_per_s: matrix products of T tokens with a square matrix, by its width.
    expert_flops_per_s: experts from routing to combine, forward and backward, by an expert's width.
    attention_flops_per_s: causal attention, forward and backward, counted as 6 S D per token.
    memory_bytes_per_s: read and written by one large copy.
    launch_s: the host's time for one small operation.
    contention: slowdown of matrix products beside messages, over the time of these messages.
    all_to_all, all_gather, reduce_scatter: between the GPUs of a host. network: of one GPU between hosts.
    """

    format: int
    device: str
    gpus: int
    source: str
    assumed: tuple[str, ...]
    dense_flops_per_s: dict[str, float] = field(metadata={"form": 'a mapping such as {"2048": 6.0e14}'})
    expert_flops_per_s: dict[str, float] = field(metadata={"form": 'a mapping such as {"1024": 5.5e14}'})
    attention_flops_per_s: float
    memory_bytes_per_s: float
    launch_s: float
    contention: float
    all_to_all: Link
    all_gather: Link
    reduce_scatter: Link
    network: Link

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise UserError(f"format ({self.format}) must be {FORMAT}: measure again with benchmarks/calibrate.py")
        if self.contention < 0:
            raise UserError(f"contention ({self.contention}) must be 0 or more")
        alone = ("gpus", "launch_s", "attention_flops_per_s", "memory_bytes_per_s")
        _check_positive({name: getattr(self, name) for name in alone})
        for name in ("dense_flops_per_s", "expert_flops_per_s"):
            rates = getattr(self, name)
            if not rates or not all(width.isdigit() and int(width) for width in rates):
                raise UserError(f"{name} ({rates}) must have a rate for at least one width, such as {{'2048': 6e14}}")
            _check_positive({f"{name}.{width}": rate for width, rate in rates.items()})


def rate_at(rates: Mapping[str, float], width: float) -> float:
    """FLOP/s at a width: between the nearest widths in proportion to the logarithm; above the widest, its rate."""
    known = sorted((int(key), rate) for key, rate in rates.items())
    if width <= known[0][0]:
        # half the width halves the work for the same number of partly filled tiles
        return known[0][1] * (width / known[0][0]) ** 0.25
    from numpy import interp  # not at the top: see above

    return float(interp(math.log(width), [math.log(low) for low, _ in known], [rate for _, rate in known]))


def read_constants(path: Path) -> Constants:
    """Constants from their file."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"--constants ({path}): {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"--constants ({path}) is not JSON: {error}") from None
    if isinstance(values, dict):
        for name in LINKS:
            if name in values:
                values[name] = from_mapping(Link, values[name], f"{path}: {name}")
    return from_mapping(Constants, values, str(path))


def shipped_constants(chip: str) -> Constants:
    """The constants of a chip in this package."""
    path = Path(__file__).parent / f"constants_{chip}.json"
    if not path.is_file():
        raise UserError(
            f"--chip ({chip}) has not been measured: run benchmarks/calibrate.py on such a machine and give the file "
            "with --constants"
        )
    return read_constants(path)
