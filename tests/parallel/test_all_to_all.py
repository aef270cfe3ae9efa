"""Where tokens go, and what the certificate calls a difference."""

from __future__ import annotations

import pytest
import torch

from foundry_moe.commands.verify.rows import difference
from foundry_moe.parallel.all_to_all import _transpose_blocks
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
