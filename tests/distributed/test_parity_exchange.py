"""Tokens to other ranks and back: the values of local experts; flat, hierarchical and direct the same to the bit."""

from __future__ import annotations

import time

import pytest
import torch

from foundry_moe.launch.processes import run_processes
from tests.distributed import parity_worker
from tests.distributed.launching import PRELOAD

needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
CASES = ["uneven", "crowded", "one rank", "none"]


@pytest.mark.parametrize(("ranks", "ranks_per_node"), [(4, 2), (8, 2), (8, 4)])
def test_dispatch_equals_local_experts_and_every_way_equals_flat(ranks: int, ranks_per_node: int) -> None:
    gaps = run_processes(parity_worker.compare_exchanges, ranks_per_node, CASES, world_size=ranks, preload=PRELOAD)
    assert len(gaps) == 10 * len(CASES)
    # fp64: sums over a token's ranks in another order; bits: none
    assert max(gaps.values()) < 1e-13, gaps


@pytest.mark.gpu
@needs_two_gpus
def test_direct_dispatch_gives_the_bits_of_nccl() -> None:
    same = run_processes(parity_worker.compare_bits_on_gpus, CASES, world_size=2, backend="nccl", preload=PRELOAD)
    assert len(same) == 3 * len(CASES) and all(same.values()), same


@pytest.mark.gpu
@needs_two_gpus
def test_a_rank_that_goes_silent_in_direct_dispatch_is_an_error_of_the_others_within_the_limit() -> None:
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 0 of 2"):
        run_processes(
            parity_worker.wait_for_a_rank_that_is_gone, world_size=2, backend="nccl", timeout_s=150, preload=PRELOAD
        )
    assert time.monotonic() - began < 120


@pytest.mark.gpu
@pytest.mark.parametrize("chunks", [1, 2])
def test_one_host_synchronisation_a_layer_and_none_in_backward(chunks: int) -> None:
    find = parity_worker.find_host_synchronisations
    found = run_processes(find, 3, chunks, world_size=1, backend="nccl", preload=PRELOAD)
    assert [len(waits) for waits in found.values()] == [3, 0], found
