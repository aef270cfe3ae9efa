"""What of a folder goes: old commits, and attempts that no commit names. Everything else stays.

Deletion never leaves the attempt that it names, nor touches data that another record names. The newest good commit
and the one just made stay, whatever else lies in the folder.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from foundry_moe.checkpoint import fault_injection
from foundry_moe.checkpoint.errors import CheckpointError, DamagedError, NotAnObjectError, StoreError
from foundry_moe.checkpoint.ledger import BURIED, Ledger, is_finite
from foundry_moe.checkpoint.owners import Owners
from foundry_moe.checkpoint.records import ATTEMPT, Commit, CommitKey

log = logging.getLogger(__name__)

HOLD_S = 24 * 3600.0  # a reader that died is forgotten after this
UNFINISHED_IN = ("steps/", "commits/", "owners/", "holds/")


class Retention:
    """Deletes from one folder. Commits that were found good once are not opened again."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger, self.store = ledger, ledger.store
        self._good: set[CommitKey] = set()
        self._told: set[str] = set()

    def retain(self, keep: int, *, made: CommitKey | None = None, dry_run: bool = False) -> list[CommitKey]:
        """Deletes all but the newest `keep` good commits, the newest that is finite, milestones, those being read, and
        what cannot be read.

        Args:
            made: the commit that this process has just made. It stays, and is good.
            dry_run: delete nothing.

        Returns:
            What went, oldest first.
        """
        assert keep >= 1
        keys = self.ledger.newest_first()
        if len(keys) <= keep:
            return []
        if made is not None:
            self._good.add(made)
        surplus = self._surplus(keys, keep)
        held = self._held() if surplus else set()
        finite = self._newest_finite(keys) if surplus else None
        gone = []
        for key, commit in reversed(surplus):
            if key in held or key in (made, finite) or _stays(commit):
                continue
            if not dry_run:
                self._delete(key, commit)
            gone.append(key)
        return gone

    def _surplus(self, keys: list[CommitKey], keep: int) -> list[tuple[CommitKey, Commit]]:
        """The commits older than the newest `keep` good ones, newest first, with their records."""
        surplus, good = [], 0
        for key in keys:
            try:
                if good < keep:
                    good += self._is_good(key)
                else:
                    surplus.append((key, self.ledger.read(key)))
            except DamagedError as error:
                self._tell(key.key, f"{error}; it does not count, and stays for a person to look at")
        return surplus

    def _newest_finite(self, keys: list[CommitKey]) -> CommitKey | None:
        """The newest good commit whose weights are finite; as a rule the newest of all, whose record is read."""
        for key in keys:
            with contextlib.suppress(DamagedError):
                if is_finite(self.ledger.read(key)) and self._is_good(key):
                    return key
        return None

    def _is_good(self, key: CommitKey) -> bool:
        """Raises DamagedError if it is not."""
        if key not in self._good or key in self.ledger.damaged:
            self.ledger.open(key)
            self._good.add(key)
        return True

    def _delete(self, key: CommitKey, commit: Commit) -> None:
        self.store.delete([key.key])
        fault_injection.point("retention.record_deleted")
        try:
            if not self._others_name(commit.attempt, key):
                self.delete_attempt(commit.attempt)
        except CheckpointError as error:
            if isinstance(error, StoreError) and not isinstance(error, NotAnObjectError):
                raise  # the store does not answer: `collect` finds the data later
            self._tell(commit.attempt, str(error))
        fault_injection.point("retention.data_deleted")

    def _tell(self, what: str, why: str) -> None:
        if what not in self._told:
            self._told.add(what)
            log.warning("Retention passed over %s in %s: %s", what, self.store.url, why)

    def _held(self) -> set[CommitKey]:
        limit_s = None
        held = set()
        for entry in self.store.scan("holds/"):
            limit_s = self.store.now_s() - HOLD_S if limit_s is None else limit_s
            generation, _, rest = entry.key.removeprefix("holds/").partition("-")
            key = CommitKey.parse(f"commits/{generation}-{rest.partition('-')[0]}.json")
            if entry.modified_s > limit_s and key is not None:
                held.add(key)
        return held

    def _records_of(self, step: int) -> Iterator[CommitKey]:
        return (key for key in self.ledger.newest_first() if key.step == step)

    def _others_name(self, attempt: str, but: CommitKey | None = None) -> bool:
        """Whether a record names this attempt, or might, because it cannot be read."""
        for key in self._records_of(_step_of(attempt)):
            try:
                if key != but and self.ledger.read(key).attempt == attempt:
                    return True
            except DamagedError:
                if self.store.size_bytes(key.key) is not None:
                    return True
        return False

    def delete_attempt(self, attempt: str) -> int:
        """Deletes an attempt's data, which no commit names; returns the bytes freed.

        Raises:
            CheckpointError: this is no attempt's name.
        """
        _step_of(attempt)
        entries = list(self.store.scan(f"{attempt}/"))
        mark = f"{attempt}/{BURIED}"
        self.store.delete([entry.key for entry in entries if entry.key != mark])
        self.store.delete([mark])  # last: until then whoever commits this attempt sees it
        return sum(entry.size_bytes for entry in entries)

    def bury(self, attempt: str) -> int | None:
        """Deletes an attempt unless a commit names it, also if that commit is made at this moment.

        Both sides write first and look then: this one its mark, and then for a record; who commits the record, and
        then for the mark (`Ledger.confirm`). So one of them sees the other.

        Returns:
            The bytes freed; None if the attempt stays.
        """
        _step_of(attempt)
        self.store.put(f"{attempt}/{BURIED}", b"")
        fault_injection.point("collect.marked")
        if self._others_name(attempt):
            self.store.delete([f"{attempt}/{BURIED}"])
            return None
        return self.delete_attempt(attempt)

    def stale_attempts(self, older_than_s: float, *, own: bool = False) -> dict[str, int]:
        """Attempts that no commit names and that nothing was added to for `older_than_s`, with their bytes.

        A step whose commit record cannot be read is left alone, whichever attempt it meant; so is what was written
        since a living run made the folder its own, unless `own` says that it is this run that asks.
        """
        limit_s = self.store.now_s() - older_than_s
        since_s = None if own else Owners(self.store).living_since_s()
        attempts: dict[str, list[float]] = {}
        for entry in self.store.scan("steps/"):  # before the records: an attempt committed meanwhile is seen as such
            attempt = "/".join(entry.key.split("/")[:3])
            if not ATTEMPT.fullmatch(attempt) or attempt == entry.key:
                self._tell(entry.key, "its name is not that of a checkpoint's data; remove it by hand")
                continue
            sums = attempts.setdefault(attempt, [0.0, 0.0])
            sums[0] = max(sums[0], entry.modified_s)
            sums[1] += entry.size_bytes
        named, unclear = set(), set()
        for key in self.ledger.newest_first():
            try:
                named.add(self.ledger.read(key).attempt)
            except DamagedError:
                unclear.add(key.step)
        return {
            attempt: int(size)
            for attempt, (modified_s, size) in attempts.items()
            if attempt not in named
            and _step_of(attempt) not in unclear
            and modified_s <= limit_s
            and (since_s is None or modified_s < since_s)
        }

    def collect(self, older_than_s: float, *, own: bool = False) -> dict[str, int]:
        """Deletes stale attempts and unfinished uploads; returns the attempts with the bytes freed."""
        gone = {}
        for attempt in self.stale_attempts(older_than_s, own=own):
            freed = self.bury(attempt)
            if freed is not None:
                gone[attempt] = freed
        since_s = None if own else Owners(self.store).living_since_s()
        if since_s is not None:  # a living run's uploads are younger than its claim
            older_than_s = max(older_than_s, self.store.now_s() - since_s)
        for prefix in UNFINISHED_IN:
            self.store.discard_unfinished(prefix, older_than_s=older_than_s)
        self._forget_holds()
        return gone

    def _forget_holds(self) -> None:
        entries = list(self.store.scan("holds/"))
        if entries:
            limit_s = self.store.now_s() - HOLD_S
            with contextlib.suppress(StoreError):
                self.store.delete([entry.key for entry in entries if entry.modified_s <= limit_s])


def _stays(commit: Commit) -> bool:
    """Whether a commit stays however old it is."""
    return bool(commit.summary.get("milestone"))


def _step_of(attempt: str) -> int:
    match = ATTEMPT.fullmatch(attempt)
    if match is None:
        raise CheckpointError(f"{attempt!r} is not the name of an attempt at a checkpoint; nothing of it was deleted")
    return int(match[1])
