"""Errors of checkpoints, with messages that a user can act on.

Where it is in doubt, a message says which checkpoints are kept. Errors that the user must repair are also UserErrors,
which the training command prints without a traceback. This module depends neither on stores nor on torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from foundry_moe.schema import UserError

# an address; one slash is a slip for two. Those of folders have no query
_ADDRESS = re.compile(r"\b(?!file:)([a-z][a-z0-9+.-]*:/+)([^\s\"'<>]+)", re.IGNORECASE)
_FOLDER = re.compile(r"(?:s3|gs|az):/", re.IGNORECASE)


FREE_SPACE = "free some space, for example by `foundry-moe checkpoints gc FOLDER --keep 1`, or lower `keep`"


def without_secrets(text: str) -> str:
    """The text with user, password, query and fragment of each address replaced by `***`."""

    def public(found: re.Match[str]) -> str:
        if _FOLDER.match(found[1]):
            bucket, slash, path = found[2].partition("/")
            user, at, bucket = bucket.rpartition("@")
            return f"{found[1]}{'***' if user else ''}{at}{bucket}{slash}{path}"
        user, _, rest = found[2].rpartition("@")  # a password may hold the characters that end a host
        place, *hidden = re.split("[?#]", rest, maxsplit=1)
        end = re.search(r"[).,;:]*$", found[0])[0] if hidden else ""  # type: ignore[index]
        return f"{found[1]}{'***@' if user else ''}{place}{'?***' if hidden else ''}{end}"

    return _ADDRESS.sub(public, text)


def printable(text: str) -> str:
    """The text with control and invisible characters written as Python escapes."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


class CheckpointError(RuntimeError):
    """A save, a load or a tool failed.

    Messages hide passwords and queries in addresses and escape control characters that a store has sent.
    """

    def __init__(self, message: str = "", *rest: object) -> None:
        super().__init__(printable(without_secrets(str(message))), *rest)


class StoreError(CheckpointError):
    """A request to the store failed. `lasting`: a retry cannot succeed."""

    lasting = False


class NotFoundError(StoreError, UserError):
    """An object, bucket or folder does not exist."""

    lasting = True


class NotAnObjectError(NotFoundError):
    """The key is not that of a regular object: a link, a FIFO, a device, or a path out of the folder."""


class ExistsError(StoreError):
    """A conditional write found the object already there."""

    lasting = True


class DeniedError(StoreError, UserError):
    """Credentials are missing, wrong or lack permission, or the clock is too far off for them."""

    lasting = True


class DamagedError(CheckpointError):
    """A commit is damaged: an object is missing, or does not have the recorded size or hash."""


class MismatchError(CheckpointError, UserError):
    """The checkpoint is intact and does not fit this run: another model, optimizer or data set."""


class ResumeError(CheckpointError, UserError):
    """The folder does not hold what `resume` asks for."""


class OwnedError(CheckpointError, UserError):
    """The folder belongs to another run. `model_differs`: only the tensors of the models differ."""

    model_differs = False


class TakenOverError(CheckpointError, UserError):
    """Another process owns the folder by now: this one must not write, and must not be restarted."""


class TooManyFailuresError(CheckpointError):
    """Too many saves in a row failed: training stops."""


def worst(reasons: Iterable[Exception]) -> Exception:
    """Selects the error to raise when several ranks fail: another model, then the store, then any other error. Damage,
    after which the previous checkpoint is tried, is raised only if there is nothing else."""

    def order(reason: Exception) -> tuple[bool, bool, bool]:
        mismatch, store, damage = (isinstance(reason, kind) for kind in (MismatchError, StoreError, DamagedError))
        return not mismatch, not store, damage

    return min(reasons, key=order)
