"""Deletes old commits, and attempts without a commit.

Only objects of the named attempt are deleted, and none that another record names. The newest good commit and the one
just made are always kept.
"""

from __future__ import annotations

import logging

from foundry_moe.checkpoint.errors import CheckpointError, DamagedError, NotAnObjectError, StoreError
from foundry_moe.checkpoint.ledger import Ledger, is_finite
from foundry_moe.checkpoint.owners import Owners
from foundry_moe.checkpoint.records import ATTEMPT, Commit, CommitKey

log = logging.getLogger(__name__)


class Retention:
    """Deletes from one folder. A commit that was found good is not opened again."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger, self.store = ledger, ledger.store
        self._good: set[CommitKey] = set()
        self._warned: set[str] = set()

    def retain(self, keep: int, *, made: CommitKey | None = None, dry_run: bool = False) -> list[CommitKey]:
        """Deletes commits, except the newest `keep` good ones, the newest finite one, milestones, and unreadable ones.

        Args:
            made: the commit that this process has just made; kept without a check.
            dry_run: delete nothing.

        Returns:
            The deleted commits, oldest first.
        """
        assert keep >= 1
        keys = self.ledger.newest_first()
        if len(keys) <= keep:
            return []
        if made is not None:
            self._good.add(made)
        surplus: list[tuple[CommitKey, Commit]] = []
        kept, finite = 0, False
        for key in keys:
            try:
                commit = self.ledger.read(key)
                stays = kept < keep or (not finite and is_finite(commit))
                if stays and (key not in self._good or key in self.ledger.damaged):
                    self.ledger.open(key)
                    self._good.add(key)
            except DamagedError as error:
                self._warn(key.key, f"{error}; it does not count towards `keep`, and is not deleted")
                continue
            if stays:
                kept, finite = kept + 1, finite or is_finite(commit)
            elif key != made and not commit.summary.get("milestone"):
                surplus.append((key, commit))
        surplus.reverse()
        for key, commit in () if dry_run else surplus:
            self._delete(key, commit)
        return [key for key, _ in surplus]

    def _delete(self, key: CommitKey, commit: Commit) -> None:
        self.store.delete([key.key])
        try:
            if not self._is_named(commit.attempt):
                self.delete_attempt(commit.attempt)
        except CheckpointError as error:
            if isinstance(error, StoreError) and not isinstance(error, NotAnObjectError):
                raise  # the store does not answer: `collect` deletes the data later
            self._warn(commit.attempt, str(error))

    def _warn(self, key: str, reason: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            log.warning("Retention passed over %s in %s: %s", key, self.store.url, reason)

    def _is_named(self, attempt: str) -> bool:
        """Whether a record names this attempt, or an unreadable record may name it."""
        step = _step_of(attempt)
        for key in self.ledger.newest_first():
            try:
                if key.step == step and self.ledger.read(key).attempt == attempt:
                    return True
            except DamagedError:
                if self.store.size_bytes(key.key) is not None:
                    return True
        return False

    def delete_attempt(self, attempt: str) -> int:
        """Deletes the data of an attempt without a commit; returns the bytes freed.

        Raises:
            CheckpointError: this is not the name of an attempt.
        """
        _step_of(attempt)
        entries = list(self.store.scan(f"{attempt}/"))
        self.store.delete([entry.key for entry in entries])
        return sum(entry.size_bytes for entry in entries)

    def stale_attempts(self, older_than_s: float, *, own: bool = False) -> dict[str, int]:
        """Attempts without a commit that have not grown for `older_than_s`, with their bytes.

        All attempts of a step are left out if one of the step's commit records cannot be read. So is data that is newer
        than the lease of a running owner, unless `own` says that the caller is the owner.
        """
        limit_s = self.store.now_s() - older_than_s
        since_s = None if own else Owners(self.store).living_since_s()
        attempts: dict[str, list[float]] = {}
        for entry in self.store.scan("steps/"):  # before the records: an attempt may be committed now
            attempt = "/".join(entry.key.split("/")[:3])
            if not ATTEMPT.fullmatch(attempt) or attempt == entry.key:
                self._warn(entry.key, "its name is not that of a checkpoint's data; delete it by hand")
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
        """Deletes stale attempts; returns them with the bytes freed."""
        stale = self.stale_attempts(older_than_s, own=own)
        return {attempt: self.delete_attempt(attempt) for attempt in stale if not self._is_named(attempt)}


def _step_of(attempt: str) -> int:
    match = ATTEMPT.fullmatch(attempt)
    if match is None:
        raise CheckpointError(f"{attempt!r} is not the name of an attempt at a checkpoint; nothing of it was deleted")
    return int(match[1])
