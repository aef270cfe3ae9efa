"""Rounds that ranks agree on: nobody gets more than its limit at once, wherever in the batch the crowd is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from foundry_moe.ops.dispatch_plan import plan_plain, plan_rounds

RANKS, LOCAL, CHOICES = 4, 6, 3
pytestmark = pytest.mark.quick


def choices_of_ranks(kind: str, tokens: int = 60) -> list[Tensor]:
    """experts_TK of each rank."""
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.rand(tokens, RANKS * LOCAL, generator=generator).argsort(1)[:, :CHOICES] for _ in range(RANKS)]
    if kind == "all to one":
        drawn = [experts_TK % CHOICES + 2 * LOCAL for experts_TK in drawn]
    elif kind == "some consecutive":  # a third of the tokens, at other places on each rank
        for rank, experts_TK in enumerate(drawn):
            experts_TK[13 * rank : 13 * rank + 20] %= LOCAL
    elif kind == "two crowds":  # the second rank's come first, then the last one's
        for experts_TK in drawn:
            experts_TK[:30] = experts_TK[:30] % LOCAL + LOCAL
            experts_TK[30:] = experts_TK[30:] % LOCAL + 3 * LOCAL
    elif kind == "one sender":
        drawn = [experts_TK % LOCAL if rank == 1 else experts_TK[:0] for rank, experts_TK in enumerate(drawn)]
    elif kind == "gaps":
        for experts_TK in drawn:
            experts_TK %= 2 * LOCAL
            experts_TK[torch.rand(experts_TK.shape, generator=generator) < 0.4] = -1
    return drawn


def rounds_of_ranks(chosen: list[Tensor], buffer: float) -> list[list[slice]]:
    """The tokens of each rank's rounds, as many on each; none where one message is enough."""
    choices_PP = torch.stack(
        [plan_plain(experts_TK, torch.zeros(experts_TK.shape), LOCAL, RANKS)[0][:, 1] for experts_TK in chosen]
    )
    rounds = [
        plan_rounds(choices_PP, experts_TK, rank, local_experts=LOCAL, buffer=buffer)
        for rank, experts_TK in enumerate(chosen)
    ]
    if None in rounds:
        assert rounds == [None] * RANKS, "ranks agree whether there are rounds"
        return [[]] * RANKS
    most = max(len(parts) for parts in rounds)
    return [
        [*parts, *[slice(len(experts_TK), len(experts_TK))] * (most - len(parts))]
        for parts, experts_TK in zip(rounds, chosen, strict=True)
    ]


@pytest.mark.parametrize("buffer", [1.0, 1.25, 2.0])
@pytest.mark.parametrize("kind", ["all to one", "some consecutive", "two crowds", "one sender", "gaps"])
def test_no_round_brings_a_rank_more_than_its_limit(kind: str, buffer: float) -> None:
    chosen = choices_of_ranks(kind)
    rounds = rounds_of_ranks(chosen, buffer)
    (count,) = set(map(len, rounds))
    all_choices = sum(int((experts_TK >= 0).sum()) for experts_TK in chosen)
    limit = buffer * all_choices / RANKS
    received_P = torch.bincount(torch.cat([t[t >= 0] for t in chosen]) // LOCAL, minlength=RANKS)
    if count == 0:
        assert received_P.max() <= limit
        return
    # each crowded rank makes as many cuts at most as its limit fits in what it gets; a token may end a round early
    assert 1 <= count <= 2 + sum(int(n / (limit - RANKS * CHOICES)) for n in received_P.tolist() if n > limit)
    for parts, experts_TK in zip(rounds, chosen, strict=True):
        assert [t for part in parts for t in range(part.start, part.stop)] == list(range(len(experts_TK)))
    for number in range(count):
        sent = torch.cat(
            [experts_TK[parts[number]].flatten() for parts, experts_TK in zip(rounds, chosen, strict=True)]
        )
        assert torch.bincount(sent[sent >= 0] // LOCAL, minlength=RANKS).max() <= limit + RANKS * CHOICES


def test_all_tokens_to_one_rank_need_no_more_rounds_than_its_limit_fits_in_them() -> None:
    for buffer, count in ((1.0, 4), (1.25, 4), (2.0, 2)):
        assert {len(parts) for parts in rounds_of_ranks(choices_of_ranks("all to one"), buffer)} == {count}


def test_a_round_has_room_for_all_choices_of_a_token() -> None:
    """A rank's share of the limit is one choice here, and its token has three."""
    assert rounds_of_ranks(choices_of_ranks("all to one", tokens=1), 1.0) == [[slice(0, 1)]] * RANKS


def test_an_even_load_and_no_tokens_are_one_round() -> None:
    even = choices_of_ranks("random")
    assert not any(rounds_of_ranks(even, 1.5))
    assert not any(rounds_of_ranks([t[:0] for t in even], 1.0))
