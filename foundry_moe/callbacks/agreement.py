"""What ranks tell each other before each batch, in one small message over a CPU group, and what follows from it.

All ranks see the same table, so all decide the same. It must not know Composer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields

import torch
import torch.distributed as dist

NO_NEWS, FINITE, NONFINITE = 0, 1, 2
SHOWN = 4  # numbers of microbatches in the sentence about them: a job of hundreds of ranks may have as many


@dataclass(frozen=True, kw_only=True)
class Row:
    """One rank's part of the message.

    stop: whether it was told to stop.
    health: NO_NEWS, FINITE or NONFINITE: the newest batch that it has looked at.
    microbatches: of the batch to come.
    busy: whether it is saving.
    """

    stop: int = 0
    health: int = NO_NEWS
    microbatches: int = 1
    busy: int = 0


class RankAgreement:
    """Exchanges rows: each rank sends its own to rank 0, which sends the table down a tree.

    An all-reduce or an all-gather of gloo passes a ring, whose time grows with the number of ranks: of 16 processes on
    two busy cores 78 ms, where this took 17 ms.

    Args:
        group: a CPU group over all ranks; None for a single process.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._world = dist.get_world_size(group) if group is not None else 1

    def exchange(self, mine: Row) -> list[Row]:
        """Collective. Returns all ranks' rows, by rank."""
        if self._group is None:
            return [mine]
        row = torch.tensor(astuple(mine), dtype=torch.int32)
        table_RN = torch.zeros(self._world, len(fields(Row)), dtype=torch.int32)  # R ranks, N fields
        rows = list(table_RN.unbind(0)) if dist.get_rank(self._group) == 0 else None
        dist.gather(row, rows, group=self._group, group_dst=0)
        dist.broadcast(table_RN, group=self._group, group_src=0)
        return [
            Row(stop=stop, health=health, microbatches=microbatches, busy=busy)
            for stop, health, microbatches, busy in table_RN.tolist()
        ]


def check_microbatches(rows: Sequence[Row], batch: int, size: object) -> None:
    """Refuses a batch that ranks would not go through together: the first collective would wait for ever.

    Args:
        batch: its number, from 1.
        size: `device_train_microbatch_size`, for the sentence.

    Raises:
        ValueError: says which ranks have how many microbatches, those that few have first, and what to set.
    """
    by_count: dict[int, list[int]] = {}
    for rank, row in enumerate(rows):
        by_count.setdefault(row.microbatches, []).append(rank)
    if len(by_count) == 1:
        return
    rarest = sorted(by_count.items(), key=lambda item: (len(item[1]), item[0]))  # most ranks have what is right
    counts = "; ".join(f"{count}: {name_ranks(ranks)}" for count, ranks in rarest[:SHOWN])
    if len(rarest) > SHOWN:
        counts += f"; {len(rarest) - SHOWN} more counts on other ranks"
    raise ValueError(
        f"batch {batch} has not the same number of microbatches on all ranks ({counts}), and they would wait for each "
        f"other for ever: set train_loader.drop_last: true, or a device_train_microbatch_size ({size}) that is at "
        "least each rank's batch"
    )


def name_ranks(ranks: Sequence[int], most: int = 8) -> str:
    """The ranks as text, the first few of many: `ranks 0, 1, 2 and 9 more`."""
    shown = ", ".join(str(rank) for rank in ranks[:most])
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}" + (
        f" and {len(ranks) - most} more" if len(ranks) > most else ""
    )
