"""Rank 0's part of a save: lease the folder, name the attempt, commit it, delete old commits and abandoned attempts.

Independent of what is saved and of communication between ranks.
"""

from __future__ import annotations

import dataclasses
import logging
import secrets
import time
from collections.abc import Mapping
from typing import Any

from foundry_moe.checkpoint.errors import CheckpointError, DamagedError, NotAnObjectError, StoreError
from foundry_moe.checkpoint.ledger import Ledger, is_finite
from foundry_moe.checkpoint.manifest import Manifest
from foundry_moe.checkpoint.owners import Identity, Lease, Owners
from foundry_moe.checkpoint.records import ATTEMPT, Commit, CommitKey, file_hash

log = logging.getLogger(__name__)

STALE_S = 6 * 3600.0  # an uncommitted attempt that did not grow for this long counts as abandoned


class Committer:
    """Saves of one folder, one at a time.

    attempt: the commit in progress; None between two saves.
    info: the `info` of its manifest.
    """

    def __init__(self, ledger: Ledger, *, keep: int | None, stale_s: float = STALE_S) -> None:
        self.ledger, self.keep, self.stale_s = ledger, keep, stale_s
        self.retention, self.owners = Retention(ledger), Owners(ledger.store)
        self.lease: Lease | None = None
        self.attempt: Commit | None = None
        self.info: Mapping[str, Any] = {}
        self._recording = False  # the commit may exist from here on
        self._made: Commit | None = None
        self._collected_s = float("-inf")

    def acquire(self, identity: Identity, process_id: str = "") -> Lease:
        """Leases the folder; see `Owners.acquire`."""
        self.lease = self.owners.acquire(identity, has_commits=self.has_commits, process_id=process_id)
        return self.lease

    def has_commits(self) -> bool:
        return bool(self.ledger.newest_first())

    def check_owner(self) -> None:
        """Raises TakenOverError if another process owns the folder by now."""
        if self.lease is not None:
            self.owners.check(self.lease)
            self.owners.beat(self.lease)

    def begin(
        self,
        where: CommitKey,
        *,
        info: Mapping[str, Any],
        summary: Mapping[str, Any] | None = None,
        forked_from: int | None = None,
    ) -> str:
        """Begins an attempt at a checkpoint and returns its name.

        Args:
            info: world size, mesh, versions; written to the manifest and to the record.
            summary: written to the record alone.
        """
        self.check_owner()
        now = time.gmtime()
        name = f"steps/{where.step:012d}/{time.strftime('%Y%m%dT%H%M%S', now)}-{secrets.token_hex(4)}"
        self._recording, self._made = False, None
        self.info = {**info, "step": where.step, "attempt": name}
        self.attempt = Commit(
            where=where,
            attempt=name,
            nonce=secrets.token_hex(8),
            forked_from=forked_from,
            summary={**(summary or {}), "saved": time.strftime("%Y-%m-%dT%H:%M:%SZ", now), **info},
        )
        return name

    def commit(self, manifest: Manifest, *, finite: bool | None = None) -> Commit:
        """Commits the attempt. `manifest` must have been built with `info`.

        Raises:
            CheckpointError: data is missing, or another writer committed this step; nothing was committed.
            TakenOverError: another process owns the folder.
        """
        assert self.attempt is not None and manifest.info["attempt"] == self.attempt.attempt
        self._check_objects(self.attempt, manifest.objects)
        raw = manifest.to_bytes()
        self.ledger.store.put(f"{self.attempt.attempt}/MANIFEST", raw)
        counts = {"bytes": manifest.size_bytes, "objects": len(manifest.objects), "tensors": len(manifest.tensors)}
        summary = {**self.attempt.summary, **counts, **({} if finite is None else {"finite": finite})}
        commit = dataclasses.replace(
            self.attempt, manifest_bytes=len(raw), manifest_hash=file_hash(raw), summary=summary
        )
        self.check_owner()
        self._recording = True
        self.ledger.record(commit)
        try:
            self._check_objects(commit, [*manifest.objects, ("MANIFEST", len(raw))])  # `gc` may have deleted some
        except CheckpointError:
            self.ledger.store.delete([commit.where.key])
            raise
        self._made = commit
        return commit

    def _check_objects(self, commit: Commit, objects: list[tuple[str, int]]) -> None:
        problems = self.ledger.size_problems(commit.attempt, objects)
        if problems:
            raise CheckpointError(
                f"step {commit.step} was not committed: {'; '.join(problems)}; older checkpoints are kept"
            )

    def make_room(self, needed_bytes: int) -> None:
        """Deletes what retention would delete after the next commit, if the store lacks room for it.

        Raises:
            StoreError: there is no room even then; nothing was written.
        """
        store = self.ledger.store
        free_bytes = store.free_bytes()
        if free_bytes is None or free_bytes >= needed_bytes:
            return
        self.check_owner()
        if self.keep is not None:
            self.retention.retain(max(self.keep - 1, 1))
        self.retention.collect(self.stale_s, own=self.lease is not None)
        free_bytes = store.free_bytes()
        if free_bytes is not None and free_bytes < needed_bytes:
            raise StoreError(
                f"the disk is full: a checkpoint needs {needed_bytes:,} bytes, and {store.url} has {free_bytes:,} "
                f"bytes free; free some space or lower `keep` ({self.keep})"
            )

    def retain(self, made: CommitKey) -> None:
        """Applies retention; a failure is a warning, because the checkpoints are safe. `made` is never deleted."""
        try:
            if self.keep is not None:
                self.retention.retain(self.keep, made=made)
        except Exception as error:
            log.warning("Old checkpoints were not deleted: %s", error)

    def clean_up(self) -> None:
        """Applies retention after a commit. After a failure, deletes the attempt unless its commit may exist."""
        try:
            if self._made is not None:
                self.check_owner()
                if self.keep is not None:
                    self.retention.retain(self.keep, made=self._made.where)
                now_s = time.monotonic()
                if now_s - self._collected_s > self.stale_s:
                    self._collected_s = now_s
                    gone = self.retention.collect(self.stale_s, own=self.lease is not None)
                    if gone:
                        log.info("Removed %d unfinished attempts, %d bytes.", len(gone), sum(gone.values()))
            elif self.attempt is not None and not self._recording:
                self.retention.delete_attempt(self.attempt.attempt)
        except Exception as error:  # rank 0 must report the save like the other ranks, or failure counts diverge
            log.warning("Old checkpoints were not deleted, the new ones are safe: %s", error)
        self.attempt = self._made = None


