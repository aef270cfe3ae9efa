"""Which commit all ranks load, decided by rank 0, and which of several ranks' errors decides."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from foundry_moe.checkpoint import fault_injection
from foundry_moe.checkpoint.collective_errors import Ranks, RanksError
from foundry_moe.checkpoint.errors import DamagedError, MismatchError, StoreError
from foundry_moe.checkpoint.ledger import Choice, Found, Ledger
from foundry_moe.checkpoint.manifest import Commit, CommitKey, Manifest

log = logging.getLogger(__name__)


def choose(ranks: Ranks, ledger: Ledger, resume: str | int, skip: Sequence[CommitKey]) -> Choice:
    """`Ledger.choose` on rank 0, for all. Collective.

    Raises:
        CheckpointError: rank 0's, on all.
    """
    mine: list[Choice] = []

    def look(_: list[None]) -> tuple[tuple[Commit, bytes] | None, tuple[int, int | None, list[str]]]:
        choice = ledger.choose(resume, skip=skip)
        mine.append(choice)
        fault_injection.point("load.listed")
        found = choice.found
        return (
            (found.commit, found.manifest_raw) if found else None,
            (choice.generation, choice.forked_from, choice.rejected),
        )

    try:
        raw, (generation, forked_from, rejected) = ranks.decide(lambda: None, look)
    except RanksError as failed:
        raise failed.reasons[0] from None
    for sentence in rejected:
        log.warning("Passed over a checkpoint: %s", sentence)
    if raw is not None:
        fault_injection.point("load.manifest_read")
    if mine:
        return mine[0]
    found = None
    if raw is not None:
        commit, manifest_raw = raw
        found = Found(commit=commit, manifest=Manifest.from_bytes(manifest_raw), manifest_raw=manifest_raw)
    return Choice(found=found, generation=generation, forked_from=forked_from, rejected=rejected)


def worst(failed: RanksError) -> Exception:
    """Of several ranks' failures the one that decides: a wrong model, then a silent store, then whatever else says
    nothing of the checkpoint; damage, for which the one before is taken, only if that is all that there is."""
    reasons = list(failed.reasons.values())
    for kind in (MismatchError, StoreError):
        for reason in reasons:
            if isinstance(reason, kind):
                return reason
    return next((reason for reason in reasons if not isinstance(reason, DamagedError)), reasons[0])
