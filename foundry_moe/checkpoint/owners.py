"""Whose folder it is: that of one run, and of the processes of this run that one which claimed it last.

A claim is a numbered object, `owners/000003.json`, written as new: of several processes one gets a number, and the
highest number owns the folder. Nothing is ever overwritten but the heartbeat beside it, `owners/000003.beat`, whose
age by the store's clock says whether the owner lives. A restart of the same run takes over at once, whatever the
heartbeat says; the older process sees the higher number before it writes or commits, and stops.

It knows nothing of commits.
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
from collections.abc import Callable, Mapping
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
LIVE_S = 4 * BEAT_S  # an owner that was not heard of for so long is taken for dead
KEPT = 5  # claims of the past that stay, for a person to look at
CLAIM_BYTES = 2**16  # no claim is larger
NAME_CHARS = 1000  # of a run's name that are kept
LAST_NUMBER = 10**9 - 1  # the largest that a claim's name has digits for
_KEY = re.compile(r"owners/([0-9]{6,9})\.(json|beat|left)")


def number_of(key: str, kind: str = "") -> int | None:
    """The number in the name of a claim (`json`), a heartbeat (`beat`) or a release (`left`), of `kind` if that is
    given; None for a name that no claim writes."""
    match = _KEY.fullmatch(key)
    if match is None or (kind and match[2] != kind) or key != f"owners/{int(match[1]):06d}.{match[2]}":
        return None
    return int(match[1])


@dataclass(frozen=True, kw_only=True)
class Identity:
    """What is the same in all lives of a run.

    run_name: as the user gave it; empty if nobody did, which agrees with any.
    model: a digest of the model's tensors, from `tensors_digest`; empty agrees with any.
    """

    run_name: str = ""
    model: str = ""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One process group's claim to a folder. `run` is one random number for all lives of a run."""

    number: int
    run: str
    nonce: str
    run_name: str
    model: str
    host: str
    pid: int
    released: bool = False  # nobody's: the next run may be any

    @property
    def key(self) -> str:
        return f"owners/{self.number:06d}.json"

    @property
    def beat_key(self) -> str:
        return f"owners/{self.number:06d}.beat"

    @property
    def left_key(self) -> str:
        return f"owners/{self.number:06d}.left"

    @property
    def identity(self) -> Identity:
        return Identity(run_name=self.run_name, model=self.model)

    def __str__(self) -> str:
        name = f"run {self.run_name!r}" if self.run_name else "a run without a name"
        return f"{name} (process {self.pid} on {self.host})"

    def to_bytes(self) -> bytes:
        return sealed(asdict(self))

    @staticmethod
    def from_bytes(raw: bytes, key: str) -> Claim:
        """Raises DamagedError for what is no claim, or another than its name says."""
        body, kinds = unsealed(raw, f"{key}: the claim", CLAIM_BYTES), {"number": int, "pid": int, "released": bool}
        right = body.keys() == set(Claim.__dataclass_fields__) and all(
            type(value) is kinds.get(name, str) and (not isinstance(value, str) or value.isprintable())
            for name, value in body.items()
        )
        if not right:
            raise DamagedError(f"{key}: the claim cannot be read: it is not what a run writes")
        claim = Claim(**body)
        if claim.key != key:
            raise DamagedError(f"{key}: the claim is that of {claim.number}")
        return claim


def tensors_digest(state_dict: Mapping[str, Any]) -> str:
    """A digest of names and global shapes: the same on every mesh and in every precision."""
    shapes = sorted((name, list(getattr(tensor, "shape", ()))) for name, tensor in state_dict.items())
    return xxhash.xxh3_128_hexdigest(json.dumps(shapes).encode())


