"""How a user's mistake reaches the user: one sentence and an exit code, no stack of frames."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

USER_ERROR = 2
_HERE = str(Path(__file__).parent)


def is_users(error: BaseException) -> bool:
    """Whether this package raised the error over something the user wrote: a ValueError from our own lines."""
    frames = traceback.extract_tb(error.__traceback__)
    return isinstance(error, ValueError) and bool(frames) and frames[-1].filename.startswith(_HERE)


def run_cleanly(action: Callable[[], int]) -> int:
    """Runs a command; a user's mistake is printed as `error: <sentence>`, anything else keeps its traceback.

    Returns:
        The exit code: that of `action`, or 2 for a user's mistake.
    """
    try:
        return action()
    except ValueError as error:
        if not is_users(error) or os.environ.get("FOUNDRY_MOE_TRACEBACK"):
            raise
        print(f"error: {error}", file=sys.stderr, flush=True)
        return USER_ERROR
