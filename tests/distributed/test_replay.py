"""Router replay on a mesh, and recomputed dispatches that exchange no counts."""

from __future__ import annotations

import pytest
import torch

from foundry_moe import replay_choices
from foundry_moe.launch.processes import run_processes
from tests.distributed import replay_worker
from tests.helpers.launching import PRELOAD
from tests.helpers.small_training import build_model, draw_batch


@pytest.mark.parametrize(("mode", "buffer"), [("reentrant", 2.0), ("non-reentrant", 2.0), ("non-reentrant", 1.0)])
def test_a_recomputed_dispatch_exchanges_no_counts_and_changes_no_bit(mode: str, buffer: float) -> None:
    count = replay_worker.count_collectives
    expected, _, _ = run_processes(count, "plain", buffer, world_size=2, preload=PRELOAD)
    found, calls, rounds = run_processes(count, mode, buffer, world_size=2, preload=PRELOAD)
    assert (rounds > 1) == (buffer == 1.0)
    assert calls.get("forward", 0) >= 4 and not calls.get("backward"), calls
    gaps = {name: float((found[name] - gradient).abs().max()) for name, gradient in expected.items()}
    assert found.keys() == expected.keys() and max(gaps.values()) == 0, gaps


@pytest.mark.parametrize(("ranks", "mode", "buffer"), [(2, "non-reentrant", 1.0), (4, "plain", 2.0)])
def test_each_rank_replays_its_own_tokens(ranks: int, mode: str, buffer: float) -> None:
    """The gradients are those of one process that replays all tokens."""
    seen = run_processes(replay_worker.replay, mode, buffer, world_size=ranks, preload=PRELOAD)
    for name, gradient in seen["own"].items():
        torch.testing.assert_close(seen["again"][name], gradient, rtol=1e-11, atol=1e-13, msg=name)
    model = build_model(replay_worker.CASE, torch.float64, torch.device("cpu"))
    with torch.no_grad():
        for block in model.blocks:
            block.ffn.gate.weight_ED.neg_()
    microbatches = [torch.cat([of_rank[0][number] for of_rank in seen["choices"]]) for number in range(2)]
    with replay_choices(model, torch.cat(microbatches)):
        for number in range(2):
            y = model(draw_batch(0, number)[:, :-1])
            (y.sin().sum() / ranks).backward()  # gradients are averaged over ranks
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(seen["moved"][name], parameter.grad, rtol=1e-10, atol=1e-12, msg=name)
