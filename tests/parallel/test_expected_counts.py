"""Sizes of messages from earlier passes: how much room, and what is done where it was too little."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from foundry_moe.layers.context import BatchContext
from foundry_moe.layers.replay import ChoiceRecord
from foundry_moe.parallel import expected_counts
from foundry_moe.parallel.expected_counts import ExpectedCounts, expect_counts

pytestmark = pytest.mark.quick


class _Dispatcher:
    expected: ExpectedCounts
    buffer = math.inf

    def room_by_slot(self, room_PP2: Tensor) -> Tensor:
        return room_PP2[0]


class _Model(nn.Module):
    """A model that is one layer of one rank, and notes its sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.record: Any = None
        self.context = BatchContext()
        self.dispatcher = _Dispatcher()
        self.counts: list[int] = []  # of its calls in a pass
        self.rooms: list[int | None] = []
        self.drawn: list[float] = []
        self.in_rounds = False

    def forward(self, x: Tensor) -> Tensor:
        expected = self.dispatcher.expected
        for count in self.counts:
            if count < 0:
                raise RuntimeError("fails")
            counts_PP2 = torch.full((1, 1, 2), count)
            sizes = expected.sizes_for(self.dispatcher, lambda counts_PP2=counts_PP2: counts_PP2)  # type: ignore[misc]
            if sizes is None and not self.in_rounds:
                expected.learn(self.dispatcher, counts_PP2)
            self.rooms.append(None if sizes is None else int(sizes.room_PP2[0, 0, 0]))
        if self.record is not None:
            self.record.add(self, torch.zeros(1, 1), torch.zeros(1, 1), None, 1)
        self.drawn.append(float(torch.rand(())))
        return x

    def step(self, *counts: int) -> list[int | None]:
        """The sizes of a pass, and of its repetition."""
        self.rooms, self.counts = [], list(counts)
        self(torch.zeros(1))
        return self.rooms


@pytest.fixture
def model() -> _Model:
    made = _Model()
    expect_counts(made, [made], torch.device("cpu"), None)
    return made


def room_for(count: int) -> int:
    return math.ceil(count * 1.125) + 16


def test_a_pass_with_too_many_is_repeated_with_exact_sizes_and_there_is_more_room_afterwards(model: _Model) -> None:
    assert model.step(800) == [None]
    assert model.step(916) == [916], "an eighth and 16 more"
    assert model.step(917) == [916, None]
    assert model.dispatcher.expected.repeated == 1
    assert model.step(10) == [None], "the pass after a repetition has exact sizes"
    assert model.step(10) == [room_for(917)]


def test_the_repetition_draws_the_same_random_numbers(model: _Model) -> None:
    model.step(8)
    model.drawn = []
    model.step(1000)
    assert len(model.drawn) == 2 and model.drawn[0] == model.drawn[1]
    assert float(torch.rand(())) != model.drawn[0]


def test_room_is_that_of_the_largest_counts_of_two_windows(model: _Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expected_counts, "_WINDOW", 3)
    model.step(800)
    assert [model.step(count)[0] for count in (800, 900, 700)] == [916] * 3
    assert [model.step(700)[0] for _ in range(3)] == [room_for(900)] * 3, "of the window before"
    assert model.step(700)[0] == room_for(700)


def test_after_repetitions_sizes_are_exact_for_longer_and_longer(
    model: _Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expected_counts, "_LONGEST_PAUSE", 4)
    counts = iter(2**power for power in range(8, 40))

    def kinds(passes: int) -> list[str]:
        seen = [model.step(next(counts)) for _ in range(passes)]
        return ["repeated" if len(rooms) == 2 else "exact" if rooms == [None] else "expected" for rooms in seen]

    seen = kinds(18)
    assert [number for number, kind in enumerate(seen) if kind == "repeated"] == [1, 3, 6, 11, 16]
    assert seen.count("exact") == len(seen) - 5
    for _ in range(3):
        assert model.step(2**36) == [None]
    for _ in range(2 * expected_counts._FITTING):
        assert model.step(8) == [room_for(2**36)], "exact passes have made room"
    assert model.step(2**37)[1:] == model.step(2**37) == [None], "one pass after so many that fit"
    assert model.step(2**37) == [room_for(2**37)]


def test_layers_behind_one_without_room_teach_nothing(model: _Model) -> None:
    """They have computed with other tokens than the repetition does."""
    expected, other = model.dispatcher.expected, _Dispatcher()
    model.step(8)
    for dispatcher in (model.dispatcher, other):
        expected._make_room(dispatcher, *[torch.full((1, 1, 2), 8)] * 2, 8)
    expected._sent = [
        (dispatcher, lambda: torch.full((1, 1, 2), 1000), expected._sizes[dispatcher])
        for dispatcher in (model.dispatcher, other)
    ]
    assert not expected._check_all()
    assert [int(expected._sizes[d].room_PP2[0, 0, 0]) for d in (model.dispatcher, other)] == [room_for(1000), 25]


