"""The commits of a folder: list, read, check, record, choose. One process at a time writes.

A checkpoint exists only while its record does. Writes are ordered accordingly: data, manifest, record when a checkpoint
is created; record, then data when it is deleted (`committer.Retention`).
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from foundry_moe.checkpoint.errors import CheckpointError, DamagedError, NotAnObjectError, NotFoundError, ResumeError
from foundry_moe.checkpoint.manifest import Manifest
from foundry_moe.checkpoint.records import RECORD_BYTES, Commit, CommitKey, file_hash
from foundry_moe.checkpoint.store import Store

_damaged: defaultdict[str, set[CommitKey]] = defaultdict(set)  # by store: see `Ledger.damaged`


@dataclass(frozen=True, kw_only=True)
class Found:
    """A commit with its manifest."""

    commit: Commit
    manifest: Manifest


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The commit from which a run resumes, and the generation of its next commits."""

    found: Found | None
    generation: int
    forked_from: int | None
    rejected: list[str] = field(default_factory=list)  # one sentence for each commit that cannot be used


def is_finite(commit: Commit) -> bool:
    """Whether the weights are finite; True for older records, which do not say."""
    return commit.summary.get("finite") is not False


def listed_steps(keys: Iterable[CommitKey]) -> str:
    """The distinct steps of some commits as text; empty for none."""
    return ", ".join(str(step) for step in sorted({key.step for key in keys}))


