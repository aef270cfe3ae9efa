"""Reports a user's mistake as one sentence and an exit code, without a traceback."""

from __future__ import annotations

import importlib.util
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from foundry_moe.checkpoint.errors import CheckpointError, NonfiniteError, TakenOverError
from foundry_moe.schema import sentences_of

PASSING_ERROR, USER_ERROR, NONFINITE, TAKEN_OVER = 1, 2, 3, 4
NO_RESTART = (NONFINITE, TAKEN_OVER)  # a restart would fail again, or stop the process that took over
_KERNELS = importlib.util.find_spec("foundry_moe_kernels")  # not imported: that takes seconds
_OURS = tuple(
    f"{folder}{os.sep}"
    for folder in (Path(__file__).parents[1], Path(_KERNELS.origin).parent if _KERNELS and _KERNELS.origin else None)
    if folder
)


def is_users(error: BaseException) -> bool:
    """Whether the message is all that a user needs: a ValueError raised by our packages, or a CheckpointError."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = bool(frames) and frames[-1].filename.startswith(_OURS)
    return isinstance(error, CheckpointError) or (isinstance(error, ValueError) and ours)


def run_cleanly(action: Callable[[], int]) -> int:
    """Runs a command; each mistake of a user is printed as `error: <sentence>`, any other error keeps its traceback.

    Returns:
        The exit code: that of `action`; 2 for a user's mistake; 3 for a run whose numbers are not finite; 4 for one
        whose folder a newer process has taken over; 1 for an error that may pass, such as a store that does not answer.
    """
    try:
        return action()
    except (NonfiniteError, TakenOverError) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return NONFINITE if isinstance(error, NonfiniteError) else TAKEN_OVER
    except (ValueError, CheckpointError) as error:
        if not is_users(error) or os.environ.get("FOUNDRY_MOE_TRACEBACK"):
            raise
        sentences = sentences_of(error) if isinstance(error, ValueError) else (str(error),)
        lines = (f"error: {' '.join(sentence.splitlines())}" for sentence in sentences)
        print("\n".join(lines), file=sys.stderr, flush=True)
        return USER_ERROR if isinstance(error, ValueError) else PASSING_ERROR
