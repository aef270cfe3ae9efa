"""Times of a run that must agree: a check refuses what Composer and LLM Foundry refuse in the first batch, no more."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
from composer.core import Time, Timestamp
from llmfoundry.utils.builders import build_scheduler

from foundry_moe.cli import main
from foundry_moe.launch.run_times import time_mistakes
from tests.launch.test_run_checks import DEMO

pytestmark = pytest.mark.quick

UNITS = ("ba", "ep", "sp", "tok", "dur", "sec")
KINDS = ("constant_with_warmup", "cosine_with_warmup", "linear_decay_with_warmup")


def time_in(unit: str, value: int) -> str:
    return f"{value / 100}dur" if unit == "dur" else f"{value}{unit}"


def refused(scheduler: dict[str, Any], longest: str) -> bool:
    """By the scheduler itself, when training begins."""
    state: Any = SimpleNamespace(max_duration=Time.from_timestring(longest), dataloader_len=Time(10, "ba"))
    state.timestamp = Timestamp()
    settings = dict(scheduler)
    try:
        build_scheduler(settings.pop("name"), settings)(state)
    except (ValueError, AssertionError):
        return True
    return False


def differs(scheduler: dict[str, Any], longest: str) -> bool:
    said = list(time_mistakes({"max_duration": longest, "scheduler": scheduler}, None))
    return bool(said) != refused(scheduler, longest)


def test_a_check_refuses_the_schedules_that_composer_refuses() -> None:
    lengths = [time_in(unit, 100) for unit in UNITS if unit not in ("dur", "sec")]
    wrong = []
    for kind, warmup, longest in product(KINDS, UNITS, lengths):
        for last in (None, *UNITS):
            for length in (100, 40):
                ends = {} if last is None else {"t_max": time_in(last, length)}
                if {last, longest[3:]} == {"ba", "ep"}:
                    continue  # a check does not know how many batches an epoch has
                scheduler = {"name": kind, "t_warmup": time_in(warmup, 5), **ends}
                if differs(scheduler, longest):
                    wrong.append((scheduler, longest))
    assert not wrong, wrong[:5]


def test_a_check_refuses_the_inverse_square_roots_that_llm_foundry_refuses() -> None:
    lengths = [time_in(unit, 100) for unit in UNITS if unit not in ("dur", "sec")]
    wrong = []
    for warmup, scale, cooldown, longest in product(UNITS, UNITS, UNITS, lengths):
        scheduler = {"name": "inv_sqrt_with_warmup", "t_warmup": time_in(warmup, 5), "t_scale": time_in(scale, 5)}
        scheduler["t_cooldown"] = time_in(cooldown, 5)
        if differs(scheduler, longest):
            wrong.append((scheduler, longest))
    assert not wrong, wrong[:5]


@pytest.mark.parametrize("longest", ["1e6tok", "3ep"])
def test_a_warmup_that_is_a_share_agrees_with_every_length(longest) -> None:
    scheduler = {"name": "cosine_with_warmup", "t_warmup": "0.1dur"}
    assert not list(time_mistakes({"max_duration": longest, "scheduler": scheduler}, None))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["scheduler.t_warmup=20ba", "max_duration=3072tok"],
            "scheduler.t_warmup (20ba) must have the unit of max_duration (3072tok): write it in tok",
        ),
        (["scheduler.t_warmup=20", "max_duration=100ba"], "scheduler.t_warmup (20) has no unit: use 20ba"),
        (["scheduler.t_warmup=0", "max_duration=100ba"], "scheduler.t_warmup (0) has no unit: use 0ba"),
        (["scheduler.t_warmup=20sec", "max_duration=100ba"], "scheduler.t_warmup (20sec) must not be in seconds"),
        (
            ["scheduler.t_warmup=2ba", "+scheduler.t_max=50ba", "max_duration=100ba"],
            "scheduler.t_max (50ba) must not be below max_duration (100ba)",
        ),
        (["max_duration=2h"], "max_duration ('2h') must be in ba, ep, sp or tok: Composer ends no run after a time"),
        (["max_duration=0.5ep"], "max_duration ('0.5ep') must be a whole number of ep"),
        (["callbacks.run_report.interval=1iter"], "callbacks.run_report.interval ('1iter') must be in ba, ep"),
        (
            ["callbacks.hf_checkpointer={save_folder: x, save_interval: often}"],
            "save_interval ('often') must be a time",
        ),
    ],
)
def test_times_that_do_not_agree_are_one_sentence(capsys, words, sentence) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["check", DEMO, *(word.removeprefix("+") for word in words)])
    errors = capsys.readouterr().err
    assert ended.value.code == 2 and sentence in errors, errors


@pytest.mark.parametrize(
    "longest",
    ["2h", "1h30m", "90s", "48h", "172800sec", "1.5h", "1d", "90 minutes", "1h 30m", "10Mtok", "1e6tok", "5ba"],
)
def test_a_length_is_refused_if_composer_does_not_read_it(longest) -> None:
    try:
        fails = Time.from_timestring(longest).unit == "sec"  # as its Trainer asks
    except ValueError:
        fails = True
    assert bool(list(time_mistakes({"max_duration": longest}, None))) == fails
