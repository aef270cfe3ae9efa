"""Tiles for shape classes that the committed table lacks: the nearest ones are timed once and the best kept on disk.

The first call of a matrix tries at most `CANDIDATES` tiles of the table, nearest class first, on its own operands. All
classes of a process share one time limit, compilation included, so that the first step never takes minutes; a class
that was not timed uses the nearest class's tile, and the next process times it. Other loads of that matrix use the
tile found first: nothing is timed in a later step. Environment:

    FOUNDRY_MOE_AUTOTUNE_S   the limit in seconds; 0 = never tune
    FOUNDRY_MOE_TUNING_CACHE the file; default ~/.cache/foundry_moe/tiles-<gpu>-<triton>.json
"""

from __future__ import annotations

import dataclasses
import fcntl
import functools
import json
import os
import re
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import triton
from foundry_moe_kernels import tuning
from foundry_moe_kernels.tuning import Tile

LIMIT_S = 20.0
CANDIDATES = 4
_REPEATS = 5


def milliseconds(run: Callable[[], object]) -> float:
    """The median of a few calls on the device, after one that compiles."""
    run()
    times = []
    for _ in range(_REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[_REPEATS // 2]


class Tuner:
    """Tiles by shape class, found by timing and kept in a file that several processes may share.

    Args:
        path: of the file; it need not exist. One that cannot be read or written costs a warning, nothing else.
        limit_s: seconds for all timing of this process.
        measure: milliseconds of a call.
        clock: seconds.
    """

    def __init__(
        self,
        path: Path,
        limit_s: float,
        measure: Callable[[Callable[[], object]], float] = milliseconds,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path, self.measure, self.clock = path, measure, clock
        self.left_s = limit_s
        self._warned = False
        self.tiles = self._read()

    def known(self, key: str) -> Tile | None:
        """The tile found for this class, or for the nearest load of the same matrix: a matrix is timed once."""
        if key in self.tiles:
            return self.tiles[key]
        near = [other for other in self.tiles if tuning.same_matrix(other, key)]
        return self.tiles[min(near, key=lambda other: tuning.distance(other, key))] if near else None

    def tile(self, key: str, candidates: Sequence[Tile], run: Callable[[Tile], object]) -> Tile:
        """The tile of a class: a known one, or the fastest candidate that there was time for, the first at least.

        Args:
            candidates: likeliest first.
            run: the product with a tile; may be called often.
        """
        if key not in self.tiles:
            self.tiles[key], complete = self._fastest(candidates, run)
            if complete:
                self._keep(key)
        return self.tiles[key]

    def _fastest(self, candidates: Sequence[Tile], run: Callable[[Tile], object]) -> tuple[Tile, bool]:
        """The winner, and whether all were tried."""
        best, best_ms, longest_s = candidates[0], float("inf"), 0.0
        for tile in candidates:
            # a candidate starts only if the time left suffices for one as slow as the slowest so far
            if self.left_s <= longest_s or len(candidates) == 1:
                return best, len(candidates) == 1
            began = self.clock()
            try:
                ms = self.measure(functools.partial(run, tile))
            except Exception as error:  # a tile for other shapes may not fit the device's shared memory
                self._warn(f"{tile} does not run: {error!r:.200}")
                ms = float("inf")
            took_s = self.clock() - began
            self.left_s -= took_s
            longest_s = max(longest_s, took_s)
            if ms < best_ms:
                best, best_ms = tile, ms
        return best, True

    def _read(self) -> dict[str, Tile]:
        try:
            tiles = {key: Tile(**entry) for key, entry in json.loads(self.path.read_text()).items()}
            for key, tile in tiles.items():
                tuning.check_entry(key, tile)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except RecursionError:
            self._warn("ignored, delete it: it is nested too deeply")
            return {}
        except (OSError, ValueError, TypeError, AttributeError) as error:
            self._warn(f"ignored, delete it: {error}")
            return {}
        return tiles

    def _keep(self, key: str) -> None:
        """Adds one entry to the file's current content, under a lock and in one rename."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path.with_suffix(".lock"), "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                entries = {**self._read(), key: self.tiles[key]}
                with tempfile.NamedTemporaryFile("w", dir=self.path.parent, delete=False) as out:
                    json.dump({name: dataclasses.asdict(tile) for name, tile in entries.items()}, out, indent=0)
                os.replace(out.name, self.path)
        except OSError as error:
            self._warn(f"not written: {error}")

    def _warn(self, what: str) -> None:
        if not self._warned:
            warnings.warn(f"tuned tiles in {self.path}: {what}", stacklevel=4)
        self._warned = True


def limit_s() -> float:
    """From the environment.

    Raises:
        ValueError: FOUNDRY_MOE_AUTOTUNE_S is not a number of seconds.
    """
    text = os.environ.get("FOUNDRY_MOE_AUTOTUNE_S", str(LIMIT_S))
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise ValueError(f"FOUNDRY_MOE_AUTOTUNE_S ({text!r}) must be seconds, 0 for none")
    return seconds


def cache_path(device: torch.device) -> Path:
    """Where tiles of this kind of GPU and this Triton are kept."""
    named = os.environ.get("FOUNDRY_MOE_TUNING_CACHE")
    if named:
        return Path(named).expanduser()
    gpu = re.sub(r"[^A-Za-z0-9]+", "-", torch.cuda.get_device_name(device))
    return Path.home() / ".cache" / "foundry_moe" / f"tiles-{gpu}-{triton.__version__}.json"


@functools.cache
def _tuner(device: torch.device) -> Tuner:
    return Tuner(cache_path(device), limit_s())


@functools.lru_cache(maxsize=4096)
def _class(product: str, rows_per_expert: int, n: int, k: int) -> str:
    return tuning.shape_class(product, rows_per_expert=rows_per_expert, n=n, k=k)


def pick(
    product: str,
    *,
    rows_per_expert: int,
    n: int,
    k: int,
    device: torch.device,
    run: Callable[[Tile], object],
) -> Tile:
    """The committed tile of this shape class; else a tuned one; else, where nothing may be timed, the nearest class's.

    Args:
        run: the product with a tile, on the operands at hand; writes results that may be overwritten.
    """
    key = _class(product, rows_per_expert, n, k)
    if tuning.is_committed(key) or device.type != "cuda":
        return tuning.nearest(key)[0]
    tuner = _tuner(device)
    known = tuner.known(key)
    if known is not None:
        return known
    # nothing is timed for a pretended load, nor while a graph is recorded
    if tuner.left_s <= 0 or tuning.is_pretended() or torch.cuda.is_current_stream_capturing():
        return tuning.nearest(key)[0]
    return tuner.tile(key, tuning.nearest(key)[:CANDIDATES], run)
