"""Leases of a folder. One run owns a folder, and within the run the process with the newest lease.

A lease is a numbered object, `owners/000003.json`, created by a conditional write, so that only one process gets a
number. The highest number owns the folder. The heartbeat beside it, `owners/000003.beat`, is the only object that is
overwritten: its age by the store's clock shows whether the owner is running, and an owner that ends deletes it. A
restart of the same run takes over at once, regardless of the heartbeat. The older process checks for a higher number
before it writes or commits, and stops. This module does not depend on commits.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import xxhash

from foundry_moe.checkpoint.errors import (
    DamagedError,
    NotAnObjectError,
    NotFoundError,
    OwnedError,
    StoreError,
    TakenOverError,
)
from foundry_moe.checkpoint.records import sealed, unsealed
from foundry_moe.checkpoint.store import Entry, Store

log = logging.getLogger(__name__)

BEAT_S = 60.0  # between two heartbeats
LIVE_S = 4 * BEAT_S  # an owner whose heartbeat is older counts as dead
LEASE_BYTES = 2**16  # limit of a lease's size
NAME_CHARS = 1000  # longer run names are cut
OTHER_MODEL = "this run's model has other tensors"
LAST_NUMBER = 10**9 - 1  # a lease's name has at most nine digits
_KEY = re.compile(r"owners/([0-9]{6}|[1-9][0-9]{6,8})\.json")


@dataclass(frozen=True, kw_only=True)
class Identity:
    """The identity of a run across restarts. An empty field matches any run.

    run_name: as given by the user.
    model: a digest of the model's tensors, from `tensors_digest`.
    """

    run_name: str = ""
    model: str = ""

    @property
    def name(self) -> str:
        """The run's name as a lease holds it."""
        return "".join(filter(str.isprintable, self.run_name))[:NAME_CHARS]


@dataclass(frozen=True, kw_only=True)
class Lease:
    """One process group's lease of a folder. `run` is a random number that all processes of a run share."""

    number: int
    run: str
    nonce: str
    run_name: str
    model: str
    host: str
    pid: int
    released: bool = False  # any run may own the folder next

    @property
    def key(self) -> str:
        return f"owners/{self.number:06d}.json"

    @property
    def beat_key(self) -> str:
        return f"owners/{self.number:06d}.beat"

    def __str__(self) -> str:
        name = f"run {self.run_name!r}" if self.run_name else "a run without a name"
        return f"{name} (process {self.pid} on {self.host})"

    def to_bytes(self) -> bytes:
        return sealed(asdict(self))

    @staticmethod
    def from_bytes(raw: bytes, key: str) -> Lease:
        """Raises DamagedError if it is not a lease, or not the one of this key."""
        body, kinds = unsealed(raw, f"{key}: the lease", LEASE_BYTES), {"number": int, "pid": int, "released": bool}
        right = body.keys() == set(Lease.__dataclass_fields__) and all(
            type(value) is kinds.get(name, str) and (not isinstance(value, str) or value.isprintable())
            for name, value in body.items()
        )
        if not right:
            raise DamagedError(f"{key}: the lease cannot be read: its fields are not those of a lease")
        lease = Lease(**body)
        if lease.key != key:
            raise DamagedError(f"{key}: the lease is that of {lease.number}")
        return lease


def tensors_digest(state_dict: Mapping[str, Any]) -> str:
    """A digest of names and global shapes, independent of mesh and precision."""
    shapes = sorted((name, list(getattr(tensor, "shape", ()))) for name, tensor in state_dict.items())
    return xxhash.xxh3_128_hexdigest(json.dumps(shapes).encode())


