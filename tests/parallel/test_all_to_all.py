"""Where tokens go, and what the certificate calls a difference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

import pytest
import torch
import torch.distributed as dist

from foundry_moe.commands.verify.rows import difference
from foundry_moe.layers.dispatch import Dispatcher
from foundry_moe.layers.gates.gate import Choices
from foundry_moe.parallel.all_to_all import AllToAllDispatcher, _transpose_blocks
from tests.helpers.small_training import compare, take_share

pytestmark = pytest.mark.quick


def test_blocks_are_transposed_with_empty_ones_among_them() -> None:
    blocks = ((2, 0, 1), (0, 0, 3))
    rows = torch.tensor([0, 0, 2, 12, 12, 12])[:, None]  # numbered 10 * i + j
    assert _transpose_blocks(rows, blocks).flatten().tolist() == [0, 0, 2, 12, 12, 12]
    blocks = ((1, 2), (3, 1))
    rows = torch.tensor([0, 1, 1, 10, 10, 10, 11])[:, None]
    moved = _transpose_blocks(rows, blocks)
    assert moved.flatten().tolist() == [0, 10, 10, 10, 1, 1, 11]
    back = _transpose_blocks(moved, tuple(zip(*blocks, strict=True)))
    assert torch.equal(back, rows)


@pytest.mark.parametrize("share", [(1,), (3, 0, 1, 2), (0,), (0, 1)])
@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_ranks_together_have_each_sequence_once(share: tuple[int, ...], world_size: int) -> None:
    ids = torch.arange(12)
    parts = [take_share(ids, share, rank, world_size) for rank in range(world_size)]
    assert torch.equal(torch.cat(parts), ids)
    if share == (3, 0, 1, 2) and world_size > 1:
        assert any(part.numel() == 0 for part in parts)


def test_certificate_does_not_pass_over_what_is_missing_or_not_a_number() -> None:
    one = torch.ones(3)
    assert difference(one * 1.5, one) == pytest.approx(0.5)
    assert difference(torch.full((3,), float("nan")), one) == float("inf")
    assert difference(torch.ones(4), one) == float("inf")
    rows = compare({"grad/0/gate/w": one, "loss/0": one}, {"loss/0": one, "norm/0": one})
    assert rows == {"gradient gate": float("inf"), "loss": 0.0, "clipped norm": float("inf")}


@pytest.fixture
def alone() -> Iterator[dist.ProcessGroup]:
    """The group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("weights", "autocast"), [(torch.float64, False), (torch.bfloat16, False), (torch.float32, True)]
)
def test_numbers_of_experts_travel_exactly_and_tokens_in_the_dtype_of_experts(
    alone: dist.ProcessGroup, weights: torch.dtype, autocast: bool
) -> None:
    x_TD, experts_TK = torch.randn(3, 4), torch.tensor([[299, 0], [257, 258], [511, 1]])  # bf16 has 256 and 260
    choices = Choices(experts_TK=experts_TK, weights_TK=torch.rand(3, 2).to(weights))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        rows = AllToAllDispatcher((alone,), num_experts=512).dispatch(x_TD, choices).receive()
    expected = x_TD.bfloat16() if autocast else x_TD
    assert rows.x.dtype == expected.dtype and torch.equal(rows.x, expected)
    assert rows.weights.dtype == torch.promote_types(weights, torch.float32)
    assert torch.equal(rows.weights, choices.weights_TK.to(rows.weights.dtype))
    plan = Dispatcher(512).dispatch(x_TD, choices).plan
    assert all(torch.equal(getattr(rows.plan, field.name), getattr(plan, field.name)) for field in fields(plan))


def test_a_recomputation_that_chooses_other_experts_is_an_error(alone: dist.ProcessGroup) -> None:
    kept: dict = {}
    dispatcher = AllToAllDispatcher(
        (alone,), num_experts=4, once=lambda key, compute: kept.setdefault(key, kept.get(key) or compute())
    )
    x_TD, experts_TK = torch.randn(3, 4), torch.tensor([[3, 0], [2, 1], [0, 1]])
    for _ in range(2):
        dispatcher.dispatch(x_TD, Choices(experts_TK=experts_TK, weights_TK=torch.ones(3, 2))).receive()
    experts_TK[1, 1] = -1
    with pytest.raises(RuntimeError, match="a recomputation chose other experts"):
        dispatcher.dispatch(x_TD, Choices(experts_TK=experts_TK, weights_TK=torch.ones(3, 2)))


def test_a_rank_with_fewer_rounds_takes_part_in_all_of_them(
    alone: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 of 2, whose six tokens all go to itself: the other rank needs two rounds more."""
    dispatcher = AllToAllDispatcher((alone,), num_experts=2, buffer=1.0)
    dispatcher.ranks, dispatcher.local_experts = 2, 1
    monkeypatch.setattr(AllToAllDispatcher, "largest", lambda self, number, device: number + 2)
    choices_PP, experts_TK = torch.tensor([[6, 0], [6, 0]]), torch.zeros(6, 1, dtype=torch.long)
    rounds = dispatcher._rounds(choices_PP, experts_TK)
    assert rounds == (slice(0, 3), slice(3, 6), slice(6, 6), slice(6, 6))
    assert dispatcher._rounds(torch.tensor([[3, 3], [3, 3]]), experts_TK) == ()
    dispatcher.buffer = 2.0  # no load exceeds it
    assert dispatcher._rounds(choices_PP, experts_TK) == ()
