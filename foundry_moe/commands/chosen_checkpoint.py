"""The checkpoint that a command reads: of a step, or the newest whose data is good."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TypeVar

from foundry_moe.checkpoint.errors import DamagedError, NotFoundError
from foundry_moe.checkpoint.ledger import Found, Ledger
from foundry_moe.checkpoint.records import CommitKey

T = TypeVar("T")


def with_checkpoint(ledger: Ledger, step: int | None, use: Callable[[Found], T]) -> T:
    """What `use` gives, which reads the commit while retention leaves it alone.

    Args:
        step: None = the newest that is good. One whose data turns out damaged in `use` is passed over, and `use` is
            called with the one before.

    Raises:
        CheckpointError: there is none, or none can be used; for a step that is damaged the others are named.
    """
    damaged: list[CommitKey] = []
    told: set[str] = set()
    while True:
        choice = ledger.choose("auto" if step is None else step, skip=damaged)
        for sentence in choice.rejected:
            if sentence not in told and not any(sentence.startswith(key.key) for key in damaged):
                print(f"passed over: {sentence}", file=sys.stderr)
            told.add(sentence)
        if choice.found is None:
            raise NotFoundError(f"{ledger.store.url} holds no checkpoint")
        commit = choice.found.commit
        try:
            with ledger.hold(commit):
                return use(choice.found)
        except DamagedError as error:
            if step is not None:
                others = sorted({key.step for key in ledger.newest_first()} - {step})
                there = f"; other steps: {', '.join(map(str, others))}" if others else ""
                raise DamagedError(f"step {step} is damaged: {error}{there}") from error
            damaged.append(commit.where)
            print(f"step {commit.step} is damaged, trying the one before: {error}", file=sys.stderr)