class Ledger:
    """The commits of one folder."""

    def __init__(self, store: Store) -> None:
        self.store = store

    @property
    def damaged(self) -> set[CommitKey]:
        """Commits whose data this process has found damaged, shared by all ledgers of the folder.

        Record, manifest and sizes do not show such damage, and reading all data before each deletion would take too
        long. `open` refuses these commits, so that no load uses one and no retention counts one as kept.
        """
        return _damaged[self.store.url]

    def newest_first(self) -> list[CommitKey]:
        parsed = (CommitKey.parse(entry.key) for entry in self.store.scan("commits/"))
        return sorted((key for key in parsed if key is not None), reverse=True)

    def newest(self, keys: Iterable[CommitKey]) -> Commit | None:
        """The first of some commits whose record can be read. Names without a valid record do not count: otherwise one
        object with a large number in its name would make all later commits older than itself."""
        for key in keys:
            with contextlib.suppress(DamagedError):
                return self.read(key)
        return None

    def read(self, key: CommitKey) -> Commit:
        """Reads a commit record. Raises DamagedError if it is missing or damaged."""
        try:
            return Commit.from_bytes(self.store.get(key.key, RECORD_BYTES), key.key)
        except NotFoundError as error:
            reason = error if isinstance(error, NotAnObjectError) else "the commit record is gone"
            raise DamagedError(f"{key.key}: {reason}") from error

    def open(self, key: CommitKey) -> Found:
        """Reads a commit and its manifest, and checks the sizes of its objects. Does not read data blocks.

        Raises:
            DamagedError: an object is missing, or has another size or hash; or the commit is one of `damaged`.
        """
        if key in self.damaged:
            raise DamagedError(f"{key.key}: its data is damaged")
        commit = self.read(key)
        name = f"{commit.attempt}/MANIFEST"
        try:
            for _ in range(3):  # a byte may have been corrupted in transit
                raw = self.store.get(name, commit.manifest_bytes)
                if len(raw) == commit.manifest_bytes and file_hash(raw) == commit.manifest_hash:
                    break
            else:
                raise DamagedError(
                    f"{key.key}: {name} has {len(raw)} bytes and hash {file_hash(raw)}, "
                    f"not {commit.manifest_bytes} and {commit.manifest_hash}"
                )
            manifest = Manifest.from_bytes(raw)
            if manifest.info.get("attempt") != commit.attempt:
                raise DamagedError(f"{key.key}: {name} belongs to attempt {manifest.info.get('attempt')}")
            problems = self.size_problems(commit.attempt, manifest.objects)
        except NotFoundError as error:
            reason = error if isinstance(error, NotAnObjectError) else f"{name} is missing"
            raise DamagedError(f"{key.key}: {reason}") from error
        if problems:
            raise DamagedError(f"{key.key}: {'; '.join(problems)}")
        return Found(commit=commit, manifest=manifest)

    def size_problems(self, attempt: str, objects: Iterable[tuple[str, int]]) -> list[str]:
        """One sentence for each of the first few objects that are missing or have another size."""
        there = {entry.key: entry.size_bytes for entry in self.store.scan(f"{attempt}/")}
        problems = []
        for key, size in objects:
            found = there.get(f"{attempt}/{key}")
            if found is None:
                problems.append(f"{attempt}/{key} is missing")
            elif found != size:
                problems.append(f"{attempt}/{key} has {found} bytes, not {size}")
        return problems[:4] + ([f"and {len(problems) - 4} more"] if len(problems) > 4 else [])

    def record(self, commit: Commit) -> None:
        """Writes the record, which makes the checkpoint exist.

        Raises:
            CheckpointError: another writer committed this step; its commit is kept.
        """
        if self.store.put_new(commit.where.key, commit.to_bytes()):
            return
        try:
            other = self.read(commit.where)
        except DamagedError as error:
            raise CheckpointError(f"{error}; this attempt at step {commit.step} is dropped") from error
        if other.nonce != commit.nonce:  # equal: our write succeeded and its response was lost
            raise CheckpointError(
                f"step {commit.step} was committed to {self.store.url} by another run (attempt {other.attempt}); "
                "this attempt is dropped and that one is kept: give each run a folder of its own"
            )

    def choose(self, resume: str | int) -> Choice:
        """Chooses the commit to resume from; see `CheckpointConfig.resume`.

        Raises:
            DamagedError: there are commits, and none can be used.
            ResumeError: there is no commit of the given step, or there are commits and `resume` is `never`.
        """
        keys = self.newest_first()
        newest = self.newest(keys)
        forked_from, candidates = None, keys
        if resume == "never" and keys:
            raise ResumeError(
                f"{self.store.url} holds {len(keys)} checkpoints up to step {keys[0].step}, and resume is never: "
                "give the new run an empty folder, or set resume: auto"
            )
        if isinstance(resume, int):
            forked_from = resume
            candidates = [key for key in keys if key.step == resume]
            if newest is not None and newest.where not in candidates and newest.forked_from == resume:
                candidates = [key for key in keys if key.generation == newest.where.generation] + candidates
            if not candidates:
                have = f"it holds: {listed_steps(keys) or 'none'}"
                raise ResumeError(f"{self.store.url} holds no checkpoint of step {resume}; {have}")
        if not candidates:
            return Choice(found=None, generation=0, forked_from=None)
        try:  # for a step that the user names, weights need not be finite
            found, rejected = self.first_good(candidates, finite=resume == "auto")
        except DamagedError as error:
            tried = {key.step for key in candidates}
            others = listed_steps(key for key in keys if key.step not in tried)
            if not others:
                raise
            raise DamagedError(f"{error}. It holds other steps: {others}") from error
        return Choice(
            found=found,
            generation=self.next_generation(keys, found.commit.where),
            forked_from=found.commit.forked_from if forked_from is None else forked_from,
            rejected=rejected,
        )

    def next_generation(self, keys: Iterable[CommitKey], found: CommitKey | None) -> int:
        """The generation of the next commits of a run that resumed from `found`, or from none.

        A new one if history forks, and one without any later commit, so that none of the run's names is taken.

        Args:
            keys: all commits, newest first.
        """
        newest = self.newest(keys)
        taken = {key.generation for key in keys if found is None or key > found}
        generation = 0 if newest is None else newest.where.generation + (newest.where != found)
        while generation in taken:
            generation += 1
        return CommitKey(generation=generation, step=0).generation  # raises if it is too large

    def first_good(self, candidates: Iterable[CommitKey], *, finite: bool = False) -> tuple[Found, list[str]]:
        """The first usable one of some commits, and one sentence for each before it that cannot be used.

        Args:
            finite: pass over commits whose weights are not finite.

        Raises:
            DamagedError: none can be used.
        """
        rejected: list[str] = []
        for key in candidates:
            try:
                found = self.open(key)
            except DamagedError as error:
                rejected.append(str(error))
                continue
            if not finite or is_finite(found.commit):
                return found, rejected
            rejected.append(f"{key.key}: its weights are not finite")
        raise DamagedError(
            f"no checkpoint in {self.store.url} can be used: {'; '.join(rejected)}. Nothing was deleted; "
            "repair or delete these objects, or give the run another folder"
        )
