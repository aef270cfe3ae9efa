"""Rank 0's part of a save: lease the folder, name the attempt, commit it, delete old commits.

Independent of what is saved and of communication between ranks.
"""

from __future__ import annotations

import dataclasses
import logging
import secrets
import time
from collections.abc import Mapping
from typing import Any

from foundry_moe.checkpoint.errors import CheckpointError
from foundry_moe.checkpoint.ledger import Ledger, new_attempt
from foundry_moe.checkpoint.manifest import Manifest
from foundry_moe.checkpoint.owners import Identity, Lease, Owners
from foundry_moe.checkpoint.records import Commit, CommitKey, file_hash
from foundry_moe.checkpoint.retention import Retention

log = logging.getLogger(__name__)

STALE_S = 6 * 3600.0  # an uncommitted attempt that did not grow for so long is taken to be abandoned


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
        self._collected_s: float | None = None

    def acquire(self, identity: Identity, process_id: str = "") -> Lease:
        """Leases the folder; see `Owners.acquire`.

        Raises:
            OwnedError: the folder belongs to another run.
            TakenOverError: this process owned it, and another one owns it by now.
        """
        self.lease = self.owners.acquire(
            identity, has_commits=lambda: bool(self.ledger.newest_first()), process_id=process_id
        )
        return self.lease

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
        name = new_attempt(where.step)
        saved = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self._recording, self._made = False, None
        self.info = {**info, "step": where.step, "attempt": name}
        self.attempt = Commit(
            where=where,
            attempt=name,
            nonce=secrets.token_hex(8),
            forked_from=forked_from,
            summary={**(summary or {}), "saved": saved, **info},
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
        counts = {
            "bytes": manifest.size_bytes,
            "objects": len(manifest.objects),
            "tensors": len(manifest.tensors),
            **({} if finite is None else {"finite": finite}),
        }
        commit = dataclasses.replace(
            self.attempt,
            manifest_bytes=len(raw),
            manifest_hash=file_hash(raw),
            summary={**self.attempt.summary, **counts},
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

    def clean_up(self) -> None:
        """Applies retention after a commit. After a failure, deletes the attempt unless its commit may exist."""
        try:
            if self._made is not None:
                self.check_owner()
                if self.keep is not None:
                    self.retention.retain(self.keep, made=self._made.where)
                self._collect()
            elif self.attempt is not None and not self._recording:
                self.retention.delete_attempt(self.attempt.attempt)
        except Exception as error:  # rank 0 must report the save like the other ranks, or failure counts diverge
            log.warning("Old checkpoints were not deleted, the new ones are safe: %s", error)
        self.attempt = self._made = None

    def _collect(self) -> None:
        now = time.monotonic()
        if self._collected_s is None or now - self._collected_s > self.stale_s:
            self._collected_s = now
            gone = self.retention.collect(self.stale_s, own=self.lease is not None)
            if gone:
                log.info("Removed %d unfinished attempts at checkpoints, %d bytes.", len(gone), sum(gone.values()))
