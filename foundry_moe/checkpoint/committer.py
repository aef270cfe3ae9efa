"""What one process, rank 0, does around the saves of one folder: claims it, names attempts, commits, tidies up.

It knows neither what is saved nor how ranks talk.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from foundry_moe.checkpoint import fault_injection
from foundry_moe.checkpoint.errors import CheckpointError
from foundry_moe.checkpoint.ledger import Ledger, new_attempt
from foundry_moe.checkpoint.manifest import Manifest
from foundry_moe.checkpoint.owners import Claim, Identity, Owners
from foundry_moe.checkpoint.records import Commit, CommitKey, file_hash
from foundry_moe.checkpoint.retention import Retention

log = logging.getLogger(__name__)

STALE_S = 6 * 3600.0  # an uncommitted attempt to which nothing was added for so long belongs to no living run


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One try at a checkpoint. The manifest says `info`, the record `summary`."""

    name: str
    where: CommitKey
    info: Mapping[str, Any]
    summary: Mapping[str, Any]
    forked_from: int | None


class Committer:
    """Saves of one folder, one at a time."""

    def __init__(self, ledger: Ledger, *, keep: int | None, stale_s: float = STALE_S) -> None:
        self.ledger, self.keep, self.stale_s = ledger, keep, stale_s
        self.retention, self.owners = Retention(ledger), Owners(ledger.store)
        self.claimed: Claim | None = None
        self.attempt: Attempt | None = None  # that is under way
        self._recording = False  # from here on its commit may exist
        self._made: Commit | None = None
        self._collected_s: float | None = None

    def claim(self, identity: Identity, life: str = "") -> Claim:
        """Makes the folder this process's; see `Owners.claim`.

        Raises:
            OwnedError: the folder is another run's.
            TakenOverError: it was this life's, and is another's by now.
        """
        self.claimed = self.owners.claim(identity, has_commits=lambda: bool(self.ledger.newest_first()), life=life)
        return self.claimed

    def check_owner(self) -> None:
        """Raises TakenOverError if the folder is another process's by now."""
        if self.claimed is not None:
            self.owners.check(self.claimed)
            self.owners.beat(self.claimed)

    def begin(
        self,
        where: CommitKey,
        *,
        info: Mapping[str, Any],
        summary: Mapping[str, Any] | None = None,
        forked_from: int | None = None,
    ) -> Attempt:
        """Names one attempt at a checkpoint.

        Args:
            info: what the manifest and the record say of the writer: world size, mesh, versions.
            summary: what the record says besides.
        """
        self.check_owner()
        name = new_attempt(where.step)
        saved = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self._recording, self._made = False, None
        self.attempt = Attempt(
            name=name,
            where=where,
            info={**info, "step": where.step, "attempt": name},
            summary={**(summary or {}), "saved": saved, **info},
            forked_from=forked_from,
        )
        return self.attempt

    def commit(self, manifest: Manifest, *, finite: bool | None = None) -> Commit:
        """Makes the attempt that was begun a checkpoint; `manifest` has its `info`.

        Raises:
            CheckpointError: data is missing, or another writer was first: then nothing was committed.
            TakenOverError: the folder is another process's.
        """
        attempt = self.attempt
        assert attempt is not None and manifest.info["attempt"] == attempt.name
        problems = self.ledger.size_problems(attempt.name, manifest.objects)
        if problems:
            raise CheckpointError(
                f"step {attempt.where.step} was not committed: {'; '.join(problems)}; older checkpoints are kept"
            )
        fault_injection.point("commit.sizes_checked")
        raw = manifest.to_bytes()
        self.ledger.store.put(f"{attempt.name}/MANIFEST", raw)
        fault_injection.point("commit.manifest_written")
        commit = Commit(
            where=attempt.where,
            attempt=attempt.name,
            nonce=secrets.token_hex(8),
            manifest_bytes=len(raw),
            manifest_hash=file_hash(raw),
            forked_from=attempt.forked_from,
            summary={
                **attempt.summary,
                "bytes": manifest.size_bytes,
                "objects": len(manifest.objects),
                "tensors": len(manifest.tensors),
                **({} if finite is None else {"finite": finite}),
            },
        )
        self.check_owner()
        self._recording = True
        self.ledger.record(commit)
        fault_injection.point("commit.recorded")
        self.ledger.confirm(commit, manifest.objects)
        fault_injection.point("commit.confirmed")
        self._made = commit
        return commit

    def tidy(self) -> None:
        """Retention after a commit; after a failure the attempt goes, unless its commit may exist after all."""
        try:
            if self._made is not None:
                self.check_owner()
                if self.keep is not None:
                    self.retention.retain(self.keep, made=self._made.where)
                self._collect()
            elif self.attempt is not None and not self._recording:
                self.retention.delete_attempt(self.attempt.name)
        except Exception as error:  # else this rank would have no report, and count failures otherwise than the others
            log.warning("Old checkpoints were not cleaned up, the new ones are safe: %s", error)
        self.attempt = self._made = None

    def _collect(self) -> None:
        now = time.monotonic()
        if self._collected_s is None or now - self._collected_s > self.stale_s:
            self._collected_s = now
            gone = self.retention.collect(self.stale_s, own=self.claimed is not None)
            if gone:
                log.info("Removed %d unfinished attempts at checkpoints, %d bytes.", len(gone), sum(gone.values()))
