"""How a rank fails without leaving the others alone: it goes on with what is collective, and all learn its error.

Ranks send each other Python objects by torch's object collectives, which pickle them. That is safe because only
processes of one job, which run the same program, are in the group, and because what they send was made or parsed and
checked by one of them: bytes of a store are never unpickled. It knows nothing of checkpoints.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch.distributed as dist

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class FirstError:
    """Keeps the first error of a rank that goes on talking to the others, so that none of them waits for ever."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    def guard(self, step: Callable[P, T], *arguments: P.args, **keys: P.kwargs) -> T | None:
        """Runs a step that needs no other rank, and keeps its error; None if it, or one before it, has failed."""
        if self.error is None:
            try:
                return step(*arguments, **keys)
            except Exception as error:
                self.error = error
        return None


def portable(error: Exception) -> Exception:
    """The error itself if pickle brings it to other ranks; else one that says the same."""
    try:
        arrived = pickle.loads(pickle.dumps(error))
        if type(arrived) is type(error) and str(arrived) == str(error):
            return error
    except Exception:  # whatever its class does when it is taken apart or made again
        pass
    said = RuntimeError(f"{type(error).__name__}: {error}")
    said.__cause__ = error
    return said


@dataclass(frozen=True)
class _Failed:
    error: Exception


class RanksError(Exception):
    """What failed on which ranks, raised on all of them."""

    def __init__(self, reasons: dict[int, Exception]) -> None:
        super().__init__(reasons)
        self.reasons = reasons

    def __str__(self) -> str:
        return "; ".join(sorted({str(reason) for reason in self.reasons.values()}))


class Ranks:
    """The ranks of a CPU group, or a single process. What one of them raises in a step, all raise as a RanksError."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank = dist.get_rank(group) if group is not None else 0
        self.size = dist.get_world_size(group) if group is not None else 1

    def decide(self, here: Callable[[], T], first: Callable[[list[T]], R]) -> R:
        """Every rank runs `here`; rank 0 makes one answer of all results, in the order of ranks. Collective."""
        mine = _tried(here)
        results: list[Any] = [mine]
        if self.group is not None:
            results = [None] * self.size
            dist.gather_object(mine, results if self.rank == 0 else None, dst=0, group=self.group)
        box: list[Any] = [_answer(results, first) if self.rank == 0 else None]
        if self.group is not None:
            dist.broadcast_object_list(box, src=0, group=self.group)
        if isinstance(box[0], RanksError):
            raise box[0]
        return box[0]

    def first(self, step: Callable[[], R]) -> R:
        """What a step gives that rank 0 alone does, for all; its error is raised on all. Collective."""
        try:
            return self.decide(lambda: None, lambda _: step())
        except RanksError as failed:
            raise failed.reasons[0] from None


def _answer(results: list[Any], first: Callable[[list[T]], R]) -> R | RanksError:
    """What rank 0 makes of all results, or what failed where."""
    failed: dict[int, Exception] = {}
    for rank, result in enumerate(results):
        if isinstance(result, _Failed):
            failed |= result.error.reasons if isinstance(result.error, RanksError) else {rank: result.error}
    if not failed:
        made = _tried(lambda: first(results))
        if not isinstance(made, _Failed):
            return made
        failed = {0: made.error}
    return RanksError(failed)


def _tried(step: Callable[[], T]) -> T | _Failed:
    try:
        return step()
    except Exception as error:
        return _Failed(portable(error))
