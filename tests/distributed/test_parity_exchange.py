"""Tokens to other ranks and back: the values of local experts; flat and hierarchical the same to the bit."""

from __future__ import annotations

import pytest
import torch

from foundry_moe.commands.verify.rows import TOLERANCE
from foundry_moe.launch.processes import run_processes
from tests.distributed import parity_worker
from tests.helpers.launching import PRELOAD

CASES = ["uneven", "crowded", "one rank", "none"]


@pytest.mark.parametrize(("ranks", "ranks_per_node"), [(4, 2), (8, 2), (8, 4)])
def test_dispatch_equals_local_experts_and_hierarchical_equals_flat(ranks: int, ranks_per_node: int) -> None:
    gaps = run_processes(parity_worker.compare_exchanges, ranks_per_node, CASES, world_size=ranks, preload=PRELOAD)
    assert len(gaps) == 9 * len(CASES)
    # fp64: sums over a token's ranks in another order; bits: none
    assert max(gaps.values()) < 1e-13, gaps


@pytest.mark.gpu
@pytest.mark.parametrize(("gpus", "ways"), [(1, 1), (2, 4), (4, 9)])
def test_the_same_over_nccl(gpus: int, ways: int) -> None:
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} GPUs")
    compare = parity_worker.compare_exchanges
    gaps = run_processes(compare, 2, CASES, "cuda", world_size=gpus, backend="nccl", preload=())
    assert len(gaps) == ways * len(CASES)
    assert max(gaps.values()) < TOLERANCE["fp32"], gaps


@pytest.mark.gpu
def test_one_host_synchronisation_per_layer_and_none_in_backward() -> None:
    find = parity_worker.find_host_synchronisations
    found = run_processes(find, 3, world_size=1, backend="nccl", preload=PRELOAD)
    assert [len(waits) for waits in found.values()] == [3, 0], found