class Retention:
    """Deletes old commits of a folder, and attempts without a commit.

    Only objects of the named attempt are deleted, and none that another record names. The newest good commit and the
    one just made are always kept. A commit that was found good is not opened again.
    """

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
                if (stays and key not in self._good) or key in self.ledger.damaged:
                    self.ledger.open(key)
                    self._good.add(key)
            except DamagedError as error:
                self.ledger.damaged.add(key)  # it is not deleted later, when enough newer ones are kept
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
            if not self._is_named(commit.attempt, self.ledger.newest_first()):
                self.delete_attempt(commit.attempt)
        except CheckpointError as error:
            if isinstance(error, StoreError) and not isinstance(error, NotAnObjectError):
                raise  # the store does not answer: `collect` deletes the data later
            self._warn(commit.attempt, str(error))

    def _warn(self, key: str, reason: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            log.warning("Retention passed over %s in %s: %s", key, self.store.url, reason)

    def _is_named(self, attempt: str, keys: list[CommitKey]) -> bool:
        """Whether one of these records names this attempt, or an unreadable record may name it."""
        step = _step_of(attempt)
        for key in keys:
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

    def collect(self, older_than_s: float, *, own: bool = False, dry_run: bool = False) -> dict[str, int]:
        """Deletes attempts without a commit that have not grown for `older_than_s`; returns them with their bytes.

        All attempts of a step are kept if one of the step's commit records cannot be read. So is data that is newer
        than the lease of a running owner, unless `own` says that the caller is the owner.
        """
        limit_s = self.store.now_s() - older_than_s
        since_s = None if own else Owners(self.store).living_since_s()
        attempts: dict[str, list[float]] = {}
        for entry in self.store.scan("steps/"):
            attempt = "/".join(entry.key.split("/")[:3])
            if not ATTEMPT.fullmatch(attempt) or attempt == entry.key:
                self._warn(entry.key, "its name is not that of a checkpoint's data; delete it by hand")
                continue
            sums = attempts.setdefault(attempt, [0.0, 0.0])
            sums[0] = max(sums[0], entry.modified_s)
            sums[1] += entry.size_bytes
        stale: dict[str, int] = {}
        keys = self.ledger.newest_first()  # after the attempts: one may be committed now
        for attempt, (modified_s, size) in attempts.items():
            is_old = modified_s <= limit_s and (since_s is None or modified_s < since_s)
            if is_old and not self._is_named(attempt, keys) and not self._is_named(attempt, self.ledger.newest_first()):
                stale[attempt] = int(size) if dry_run else self.delete_attempt(attempt)
        return stale


def _step_of(attempt: str) -> int:
    match = ATTEMPT.fullmatch(attempt)
    if match is None:
        raise CheckpointError(f"{attempt!r} is not the name of an attempt at a checkpoint; nothing of it was deleted")
    return int(match[1])
