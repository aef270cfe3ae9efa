"""The ledger of commits in a store: list, read, check, record, retain, collect. One process at a time writes it.

What is not committed does not exist. The order of every change keeps that true at each instant: data, manifest,
record when a checkpoint appears; record, then data when one goes.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from foundry_moe.checkpoint import faults
from foundry_moe.checkpoint.errors import CheckpointError, DamagedError, NotFoundError, ResumeError, StoreError
from foundry_moe.checkpoint.manifest import Commit, CommitKey, Manifest, file_hash
from foundry_moe.checkpoint.store import Store

HOLD_S = 24 * 3600.0  # a reader that died is forgotten after this


def new_attempt(step: int) -> str:
    """The folder for one try at saving `step`. Only the coordinator makes one, so that attempts never mix."""
    return f"steps/{step:012d}/{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{secrets.token_hex(4)}"


@dataclass(frozen=True, kw_only=True)
class Found:
    """A commit that was looked at, with its manifest."""

    commit: Commit
    manifest: Manifest
    manifest_raw: bytes


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Where a run goes on, and under which generation it will commit."""

    found: Found | None
    generation: int
    forked_from: int | None
    rejected: list[str] = field(default_factory=list)  # one sentence for each commit that was passed over


class Ledger:
    """The commits of one folder."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def newest_first(self) -> list[CommitKey]:
        """All commits, newest first."""
        parsed = (CommitKey.parse(entry.key) for entry in self.store.scan("commits/"))
        return sorted((key for key in parsed if key is not None), reverse=True)

    def read(self, key: CommitKey) -> Commit:
        """A commit record. Raises DamagedError if it is gone or torn."""
        try:
            return Commit.from_bytes(self.store.get(key.key), key.key)
        except NotFoundError as error:
            raise DamagedError(f"{key.key}: the commit record is gone") from error

    def open(self, key: CommitKey) -> Found:
        """Reads a commit and its manifest and looks at the objects' sizes.

        Raises:
            DamagedError: something is missing, short, or has another hash. Data blocks are not read here.
        """
        commit = self.read(key)
        name = f"{commit.attempt}/MANIFEST"
        raw = b""
        for _ in range(3):  # a byte may have been turned on its way
            try:
                raw = self.store.get(name)
            except NotFoundError as error:
                raise DamagedError(f"{key.key}: {name} is missing") from error
            if len(raw) == commit.manifest_bytes and file_hash(raw) == commit.manifest_hash:
                break
        else:
            raise DamagedError(
                f"{key.key}: {name} has {len(raw)} bytes and hash {file_hash(raw)}, "
                f"not {commit.manifest_bytes} and {commit.manifest_hash}"
            )
        manifest = Manifest.from_bytes(raw)
        if manifest.info.get("attempt") != commit.attempt:
            raise DamagedError(f"{key.key}: {name} is that of attempt {manifest.info.get('attempt')}")
        problems = self.size_problems(commit.attempt, manifest.objects)
        if problems:
            raise DamagedError(f"{key.key}: {'; '.join(problems)}")
        return Found(commit=commit, manifest=manifest, manifest_raw=raw)

    def size_problems(self, attempt: str, objects: Iterable[tuple[str, int]]) -> list[str]:
        """A sentence for each of the first few data objects that is missing or has another size."""
        there = {entry.key: entry.size_bytes for entry in self.store.scan(f"{attempt}/data/")}
        problems = []
        for key, size in objects:
            found = there.get(f"{attempt}/{key}")
            if found is None:
                problems.append(f"{attempt}/{key} is missing")
            elif found != size:
                problems.append(f"{attempt}/{key} has {found} bytes, not {size}")
        return problems[:4] + ([f"and {len(problems) - 4} more"] if len(problems) > 4 else [])

    def record(self, commit: Commit) -> None:
        """Makes a checkpoint exist.

        Raises:
            CheckpointError: another writer committed this step; what it wrote is kept.
        """
        if self.store.put_new(commit.where.key, commit.to_bytes()):
            return
        try:
            other = self.read(commit.where)
        except DamagedError as error:
            raise CheckpointError(f"{error}; this attempt at step {commit.step} is dropped") from error
        if other.nonce != commit.nonce:  # equal: our write won and its answer was lost
            raise CheckpointError(
                f"step {commit.step} was committed to {self.store.url} by another run (attempt {other.attempt}); "
                "this attempt is dropped and that one kept: give each run a folder of its own"
            )

    def choose(self, resume: str | int, *, skip: Iterable[CommitKey] = ()) -> Choice:
        """Picks the commit to go on from; see `CheckpointConfig.resume`.

        Args:
            skip: commits that turned out damaged when their data was read.

        Raises:
            DamagedError: there are commits, and none can be used.
            ResumeError: the step asked for is not there, or `never` meets commits.
        """
        skip, keys = set(skip), self.newest_first()
        newest = keys[0].generation if keys else 0
        if resume == "never":
            if keys:
                raise ResumeError(
                    f"{self.store.url} holds {len(keys)} checkpoints up to step {keys[0].step}, and resume is never: "
                    "give the new run an empty folder, or set resume: auto"
                )
            return Choice(found=None, generation=0, forked_from=None)
        forked_from, candidates = None, keys
        if isinstance(resume, int):
            forked_from = resume
            candidates = [key for key in keys if key.step == resume]
            if keys and keys[0] not in candidates and self._forked_from(keys[0]) == resume:
                candidates = [key for key in keys if key.generation == newest] + candidates
            if not candidates:
                have = ", ".join(str(step) for step in sorted({key.step for key in keys})) or "none"
                raise ResumeError(f"{self.store.url} holds no checkpoint of step {resume}; it holds: {have}")
        rejected = []
        for key in candidates:
            if key in skip:
                rejected.append(f"{key.key} is damaged")
                continue
            try:
                found = self.open(key)
            except DamagedError as error:
                rejected.append(str(error))
                continue
            fresh = key != keys[0]
            return Choice(
                found=found,
                generation=newest + 1 if fresh else newest,
                forked_from=found.commit.forked_from if forked_from is None else forked_from,
                rejected=rejected,
            )
        if rejected:
            raise DamagedError(
                f"no checkpoint in {self.store.url} can be used: {'; '.join(rejected)}. Nothing was deleted; "
                "mend or remove them, or give the run another folder"
            )
        return Choice(found=None, generation=newest, forked_from=None)

    def _forked_from(self, key: CommitKey) -> int | None:
        try:
            return self.read(key).forked_from
        except DamagedError:
            return None

    @contextlib.contextmanager
    def hold(self, commit: Commit) -> Iterator[None]:
        """Keeps retention, of whatever process, from touching a commit that is being read."""
        key = f"holds/{commit.where.generation:06d}-{commit.step:012d}-{secrets.token_hex(4)}"
        held = True
        try:
            self.store.put(key, json.dumps({"commit": commit.where.key}).encode())
        except StoreError:
            held = False  # a reader without the right to write reads all the same
        try:
            yield
        finally:
            if held:
                with contextlib.suppress(StoreError):
                    self.store.delete([key])

    def _held(self) -> set[CommitKey]:
        limit_s = None
        held = set()
        for entry in self.store.scan("holds/"):
            limit_s = self.store.now_s() - HOLD_S if limit_s is None else limit_s
            generation, _, rest = entry.key.removeprefix("holds/").partition("-")
            step = rest.partition("-")[0]
            if entry.modified_s > limit_s and generation.isdigit() and step.isdigit():
                held.add(CommitKey(generation=int(generation), step=int(step)))
        return held

    def retain(self, keep: int) -> list[CommitKey]:
        """Deletes all but the newest `keep` commits, milestones, and those being read; returns what went."""
        assert keep >= 1
        keys, gone = self.newest_first(), []
        surplus = keys[keep:]
        if not surplus:
            return []
        held = self._held()
        for key in reversed(surplus):
            if key in held:
                continue
            try:
                commit = self.read(key)
            except DamagedError:
                continue  # a person may still want to look
            if commit.summary.get("milestone"):
                continue
            self.store.delete([key.key])
            faults.point("retention.record_deleted")
            self.delete_attempt(commit.attempt)
            faults.point("retention.data_deleted")
            gone.append(key)
        return gone

    def delete_attempt(self, attempt: str) -> int:
        """Deletes an attempt's data, which no commit names; returns the bytes freed."""
        entries = list(self.store.scan(f"{attempt}/"))
        self.store.delete([entry.key for entry in entries])
        return sum(entry.size_bytes for entry in entries)

    def stale_attempts(self, older_than_s: float) -> dict[str, int]:
        """Attempts that no commit names and that nothing was added to for `older_than_s`, with their bytes.

        A step whose commit record cannot be read is left alone, whichever attempt it meant.
        """
        limit_s = self.store.now_s() - older_than_s
        attempts: dict[str, list[float]] = {}
        for entry in self.store.scan("steps/"):  # before the records: an attempt committed meanwhile is seen as such
            attempt = "/".join(entry.key.split("/")[:3])
            sums = attempts.setdefault(attempt, [0.0, 0.0])
            sums[0] = max(sums[0], entry.modified_s)
            sums[1] += entry.size_bytes
        named, unclear = set(), set()
        for key in self.newest_first():
            try:
                named.add(self.read(key).attempt)
            except DamagedError:
                unclear.add(f"{key.step:012d}")
        return {
            attempt: int(size)
            for attempt, (modified_s, size) in attempts.items()
            if attempt not in named and attempt.split("/")[1] not in unclear and modified_s <= limit_s
        }

    def collect(self, older_than_s: float) -> tuple[int, int]:
        """Deletes stale attempts and unfinished uploads; returns (attempts, bytes)."""
        stale = self.stale_attempts(older_than_s)
        freed = sum(self.delete_attempt(attempt) for attempt in stale)
        self.store.discard_unfinished("steps/", older_than_s=older_than_s)
        return len(stale), freed
