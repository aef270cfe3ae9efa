"""Reading blocks of one commit to where ranks need them: each block once, whoever needs any of it.

Each stored block is fetched by one of the ranks that need any of it and given to the others, so that the store sends
every byte once. What is needed, and where it belongs, a `Targets` says; this module knows no state dict and no planner.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

from foundry_moe.checkpoint import fault_injection
from foundry_moe.checkpoint.collective_errors import Ranks
from foundry_moe.checkpoint.exchange import Traffic, exchange
from foundry_moe.checkpoint.layout import Block
from foundry_moe.checkpoint.ledger import Found
from foundry_moe.checkpoint.moving import Mover, Targets
from foundry_moe.checkpoint.range_reads import READS_IN_FLIGHT, Fetcher
from foundry_moe.checkpoint.store import Store


def read_blocks(store: Store, found: Found, ranks: Ranks, targets: Targets) -> Traffic:
    """Brings every block to its places on all ranks. Collective.

    Raises:
        RanksError: what failed on which ranks, on all of them.
    """
    traffic, began = Traffic(), time.perf_counter()
    objects = found.manifest.objects
    neighbours = ranks.deal(
        lambda: store.identity(f"{found.commit.attempt}/{objects[0][0]}") if objects else None, _neighbours
    )
    mover = Mover(targets, Fetcher(store, found.commit.attempt, found.manifest), neighbours)
    again: list[Block] = []
    ranks.decide(lambda: again.extend(exchange(mover, ranks.group, traffic)), lambda _: None)

    def read_again() -> None:  # what others have read, now that every hash is known to be right
        with ThreadPoolExecutor(READS_IN_FLIGHT, "checkpoint-read") as pool:
            list(pool.map(mover.read_again, again))

    ranks.decide(read_again, lambda _: None)
    traffic.bytes_fetched = mover.fetcher.bytes_read
    traffic.seconds = time.perf_counter() - began
    fault_injection.point("load.done")
    return traffic


def _neighbours(seen: list[str | None]) -> list[frozenset[int]]:
    """For each rank those that see its files through the memory of the same host."""
    alike: dict[str | None, set[int]] = {}
    for rank, identity in enumerate(seen):
        alike.setdefault(identity, set()).add(rank)
    return [
        frozenset() if identity is None else frozenset(alike[identity] - {rank}) for rank, identity in enumerate(seen)
    ]
