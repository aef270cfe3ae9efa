"""How fast a kind of machine is: the constants of the planner's estimates, and the file that keeps them.

`foundry-moe plan --calibrate` measures them; those of H100s and H200s are shipped. This module imports no torch,
because the command line's parser reads `CHIPS`.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from foundry_moe.schema import from_mapping

FORMAT = 1
LINKS = ("all_to_all", "all_gather", "reduce_scatter", "network")
SHIPPED = Path(__file__).parent
# names of `--chip`, with compute capabilities
CHIPS = {
    "a100": (8, 0),
    "a10": (8, 6),
    "l40s": (8, 9),
    "h100": (9, 0),
    "h200": (9, 0),
    "b200": (10, 0),
    "rtx-pro-6000": (12, 0),
}

# GiB that CUDA reports, which is less than the data sheets print; for the A100 the larger model
MEMORY_GIB = {"a100": 80.0, "a10": 22.0, "l40s": 44.0, "h100": 80.0, "h200": 139.0, "b200": 178.0, "rtx-pro-6000": 95.0}


@dataclass(frozen=True, kw_only=True)
class Link:
    """Messages between GPUs take `latency_s` and their bytes, those that leave one GPU, over `bytes_per_s`."""

    latency_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not 0 < value < math.inf:
                raise ValueError(f"{name} ({value}) must be above 0")

    def seconds(self, sent_bytes: float, messages: int = 1) -> float:
        """Of messages that are so many bytes in all."""
        return messages * self.latency_s + sent_bytes / self.bytes_per_s


@dataclass(frozen=True, kw_only=True)
class Constants:
    """Of one kind of machine. Every rate is what one GPU reaches.

    format: of the file.
    device: the GPU's name. gpus: how many of a host took part. source: what measured it, and when.
    assumed: names of what was not measured on this machine.
    dense_flops_per_s: products of T tokens with a square matrix, by its width.
    expert_flops_per_s: experts from routing to combine, forward and backward, by an expert's width.
    attention_flops_per_s: causal attention, forward and backward, counted as 6 s d a token.
    memory_bytes_per_s: read and written by one large copy.
    launch_s: the host's time for one small operation.
    contention: how much longer products take while messages travel, over the time that the messages take.
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
            raise ValueError(f"format ({self.format}) must be {FORMAT}: measure anew with foundry-moe plan --calibrate")
        if self.gpus < 1:
            raise ValueError(f"gpus ({self.gpus}) must be 1 or more")
        for name in ("attention_flops_per_s", "memory_bytes_per_s", "launch_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} ({getattr(self, name)}) must be above 0")
        if self.contention < 0:
            raise ValueError(f"contention ({self.contention}) must be 0 or more")
        for name in ("dense_flops_per_s", "expert_flops_per_s"):
            rates = getattr(self, name)
            if not rates:
                raise ValueError(f"{name} is empty: it needs a rate for at least one width")
            for width, rate in rates.items():
                good = isinstance(rate, int | float) and not isinstance(rate, bool) and 0 < rate < math.inf
                if not width.isdigit() or not int(width) or not good:
                    raise ValueError(f"{name}.{width} ({rate!r}) must be a width with a number above 0")

    def dense_rate(self, width: float) -> float:
        """FLOP/s of products with a matrix whose narrower side is `width`."""
        return at_width(self.dense_flops_per_s, width)

    def expert_rate(self, width: float) -> float:
        """FLOP/s of experts of such a width."""
        return at_width(self.expert_flops_per_s, width)


def at_width(rates: Mapping[str, float], width: float) -> float:
    """A rate between those of the nearest widths, in proportion to the logarithm; outside of them the nearest."""
    known = sorted((int(key), rate) for key, rate in rates.items())
    if width <= known[0][0]:
        # a matrix half as wide has half the work for as many tiles' ends
        return known[0][1] * (width / known[0][0]) ** 0.25
    for (low, slow), (high, fast) in itertools.pairwise(known):
        if width <= high:
            share = math.log(width / low) / math.log(high / low)
            return slow + share * (fast - slow)
    return known[-1][1]


def read_constants(path: Path) -> Constants:
    """Constants from their file.

    Raises:
        ValueError: no such file, or not of this form; the sentence names the key.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"--constants ({path}): {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"--constants ({path}) is no JSON: {error}") from None
    if isinstance(values, dict):
        for name in LINKS:
            if name in values:
                values[name] = from_mapping(Link, values[name], f"{path}: {name}")
    return from_mapping(Constants, values, str(path))


def write_constants(constants: Constants, path: Path) -> None:
    """Writes the file; its folder is made."""
    values: dict[str, Any] = asdict(constants)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def default_path(chip: str) -> Path:
    """The file of a chip's measured constants, in the folder of the tuned tiles."""
    named = os.environ.get("FOUNDRY_MOE_TUNING_CACHE")
    folder = Path(named).expanduser().parent if named else Path.home() / ".cache" / "foundry_moe"
    return folder / f"constants-{chip}.json"


def constants_of(chip: str, path: Path | None = None) -> Constants:
    """The constants in the file, else those measured on this machine for the chip, else the shipped ones.

    Raises:
        ValueError: the file is malformed, or the chip has not been measured.
    """
    if path is not None:
        return read_constants(path)
    if default_path(chip).is_file():
        return read_constants(default_path(chip))
    return shipped_constants(chip)


def shipped_constants(chip: str) -> Constants:
    """The constants that this package has for a chip.

    Raises:
        ValueError: the package has none.
    """
    path = SHIPPED / f"constants_{chip}.json"
    if not path.is_file():
        raise ValueError(
            f"--chip ({chip}) has not been measured: run foundry-moe plan --calibrate on such a machine and give the "
            "file with --constants"
        )
    return read_constants(path)
