"""Tokens through the all-to-all: the values of local experts; flat and hierarchical the same to the bit."""

from __future__ import annotations

import pytest

from foundry_moe.parallel.launch import run_processes
from tests.distributed import parity_worker
from tests.distributed.launching import PRELOAD

CASES = ["uneven", "crowded", "one rank", "none"]


@pytest.mark.parametrize(("ranks", "ranks_per_node"), [(4, 2), (8, 2), (8, 4)])
def test_dispatch_equals_local_experts_and_hierarchical_equals_flat(ranks: int, ranks_per_node: int) -> None:
    gaps = run_processes(parity_worker.compare_exchanges, ranks_per_node, CASES, world_size=ranks, preload=PRELOAD)
    assert len(gaps) == 3 * len(CASES)
    # fp64: sums over a token's ranks in another order; bits: none
    assert max(gaps.values()) < 1e-13, gaps


@pytest.mark.gpu
def test_one_host_synchronisation_a_layer_and_none_in_backward() -> None:
    counts = run_processes(parity_worker.count_host_synchronisations, 3, world_size=1, backend="nccl", preload=PRELOAD)
    assert counts == {"forward": 3, "backward": 0}
