"""The ledger of commits in a store: list, read, check, record, choose. One process at a time writes it.

What is not committed does not exist. The order of every change keeps that true at each instant: data, manifest,
record when a checkpoint appears; record, then data when one goes (`retention`).
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from foundry_moe.checkpoint.errors import CheckpointError, DamagedError, NotAnObjectError, NotFoundError, ResumeError
from foundry_moe.checkpoint.manifest import Manifest
from foundry_moe.checkpoint.records import RECORD_BYTES, Commit, CommitKey, file_hash
from foundry_moe.checkpoint.store import Store

_damaged: defaultdict[str, set[CommitKey]] = defaultdict(set)  # by store: see `Ledger.damaged`


def new_attempt(step: int) -> str:
    """The folder for one try at saving `step`. Only the coordinator makes one, so that attempts never mix."""
    return f"steps/{step:012d}/{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{secrets.token_hex(4)}"


@dataclass(frozen=True, kw_only=True)
class Found:
    """A commit that was looked at, with its manifest."""

    commit: Commit
    manifest: Manifest


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Where a run goes on, and under which generation it will commit."""

    found: Found | None
    generation: int
    forked_from: int | None
    rejected: list[str] = field(default_factory=list)  # one sentence for each commit that was passed over


def is_finite(commit: Commit) -> bool:
    """Whether a run can go on from it; older records do not say, and are taken to be."""
    return commit.summary.get("finite") is not False


def _next_generation(keys: Iterable[CommitKey], newest: CommitKey, found: CommitKey) -> int:
    """The generation of a run that goes on from `found`: a new one where history forks, and one in which no object
    stands, whatever it holds, so that no name that the run will want is taken."""
    taken = {key.generation for key in keys if key > found}
    generation = newest.generation + (newest != found)
    while generation in taken:
        generation += 1
    return CommitKey(generation=generation, step=found.step).generation  # raises where numbers end


def listed_steps(keys: Iterable[CommitKey]) -> str:
    """The steps of some commits for a sentence, each once; empty for none."""
    return ", ".join(str(step) for step in sorted({key.step for key in keys}))


class Ledger:
    """The commits of one folder."""

    def __init__(self, store: Store) -> None:
        self.store = store

    @property
    def damaged(self) -> set[CommitKey]:
        """Commits whose data turned out damaged when this process read it, through whichever object.

        They are not opened again, so that no load takes one and no retention counts one as kept: record, manifest and
        sizes do not show such damage, and reading all data before each deletion would take too long.
        """
        return _damaged[self.store.url]

    def newest_first(self) -> list[CommitKey]:
        """All commits, newest first."""
        parsed = (CommitKey.parse(entry.key) for entry in self.store.scan("commits/"))
        return sorted((key for key in parsed if key is not None), reverse=True)

    def newest(self, keys: Iterable[CommitKey]) -> Commit | None:
        """The first of some commits whose record can be read. A name without a valid record counts for nothing: else
        one object with a large number in its name would make all later commits older than itself."""
        for key in keys:
            with contextlib.suppress(DamagedError):
                return self.read(key)
        return None

    def read(self, key: CommitKey) -> Commit:
        """A commit record. Raises DamagedError if it is gone or torn."""
        try:
            return Commit.from_bytes(self.store.get(key.key, RECORD_BYTES), key.key)
        except NotAnObjectError as error:
            raise DamagedError(f"{key.key}: {error}") from error
        except NotFoundError as error:
            raise DamagedError(f"{key.key}: the commit record is gone") from error

    def open(self, key: CommitKey) -> Found:
        """Reads a commit and its manifest and looks at the objects' sizes.

        Raises:
            DamagedError: something is missing, short, or has another hash. Data blocks are not read here; one of
                `damaged` is refused.
        """
        if key in self.damaged:
            raise DamagedError(f"{key.key}: its data is damaged")
        try:
            return self._open(key, self.read(key))
        except NotAnObjectError as error:
            raise DamagedError(f"{key.key}: {error}") from error

    def _open(self, key: CommitKey, commit: Commit) -> Found:
        name = f"{commit.attempt}/MANIFEST"
        raw = b""
        for _ in range(3):  # a byte may have been turned on its way
            try:
                raw = self.store.get(name, commit.manifest_bytes)
            except NotFoundError as error:
                if isinstance(error, NotAnObjectError):
                    raise
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
        return Found(commit=commit, manifest=manifest)

    def size_problems(self, attempt: str, objects: Iterable[tuple[str, int]]) -> list[str]:
        """A sentence for each of the first few objects of an attempt that is missing or has another size."""
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

    def choose(self, resume: str | int) -> Choice:
        """Picks the commit to go on from; see `CheckpointConfig.resume`.

        Raises:
            DamagedError: there are commits, and none can be used.
            ResumeError: the step asked for is not there, or `never` meets commits.
        """
        keys = self.newest_first()
        newest = self.newest(keys)
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
            if newest is not None and newest.where not in candidates and newest.forked_from == resume:
                candidates = [key for key in keys if key.generation == newest.where.generation] + candidates
            if not candidates:
                have = f"it holds: {listed_steps(keys) or 'none'}"
                raise ResumeError(f"{self.store.url} holds no checkpoint of step {resume}; {have}")
        try:  # a step that the user names is theirs to look at
            found, rejected = self.first_good(candidates, finite=resume == "auto")
        except DamagedError as error:
            tried = {key.step for key in candidates}
            others = listed_steps(key for key in keys if key.step not in tried)
            if not others:
                raise
            raise DamagedError(f"{error}. It holds other steps: {others}") from error
        if found is None:
            return Choice(found=None, generation=0, forked_from=None)
        assert newest is not None  # the record of `found` can be read
        return Choice(
            found=found,
            generation=_next_generation(keys, newest.where, found.commit.where),
            forked_from=found.commit.forked_from if forked_from is None else forked_from,
            rejected=rejected,
        )

    def first_good(self, candidates: Iterable[CommitKey], *, finite: bool = False) -> tuple[Found | None, list[str]]:
        """The first of some commits that can be used, None if there are none; and why those before it cannot.

        Args:
            finite: pass over those whose weights are not.

        Raises:
            DamagedError: there are commits, and none can be used.
        """
        rejected: list[str] = []
        for key in candidates:
            try:
                found = self.open(key)
            except DamagedError as error:
                rejected.append(str(error))
                continue
            if finite and not is_finite(found.commit):
                rejected.append(f"{key.key}: its weights are not finite")
                continue
            return found, rejected
        if rejected:
            raise DamagedError(
                f"no checkpoint in {self.store.url} can be used: {'; '.join(rejected)}. Nothing was deleted; "
                "repair or delete these objects, or give the run another folder"
            )
        return None, rejected
