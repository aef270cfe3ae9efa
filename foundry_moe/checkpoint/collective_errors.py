"""How a rank fails without leaving the others alone: it goes on with what is collective, and all learn its error.

It knows nothing of checkpoints.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
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


def portable_errors(method: Callable[P, T]) -> Callable[P, T]:
    """For what torch.distributed.checkpoint calls: it sends errors to all ranks by pickle, and a rank whose error
    cannot be sent leaves alone while the others wait."""

    @functools.wraps(method)
    def call(*arguments: P.args, **keys: P.kwargs) -> T:
        try:
            return method(*arguments, **keys)
        except Exception as error:
            raise portable(error)  # noqa: B904 - it is the same error, or has it as its cause

    return call
