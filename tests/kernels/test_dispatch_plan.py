"""Rows by rank against the plain twin.

Shapes: T tokens, K choices, P ranks, C ranks a token goes to at most.
"""

import pytest
import torch
from foundry_moe_kernels import dispatch_plan

from foundry_moe.ops.dispatch_plan import plan_plain

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def twin(*operands, room=None, **more):
    """counts_P2, row_TC and the packed rows of the plain twin."""
    counts_P2, assign_rows = plan_plain(*operands, **more)
    return (counts_P2, *assign_rows(room))


@pytest.mark.parametrize("kind", ["random", "some absent", "all to one", "none"])
@pytest.mark.parametrize(
    ("tokens", "choices", "ranks", "nodes"),
    [(200, 3, 2, 1), (65, 8, 4, 1), (130, 3, 8, 4), (1, 1, 3, 1), (70, 2, 8, 2), (0, 2, 4, 1), (64, 6, 6, 3)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_counts_and_what_travels_equal_the_twin(kind, tokens, choices, ranks, nodes, dtype):
    local = 5
    experts_TK = torch.rand(tokens, ranks * local, device=DEVICE).topk(choices).indices
    if kind == "some absent":
        experts_TK[torch.rand(tokens, choices, device=DEVICE) < 0.4] = -1
    if kind == "all to one":
        experts_TK = torch.arange(choices, device=DEVICE).expand(tokens, choices).contiguous() + (ranks - 1) * local
        experts_TK = experts_TK.clamp(max=ranks * local - 1)
    if kind == "none":
        experts_TK.fill_(-1)
    weights_TK = torch.rand(tokens, choices, device=DEVICE, dtype=dtype)
    counts_P2, counts_PN = dispatch_plan.count_rows(experts_TK, local, ranks, nodes)
    row_TC, packed = dispatch_plan.assign_rows(experts_TK, weights_TK, local, counts_P2, counts_PN, nodes)
    expected_P2, expected_TC, expected = twin(experts_TK, weights_TK, local, ranks, nodes)
    assert torch.equal(counts_P2, expected_P2)
    assert torch.equal(row_TC, expected_TC)
    assert torch.equal(packed[: len(expected)], expected)
    for short in range(3):  # enough room for all; for too few rows, or too few choices, of one rank
        room_P2 = counts_P2 + torch.arange(2 * ranks, device=DEVICE).view(ranks, 2) % 3
        if short:
            room_P2[ranks // 2, short - 1] = counts_P2[ranks // 2, short - 1] - 1
        room_P2.clamp_(min=0)
        room = room_P2, int(room_P2[:, 0].sum())
        seen = dispatch_plan.assign_rows(experts_TK, weights_TK, local, counts_P2, counts_PN, nodes, room)
        expected_P2, *expected = twin(experts_TK, weights_TK, local, ranks, nodes, room=room)
        assert all(map(torch.equal, seen, expected))
        assert len(seen[1]) == room[1]


def test_ranks_without_enough_room_get_nothing_and_the_others_all():
    experts_TK = torch.tensor([[0, 1, 9], [-1, 4, -1], [5, 5, 14]], device=DEVICE)  # 5 experts per rank
    room = torch.tensor([[3, 3], [2, 2], [2, 1]], device=DEVICE), 7  # two rows for rank 1, but not three choices
    _, row_TC, packed = twin(experts_TK, torch.rand(3, 3, device=DEVICE), 5, 3, room=room)
    assert row_TC.tolist() == [[0, -1, -1], [1, -1, -1], [-1, -1, 5]]
    used = [[0, 1, -1], [-1, 4, -1]]
    assert packed[:, 3:].tolist() == [*used, *[[-1, -1, -1]] * 3, [-1, -1, 4], [-1, -1, -1]]


def test_a_token_goes_once_to_each_rank_with_an_expert_of_its():
    experts_TK = torch.tensor([[0, 1, 9], [-1, 4, -1], [5, 5, 14]], device=DEVICE)  # 5 experts per rank
    counts_P2, row_TC, packed = twin(experts_TK, torch.rand(3, 3, device=DEVICE), 5, 3)
    assert counts_P2.tolist() == [[2, 3], [2, 3], [1, 1]]
    assert row_TC.tolist() == [[0, 2, -1], [1, -1, -1], [-1, 3, 4]]
    assert packed[:, 3:].tolist() == [[0, 1, -1], [-1, 4, -1], [-1, -1, 4], [0, 0, -1], [-1, -1, 4]]