class Owners:
    """The claims to one folder."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._told: set[str] = set()

    def newest(self, above: int = -1) -> Claim | None:
        """The claim with the highest number, of those above `above`; what cannot be read is passed over."""
        return self._newest(list(self.store.scan("owners/")), above)

    def _newest(self, entries: list[Entry], above: int = -1) -> Claim | None:
        numbers = {number: entry.key for entry in entries if (number := number_of(entry.key, "json")) is not None}
        for number in sorted((number for number in numbers if number > above), reverse=True):
            claim = self._read(numbers[number])
            if claim is not None:
                return claim
        return None

    def _read(self, key: str) -> Claim | None:
        try:
            return Claim.from_bytes(self.store.get(key, CLAIM_BYTES), key)
        except (DamagedError, NotFoundError) as error:  # gone: an old one, removed by a newer owner
            if key not in self._told and isinstance(error, DamagedError | NotAnObjectError):
                self._told.add(key)
                log.warning("Passed over %s in %s: %s", key, self.store.url, error)
            return None

    def living_since_s(self) -> float | None:
        """When, by the store's clock, the owner began its claim; None if there is none, or it is not alive."""
        entries = list(self.store.scan("owners/"))
        claim = self._newest(entries)
        if claim is None or claim.released or self._silent_s(claim, entries) > LIVE_S:
            return None
        return next((entry.modified_s for entry in entries if entry.key == claim.key), None)

    def _silent_s(self, claim: Claim, entries: list[Entry]) -> float:
        """For how long nothing was heard of an owner; the claim itself is its first word."""
        heard = {entry.key: entry.modified_s for entry in entries if entry.key in (claim.key, claim.beat_key)}
        left = any(entry.key == claim.left_key for entry in entries)
        return float("inf") if left or not heard else self.store.now_s() - max(heard.values())

    def claim(self, identity: Identity, *, has_commits: Callable[[], bool], life: str = "") -> Claim:
        """Makes the folder this process's. An owner that died before anything was committed is passed over.

        Args:
            life: the claim's nonce. Who has claimed with it before goes on with that claim: several writers of one
                process are one owner.

        Raises:
            OwnedError: it belongs to another run.
            TakenOverError: it was this life's, and is another's by now.
        """
        if life and (mine := self._claim_of(life)) is not None:
            self.check(mine)
            return mine
        taken, name = 0, "".join(filter(str.isprintable, identity.run_name))[:NAME_CHARS]
        identity = Identity(run_name=name, model=identity.model)
        while True:
            entries = list(self.store.scan("owners/"))
            before = self._newest(entries)
            same = before is not None and not before.released
            if before is not None and not before.released:
                problem = _difference(before.identity, identity)
                silent_s = self._silent_s(before, entries) if problem else 0.0
                if problem and (silent_s <= LIVE_S or has_commits()):
                    raise self._refuse(before, identity, silent_s, problem)
                same = problem is None
            taken = self._above(max(taken, before.number if before else 0))  # past what cannot be read, too
            mine = Claim(
                number=taken,
                run=before.run if before is not None and same else secrets.token_hex(8),
                nonce=life or secrets.token_hex(8),
                run_name=name or (before.run_name if before is not None and same else ""),
                model=identity.model,
                host=socket.gethostname(),
                pid=os.getpid(),
            )
            won = self.store.put_new(mine.key, mine.to_bytes())
            if not won:
                found = self._read(mine.key)
                won = found is not None and found.nonce == mine.nonce  # our write won, its answer was lost
            if won:
                self.beat(mine)
                self._forget(mine)
                return mine

    def _above(self, number: int) -> int:
        """The next number. Raises OwnedError where there is none: its name would not be found again."""
        if number >= LAST_NUMBER:
            raise OwnedError(
                f"{self.store.url}/owners/{LAST_NUMBER}.json has the largest number that a claim can have, and nobody "
                "can own the folder after it: remove that object if no run of yours wrote it, or use another folder"
            )
        return number + 1

    def _claim_of(self, life: str) -> Claim | None:
        keys = (entry.key for entry in self.store.scan("owners/") if number_of(entry.key, "json") is not None)
        claims = (self._read(key) for key in keys)
        return next((claim for claim in claims if claim is not None and claim.nonce == life), None)

    def _refuse(self, owner: Claim, identity: Identity, silent_s: float, problem: str) -> OwnedError:
        seen = f"heard of {silent_s:.0f} s ago" if silent_s <= LIVE_S else "not running now"
        return OwnedError(
            f"{self.store.url} belongs to {owner}, {seen}, and {problem}: give this run a folder of its own; if it is "
            f"to go on with that run's checkpoints, stop that run and free the folder with `foundry-moe checkpoints "
            f"release {self.store.url}`",
            model_differs=not _names_differ(owner.identity, identity),
        )

    def check(self, mine: Claim) -> None:
        """Raises TakenOverError if the folder is another process's by now."""
        entries = list(self.store.scan("owners/"))
        gone = all(entry.key != mine.key for entry in entries)
        newer = self._newest(entries, -1 if gone else mine.number)
        if newer is not None:
            who = "somebody freed the folder" if newer.released else f"another process has taken over: {newer}"
            raise TakenOverError(f"{who}; this process stops, and what {self.store.url} holds is left as it is")
        if gone:  # somebody removed all claims: it is still ours
            self.store.put_new(mine.key, mine.to_bytes())

    def beat(self, mine: Claim) -> None:
        """Says that this owner lives."""
        self.store.put(mine.beat_key, mine.nonce.encode())

    def leave(self, mine: Claim) -> None:
        """The owner ends: nobody has to wait until it is taken for dead."""
        with contextlib.suppress(StoreError):
            self.store.put(mine.left_key, mine.nonce.encode())

    def release(self) -> Claim | None:
        """Frees the folder for any run; returns whose it was, None if it was free."""
        while True:
            before = self.newest()
            if before is None or before.released:
                return None
            free = Claim(**{**asdict(before), "number": self._above(before.number), "released": True})
            if self.store.put_new(free.key, free.to_bytes()):
                return before

    def _forget(self, mine: Claim) -> None:
        """Removes all but the last few claims below `mine`."""
        old = []
        for entry in self.store.scan("owners/"):
            number = number_of(entry.key)
            if number is not None and number < mine.number - KEPT:
                old.append(entry.key)
        with contextlib.suppress(StoreError):
            if old:
                self.store.delete(old)


def _names_differ(owner: Identity, identity: Identity) -> bool:
    return bool(owner.run_name and identity.run_name) and owner.run_name != identity.run_name


def _difference(owner: Identity, identity: Identity) -> str | None:
    """Why these are two runs; None if they may be one."""
    if _names_differ(owner, identity):
        return f"this is run {identity.run_name!r}"
    if owner.model and identity.model and owner.model != identity.model:
        return "this run's model has other tensors"
    return None


class Heart:
    """Beats for an owner in a thread of its own, and notices, between two saves too, that another has taken over."""

    def __init__(self, owners: Owners, mine: Claim, every_s: float = BEAT_S) -> None:
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
            except Exception as error:  # the next beat may get through, and the next save says what is wrong
                log.debug("No heartbeat at %s: %s", time.strftime("%X"), error)

    def stop(self) -> None:
        """Ends the beating, and says so to others."""
        self._end.set()
        if self.lost is None:
            self.owners.leave(self.mine)
