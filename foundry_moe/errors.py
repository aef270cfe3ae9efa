"""How a user's mistake reaches the user: one sentence and an exit code, no stack of frames."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from foundry_moe.checkpoint.errors import CheckpointError

USER_ERROR = 2
_HERE = str(Path(__file__).parent)


def is_users(error: BaseException) -> bool:
    """Whether the error says all that a user needs: a ValueError that this package raised, or one of a checkpoint."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = bool(frames) and frames[-1].filename.startswith(_HERE)
    return isinstance(error, CheckpointError) or (isinstance(error, ValueError) and ours)


def run_cleanly(action: Callable[[], int]) -> int:
    """Runs a command; a user's mistake is printed as `error: <sentence>`, anything else keeps its traceback.

    Returns:
        The exit code: that of `action`, or 2 for a user's mistake.
    """
    try:
        return action()
    except (ValueError, CheckpointError) as error:
        if not is_users(error) or os.environ.get("FOUNDRY_MOE_TRACEBACK"):
            raise
        print(f"error: {error}", file=sys.stderr, flush=True)
        return USER_ERROR
