"""Reports a user's mistake as one sentence and an exit code, without a traceback."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from typing import NoReturn

from foundry_moe.checkpoint.errors import CheckpointError, TakenOverError, without_secrets
from foundry_moe.launch.ending import INTERRUPTED, LEAVE_S, code_here, is_first_rank, wait_to_end
from foundry_moe.schema import UserError, sentences_of

PASSING_ERROR, USER_ERROR, NONFINITE, TAKEN_OVER, BAD_NODE = 1, 2, 3, 4, 5
NO_RESTART = (NONFINITE, TAKEN_OVER)  # a restart would fail again, or stop the process that took over
# for the launcher, which ends the other processes once one has failed: the cause should be the first to end
_PEER_S, _LOCAL_PEER_S = 1.0, LEAVE_S + 2.0
_LOST_PEER = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "DistNetworkError",
    "remote process exited or there was a network error",
    "NCCL communicator was aborted",
)


class NonfiniteError(RuntimeError):
    """A run's loss, gradients or weights are not finite, and would not be again from its newest checkpoint."""


def is_users(error: BaseException) -> bool:
    """Whether the message alone is enough for a user."""
    return isinstance(error, UserError | CheckpointError)


def raise_on_all_ranks(error: Exception) -> NoReturn:
    """Raises an error that every rank raises: `run_cleanly` prints it on rank 0 only."""
    error.on_all_ranks = True  # type: ignore[attr-defined]
    raise error


def run_cleanly(action: Callable[[], int]) -> int:
    """Runs a command; each mistake of a user is printed as `error: <sentence>`, any other error keeps its traceback.

    Returns:
        The exit code: that of `action`; 2 for a user's mistake; 3 for a run whose numbers are not finite; 4 for one
        whose folder a newer process has taken over; 130 after Ctrl-C; 1 for a temporary error, such as a store that
        does not answer.
    """
    try:
        code = action()
        sys.stdout.flush()
        return code
    except (NonfiniteError, TakenOverError) as error:
        return _report(error, NONFINITE if isinstance(error, NonfiniteError) else TAKEN_OVER)
    except (UserError, CheckpointError) as error:
        if os.environ.get("FOUNDRY_MOE_TRACEBACK"):
            _record(error)
            raise
        return _report(error, USER_ERROR if isinstance(error, UserError) else PASSING_ERROR)
    except (RuntimeError, ConnectionError) as error:
        if isinstance(error, BrokenPipeError) and "RANK" not in os.environ:  # the reader, such as `head`, has ended
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return PASSING_ERROR
        text = f"{type(error).__name__}: {error}"
        if not any(words in text for words in _LOST_PEER) or os.environ.get("FOUNDRY_MOE_TRACEBACK"):
            _record(error)
            raise
        rank, first_line = os.environ.get("RANK", "0"), text.splitlines()[0]
        print(f"error: rank {rank} lost its connection to another rank ({first_line})", file=sys.stderr, flush=True)
        here = os.environ.get("WORLD_SIZE") == os.environ.get("LOCAL_WORLD_SIZE")
        wait_to_end(_LOCAL_PEER_S if here else _PEER_S, PASSING_ERROR)
        return PASSING_ERROR
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            _record(error)
            raise
        print(f"error: {str(error.filename)[:80]}...: {error.strerror}; name a shorter path", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        if is_first_rank():
            print("Interrupted.", file=sys.stderr, flush=True)
        return INTERRUPTED
    except Exception as error:
        _record(error)
        raise


def _record(error: Exception) -> None:
    """Writes the error to the file that torchrun names, before other ranks can notice it."""
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)


def _report(error: Exception, code: int) -> int:
    """Prints an error, a line for each sentence; returns the exit code of this process."""
    everywhere = getattr(error, "on_all_ranks", False)
    if not everywhere or is_first_rank():
        sentences = sentences_of(error) if isinstance(error, UserError) else (str(error),)
        lines = (f"error: {without_secrets(' '.join(sentence.splitlines()))}" for sentence in sentences)
        print("\n".join(lines), file=sys.stderr, flush=True)
    return code_here(code) if everywhere else code