class Owners:
    """The leases of one folder."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._warned: set[str] = set()

    def newest(self, entries: Iterable[Entry] | None = None) -> Lease | None:
        """The readable lease with the highest number; None if there is none.

        Args:
            entries: the listing of `owners/`; None lists it.
        """
        return next(self._leases(self.store.scan("owners/") if entries is None else entries), None)

    def _leases(self, entries: Iterable[Entry]) -> Iterator[Lease]:
        """The readable leases, newest first."""
        keys = {int(match[1]): entry.key for entry in entries if (match := _KEY.fullmatch(entry.key))}
        leases = (self._read(keys[number]) for number in sorted(keys, reverse=True))
        return (lease for lease in leases if lease is not None)

    def _read(self, key: str) -> Lease | None:
        try:
            return Lease.from_bytes(self.store.get(key, LEASE_BYTES), key)
        except (DamagedError, NotFoundError) as error:  # an older lease may have been removed by a newer owner
            if key not in self._warned and isinstance(error, DamagedError | NotAnObjectError):
                self._warned.add(key)
                log.warning("Passed over %s in %s: %s", key, self.store.url, error)
            return None

    def living_since_s(self) -> float | None:
        """When the owner got its lease, by the store's clock; None if no owner is running."""
        entries = list(self.store.scan("owners/"))
        lease = self.newest(entries)
        if lease is None or lease.released or self._silent_s(lease, entries) > LIVE_S:
            return None
        return next((entry.modified_s for entry in entries if entry.key == lease.key), None)

    def _silent_s(self, lease: Lease, entries: list[Entry]) -> float:
        """Age of an owner's heartbeat in seconds; infinite if it has none."""
        beats = [entry.modified_s for entry in entries if entry.key == lease.beat_key]
        return self.store.now_s() - beats[0] if beats else float("inf")

    def find(self, identity: Identity, *, has_commits: Callable[[], bool]) -> tuple[Lease | None, Lease | None]:
        """The newest lease, and the lease that this run would continue. A dead owner without commits does not count.

        Raises:
            OwnedError: the folder belongs to another run.
        """
        entries = list(self.store.scan("owners/"))
        newest = self.newest(entries)
        owner = None if newest is None or newest.released else newest
        if owner is not None and (problem := _difference(owner, identity)):
            silent_s = self._silent_s(owner, entries)
            if silent_s <= LIVE_S or has_commits():
                raise self._refuse(owner, silent_s, problem)
            owner = None
        return newest, owner

    def acquire(self, identity: Identity, *, has_commits: Callable[[], bool], process_id: str = "") -> Lease:
        """Leases the folder for this process; see `find`.

        Args:
            process_id: the lease's nonce. An existing lease with this nonce is reused, because several writers of one
                process are one owner.

        Raises:
            OwnedError: the folder belongs to another run.
            TakenOverError: this process owned it, and another one owns it by now.
        """
        for mine in self._leases(self.store.scan("owners/")) if process_id else ():
            if mine.nonce == process_id:
                self.check(mine)
                return mine
        taken = 0
        while True:
            before, owner = self.find(identity, has_commits=has_commits)
            taken = self._above(max(taken, before.number if before else 0))  # unreadable leases keep their numbers
            mine = Lease(
                number=taken,
                run=owner.run if owner else secrets.token_hex(8),
                nonce=process_id or secrets.token_hex(8),
                run_name=identity.name or (owner.run_name if owner else ""),
                model=identity.model,
                host=socket.gethostname(),
                pid=os.getpid(),
            )
            self.beat(mine)  # before the lease: one without a heartbeat counts as dead
            if self.store.put_new(mine.key, mine.to_bytes()) or self._read(mine.key) == mine:
                return mine  # if it is there, our write succeeded and its response was lost

    def _above(self, number: int) -> int:
        """The next number. Raises OwnedError if names have no digits for it."""
        if number >= LAST_NUMBER:
            raise OwnedError(
                f"{self.store.url}/owners/{LAST_NUMBER}.json has the largest number that a lease can have, so no "
                "later lease is possible: delete that object if none of your runs wrote it, or use another folder"
            )
        return number + 1

    def _refuse(self, owner: Lease, silent_s: float, problem: str) -> OwnedError:
        seen = f"whose heartbeat is {silent_s:.0f} s old" if silent_s <= LIVE_S else "not running now"
        error = OwnedError(
            f"{self.store.url} belongs to {owner}, {seen}, and {problem}: give this run a folder of its own. To "
            f"continue from that run's checkpoints, stop that run and free the folder with `foundry-moe checkpoints "
            f"release {self.store.url}`"
        )
        error.model_differs = problem == OTHER_MODEL
        return error

    def check(self, mine: Lease) -> None:
        """Raises TakenOverError if the folder is another process's by now."""
        entries = list(self.store.scan("owners/"))
        gone = all(entry.key != mine.key for entry in entries)
        newest = self.newest(entries)
        if newest is not None and (gone or newest.number > mine.number):
            who = "the folder was released" if newest.released else f"another process has taken over: {newest}"
            raise TakenOverError(f"{who}; this process stops without changing {self.store.url}")
        if gone:  # all leases were deleted: this process still owns the folder
            self.store.put_new(mine.key, mine.to_bytes())

    def beat(self, mine: Lease) -> None:
        self.store.put(mine.beat_key, mine.nonce.encode())

    def release(self) -> Lease | None:
        """Frees the folder for any run; returns the last lease, None if the folder was free."""
        while True:
            before = self.newest()
            if before is None or before.released:
                return None
            free = Lease(**{**asdict(before), "number": self._above(before.number), "released": True})
            if self.store.put_new(free.key, free.to_bytes()):
                return before


def _difference(owner: Lease, identity: Identity) -> str | None:
    """Why these are different runs; None if they may be the same."""
    if owner.run_name and identity.name and owner.run_name != identity.name:
        return f"this is run {identity.name!r}"
    if owner.model and identity.model and owner.model != identity.model:
        return OTHER_MODEL
    return None


class Heartbeat:
    """Writes an owner's heartbeat in a thread, which also checks whether another process has taken over."""

    def __init__(self, owners: Owners, mine: Lease, every_s: float = BEAT_S) -> None:
        self.owners, self.mine, self.every_s = owners, mine, every_s
        self.lost: TakenOverError | None = None
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="checkpoint-heartbeat", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._end.wait(self.every_s):
            try:
                self.owners.check(self.mine)
                self.owners.beat(self.mine)
            except TakenOverError as error:
                self.lost = error
                log.error("%s (at its next save)", error)
                return
            except Exception as error:  # the next one may succeed; if not, the next save reports the error
                log.debug("No heartbeat at %s: %s", time.strftime("%X"), error)

    def stop(self) -> None:
        """Ends the thread and deletes the heartbeat, so that the owner counts as dead at once."""
        self._end.set()
        if self.lost is None:
            with contextlib.suppress(StoreError):
                self.owners.store.delete([self.mine.beat_key])
