"""What can go wrong with a checkpoint, as sentences that a user can act on.

Every error says what was kept, where that is in doubt. Those that a user mends are ValueErrors as well, which the
training command prints without a stack of frames. This module knows nothing of stores or of torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_USERINFO = re.compile(r"(https?://)[^\s\"'<>]*@", re.IGNORECASE)


def without_password(text: str) -> str:
    """A text for people to read: of web addresses in it user and password are left out."""
    return _USERINFO.sub(r"\1***@", text)


def printable(text: str) -> str:
    """A text with each character that a terminal may obey, or that cannot be seen, written as Python escapes it."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


class CheckpointError(RuntimeError):
    """A save, a load or a tool could not do its work.

    No message shows a password that is part of an address, or holds control characters that a store has sent.
    """

    def __init__(self, message: str = "", *rest: object) -> None:
        super().__init__(printable(without_password(str(message))), *rest)


class StoreError(CheckpointError):
    """The store did not do what it was asked; `lasting` says that trying again will not help."""

    lasting = False


class NotFoundError(StoreError, ValueError):
    """An object, or the whole bucket or folder, is not there."""

    lasting = True


class NotAnObjectError(NotFoundError):
    """Something else is where an object should be: a link, a FIFO, a device, a name that leads out of the folder."""


class ExistsError(StoreError):
    """An object that was to be new is there already."""

    lasting = True


class DeniedError(StoreError, ValueError):
    """No credentials, wrong ones, no permission, or a clock by which the store refuses them."""

    lasting = True


class DamagedError(CheckpointError):
    """A commit cannot be trusted: an object is missing, short, or does not have the hash that was recorded."""


class MismatchError(CheckpointError, ValueError):
    """The checkpoint is intact, and it is one of another model."""


class ResumeError(CheckpointError, ValueError):
    """What `resume` asks for is not what the folder holds."""


class OwnedError(CheckpointError, ValueError):
    """The folder belongs to another run; `model_differs` says that the models' tensors alone tell them apart."""

    def __init__(self, sentence: str, model_differs: bool = False) -> None:
        super().__init__(sentence, model_differs)
        self.model_differs = model_differs

    def __str__(self) -> str:
        return str(self.args[0])


class TakenOverError(CheckpointError, ValueError):
    """A newer process of this run owns the folder: this one must write no more, and a restart of it would be wrong."""


class TooManyFailuresError(CheckpointError):
    """So many saves in a row failed that training would run on unprotected."""


class NonfiniteError(RuntimeError):
    """A run's loss, gradients or weights are not finite, and would not be again from its newest checkpoint."""


def worst(reasons: Iterable[Exception]) -> Exception:
    """Of several ranks' failures the one that decides: a wrong model, then a silent store, then whatever else says
    nothing of the checkpoint; damage, for which the one before is taken, only if that is all that there is."""

    def order(reason: Exception) -> int:
        first = (MismatchError, StoreError)
        at = next((place for place, kind in enumerate(first) if isinstance(reason, kind)), len(first))
        return at + isinstance(reason, DamagedError)

    return min(reasons, key=order)
