"""What tools ask of a commit: which meshes can hold it, whether every hash agrees, what it is made of."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from foundry_moe.checkpoint.errors import CheckpointError
from foundry_moe.checkpoint.ledger import Found
from foundry_moe.checkpoint.manifest import Manifest
from foundry_moe.checkpoint.range_reads import Fetcher, blocks_of, coalesce
from foundry_moe.checkpoint.store import Store
from foundry_moe.config import can_cut_rows


@dataclass(frozen=True, kw_only=True)
class ExpertShapes:
    """The sizes that a mesh must divide: dimensions 0 and 1 of every tensor of experts, with one name for each."""

    sizes: dict[tuple[int, int], str]

    def problem(self, *, expert: int, shard: int) -> str | None:
        """Why a mesh cannot hold these experts; None if it can.

        With `expert` above 1 `shard` cuts dimension 1, which FSDP2 wants divided evenly; with 1 it may cut the experts.
        """
        for (experts, width), name in self.sizes.items():
            if experts % expert:
                return f"expert ({expert}) must divide the {experts} experts of {name}"
            if not can_cut_rows(width, shard=shard, expert=expert):
                return f"shard ({shard}) must divide dimension 1 ({width}) of {name}"
        return None


def expert_shapes(manifest: Manifest) -> ExpertShapes:
    """The model's tensors of three dimensions, in which dimension 0 counts experts."""
    sizes: dict[tuple[int, int], str] = {}
    for name, entry in manifest.tensors.items():
        if name.startswith("model.") and len(entry.shape) == 3:
            sizes.setdefault((entry.shape[0], entry.shape[1]), name)
    return ExpertShapes(sizes=sizes)


def meshes_that_hold(manifest: Manifest, world_size: int) -> Iterator[tuple[int, int, int]]:
    """All (replicate, shard, expert) of `world_size` ranks that can hold a checkpoint."""
    shapes = expert_shapes(manifest)
    for expert in _divisors(world_size):
        for shard in _divisors(world_size // expert):
            if shapes.problem(expert=expert, shard=shard) is None:
                yield world_size // (expert * shard), shard, expert


def _divisors(number: int) -> list[int]:
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


def verify(store: Store, found: Found) -> list[str]:
    """Reads every block and checks its hash; a sentence for each range that is damaged."""
    fetcher = Fetcher(store, found.commit.attempt, found.manifest)
    results = fetcher.stream(coalesce(found.manifest, blocks_of(found.manifest)))
    return [str(result) for result in results if isinstance(result, CheckpointError)]
