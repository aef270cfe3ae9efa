"""Schedules: what a user writes, and the numbers that follow."""

import pytest

from foundry_moe.layers.schedule import Progress, parse_duration, parse_schedule, share_of

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("text", "value", "unit"),
    [
        ("100ba", 100, "ba"),
        ("1ep", 1, "ep"),
        ("10Mtok", 10_000_000, "tok"),
        ("2.5e6tok", 2_500_000, "tok"),
        ("1_000sp", 1000, "sp"),
        ("0.5dur", 0.5, "dur"),
        ("3Btok", 3e9, "tok"),
    ],
)
def test_times_are_read(text, value, unit):
    duration = parse_duration(text, "x")
    assert (duration.amount, duration.unit) == (value, unit)


@pytest.mark.parametrize("text", ["10", "ba", "-1ba", "10 batches", 10, "1e3", ""])
def test_what_is_no_time_is_refused(text):
    with pytest.raises(ValueError, match="must be a time such as 100ba"):
        parse_duration(text, "gate.hard_after")


def test_a_number_stays():
    schedule = parse_schedule(0.3, "x")
    assert schedule.is_constant and schedule.at(Progress(ba=10**9)) == 0.3


@pytest.mark.parametrize(
    ("shape", "quarter"), [("linear", 0.875), ("exponential", 0.5**0.25), ("cosine", 1 - 0.5 * 0.14644660940672627)]
)
def test_a_schedule_goes_from_start_to_end_and_stays(shape, quarter):
    schedule = parse_schedule({"start": 1, "end": 0.5, "after": "10Mtok", "until": "50Mtok", "shape": shape}, "x")
    values = [schedule.at(Progress(tok=m * 10**6)) for m in (0, 10, 20, 50, 80)]
    assert values == pytest.approx([1, 1, quarter, 0.5, 0.5], rel=1e-12)
    assert share_of(parse_duration("50Mtok", "x"), Progress(tok=8 * 10**7)) == 1


def test_epochs_may_be_parts():
    schedule = parse_schedule({"start": 1.0, "end": 0.0, "until": "2ep"}, "x")
    assert schedule.at(Progress(ep=0.5)) == pytest.approx(0.75)


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ({"start": 1, "end": 0}, "x.until is missing: give it a time such as 100ba"),
        ({"start": 1, "end": 0, "until": 1000}, "x.until must be a time such as 100ba, .*, not 1000"),
        ({"start": 1, "end": 0, "until": "5ba", "shape": "linar"}, "did you mean 'linear'"),
        ({"start": 1, "end": 0, "until": "5ba", "after": "1ep"}, "must have one unit"),
        ({"start": 1, "end": 0, "until": "5ba", "after": "5ba"}, "ends .until: 5ba. before it starts .after: 5ba"),
        ({"start": 1, "end": 0, "until": "0ba"}, "before it starts"),
        ({"start": 1, "end": 0, "until": "5ba", "shape": "exponential"}, "both must be above 0"),
        ({"start": 1, "end": 0, "util": "5ba"}, "did you mean 'until'"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(value, sentence):
    with pytest.raises(ValueError, match=sentence):
        parse_schedule(value, "x")


def test_a_share_of_the_training_needs_its_length():
    schedule = parse_schedule({"start": 1, "end": 0, "until": "0.5dur"}, "x")
    assert schedule.at(Progress(dur=0.25)) == 0.5
    with pytest.raises(ValueError, match="whose length is known"):
        schedule.at(Progress(ba=3))