def test_the_repetition_and_passes_with_exact_sizes_make_room_for_what_they_see(model: _Model) -> None:
    """Of all layers, where the check has looked at one alone."""
    expected, other = model.dispatcher.expected, _Dispatcher()
    small, large = (torch.full((1, 1, 2), count) for count in (8, 1000))
    for exact in (False, True):
        expected._make_room(other, small, small, 8)
        expected._runs, expected._exact = True, exact
        assert (expected.sizes_for(other, lambda: small) is None) is exact
        expected.learn(other, large)
        assert int(expected._sizes[other].room_PP2[0, 0, 0]) == room_for(1000)
        expected.learn(other, small)
        assert int(expected._sizes[other].room_PP2[0, 0, 0]) == room_for(1000), "there is enough"
        expected._called.clear()


def test_room_never_exceeds_the_buffer() -> None:
    """Two ranks of which one receives 7 of 8 choices: 1.75 times the mean, and 1.97 with a margin."""
    expected = ExpectedCounts([], torch.device("cpu"), None)
    dispatcher = _Dispatcher()
    counts_PP2 = torch.tensor([[[1000, 1000], [7000, 7000]], [[1000, 1000], [7000, 7000]]])
    choices = int(counts_PP2[..., 1].sum())
    for buffer, room in ((2.0, True), (1.9, False)):
        dispatcher.buffer = buffer
        expected._make_room(dispatcher, counts_PP2, counts_PP2, choices)
        assert (dispatcher in expected._sizes) is room
    # another rank has more in the next pass: 1.75 times the mean of one pass still, of which no pass has more choices
    dispatcher.buffer = 2.0
    expected._make_room(dispatcher, counts_PP2, counts_PP2, choices)
    expected._check(dispatcher, counts_PP2.flip(1), expected._sizes[dispatcher])
    sizes = expected._sizes[dispatcher]
    assert sizes.choices == choices and sizes.largest_PP2[..., 1].sum() > choices
    dispatcher.buffer = 1.9
    expected._make_room(dispatcher, sizes.largest_PP2, sizes.before_PP2, sizes.choices)
    assert dispatcher not in expected._sizes


def test_a_short_pass_or_one_without_room_does_not_end_what_a_window_has_seen(
    model: _Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expected_counts, "_WINDOW", 4)
    model.dispatcher.buffer = 2.0
    for count in (1000, 1000, 1000, 1000, 10):
        model.step(count)
    assert model.step(1000) == [room_for(1000)]
    assert model.step(2000) == [room_for(1000), None]
    assert model.step(10) == [None]
    assert [model.step(10)[0] for _ in range(6)] == [room_for(2000)] * 6, "to the end of the next window"
    assert model.step(10) == [room_for(10)], "the one without room has not begun another window"


def test_tokens_that_are_sent_in_rounds_get_no_room(model: _Model) -> None:
    model.in_rounds = True
    assert [model.step(8), model.step(8)] == [[None], [None]]
    model.in_rounds = False
    assert [model.step(8), model.step(8)] == [[None], [25]]


def test_a_layer_that_is_called_twice_in_a_pass_has_exact_sizes(model: _Model) -> None:
    """Its recomputation would not know which call it is."""
    for _ in range(3):
        assert model.step(100, 400) == [None, None]
    assert model.step(100) == [None]
    assert model.dispatcher.expected.repeated == 0


def test_a_pass_that_calls_a_layer_twice_for_the_first_time_is_repeated(model: _Model) -> None:
    model.step(100)
    assert model.step(100, 100) == [room_for(100), None, None, None]
    assert model.step(100) == [None]
    assert model.step(1000) == [None], "for good"


def test_sizes_are_exact_without_gradients_or_outside_an_observed_pass(model: _Model) -> None:
    """And such passes teach nothing: evaluation has other batches."""
    with torch.no_grad():
        assert [model.step(8), model.step(8)] == [[None], [None]]
    model.rooms, model.counts = [], [8]
    for _ in range(2):
        model.forward(torch.zeros(1))
    assert model.rooms == [None, None]
    assert [model.step(8), model.step(8)] == [[None], [25]]


def test_a_pass_that_fails_leaves_nothing_behind(model: _Model) -> None:
    model.step(8)
    with pytest.raises(RuntimeError):
        model.step(8, -1)
    expected = model.dispatcher.expected
    assert not expected._runs and not expected._called and not expected._sent


def test_what_layers_left_in_the_pass_is_forgotten(model: _Model) -> None:
    restarted: list[int] = []
    replay: Any = SimpleNamespace(restart=lambda: restarted.append(1))
    model.context.replay = SimpleNamespace(begin=lambda: replay)
    model.record = ChoiceRecord([model])  # type: ignore[list-item]
    model.step(8)
    model.step(8)
    assert not restarted
    model.step(1000)
    assert restarted == [1]
    assert model.record.calls(model) == 3, "one for each pass"
