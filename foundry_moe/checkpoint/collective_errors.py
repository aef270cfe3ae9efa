"""Failures of single ranks in collective code: a failed rank still takes part in collectives, and all raise its error.

Ranks exchange Python objects by torch's object collectives, which pickle them. This is safe because all processes of
the group belong to one job, and because they only send objects that one of them created or parsed and checked: bytes
from a store are never unpickled. This module does not depend on checkpoints.
"""

from __future__ import annotations

import pickle
from collections import ChainMap
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

R = TypeVar("R")
T = TypeVar("T")


def portable(error: Exception) -> Exception:
    """The error itself if it survives pickling; else a RuntimeError with the same message."""
    try:
        arrived = pickle.loads(pickle.dumps(error))
        if type(arrived) is type(error) and str(arrived) == str(error):
            return error
    except Exception:  # pickling runs code of the error's class, which may raise anything
        pass
    said = RuntimeError(f"{type(error).__name__}: {error}")
    said.__cause__ = error
    return said


class RanksError(Exception):
    """The errors by rank, raised on all ranks."""

    def __init__(self, reasons: dict[int, Exception]) -> None:
        super().__init__(reasons)
        self.reasons = reasons

    def __str__(self) -> str:
        return "; ".join(sorted({str(reason) for reason in self.reasons.values()}))


class Ranks:
    """The ranks of a CPU group, or a single process. If a step raises on one rank, all ranks raise a RanksError."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank = dist.get_rank(group) if group is not None else 0
        self.size = dist.get_world_size(group) if group is not None else 1

    def decide(self, here: Callable[[], T], first: Callable[[list[T]], R]) -> R:
        """Runs `here` on every rank and `first` on rank 0 with all results; returns its result on all. Collective."""
        mine = self._tried(here)
        results: list[Any] = [mine] * self.size
        if self.group is not None:
            dist.gather_object(mine, results if self.rank == 0 else None, dst=0, group=self.group)
        box: list[Any] = [None]
        if self.rank == 0:
            failed = [result.reasons for result in results if isinstance(result, RanksError)]
            box = [RanksError(dict(ChainMap(*failed))) if failed else self._tried(lambda: first(results))]
        if self.group is not None:
            dist.broadcast_object_list(box, src=0, group=self.group)
        if isinstance(box[0], RanksError):
            raise box[0]
        return box[0]

    def every(self, step: Callable[[], R]) -> R:
        """Runs a step on every rank and returns its result on this one. Collective."""
        made: list[R] = []
        self.decide(lambda: made.append(step()), lambda _: None)
        return made[0]

    def first(self, step: Callable[[], R]) -> R:
        """Runs a step on rank 0 alone; its result is returned, or its error raised, on all ranks. Collective."""
        try:
            return self.decide(lambda: None, lambda _: step())
        except RanksError as failed:
            raise failed.reasons[0] from None

    def _tried(self, step: Callable[[], T]) -> T | RanksError:
        try:
            return step()
        except RanksError as error:
            return error
        except Exception as error:
            return RanksError({self.rank: portable(error)})
