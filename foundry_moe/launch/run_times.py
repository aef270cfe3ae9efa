"""Checks the times of a run: each by itself, and those that must agree, which Composer compares in the first batch.

Composer converts a scheduler's `dur` to the unit of `max_duration`, and epochs to batches, before it compares.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from foundry_moe.config import MoEConfig
from foundry_moe.launch.foundry_keys import REPORTS
from foundry_moe.schema import fits, section
from foundry_moe.times import Time, parse_time

_SCHEDULER = ("t_warmup", "t_max", "t_scale", "t_cooldown")
# callbacks with an interval, and its key
_INTERVALS = {
    **dict.fromkeys((*REPORTS, "async_eval", "generate_callback", "memory_snapshot"), "interval"),
    "hf_checkpointer": "save_interval",
}


def time_mistakes(run: Mapping[str, Any], config: MoEConfig | None) -> Iterator[str]:
    """A sentence for each invalid time and, where all are valid, for each pair that does not agree."""
    forms = list(_forms(run))
    yield from forms
    if forms or "max_duration" not in run:
        return
    yield from _scheduler(run)


def _forms(run: Mapping[str, Any]) -> Iterator[str]:
    times = {key: run[key] for key in ("max_duration", "eval_interval", "save_interval") if key in run}
    scheduler = section(run, "scheduler")
    times |= {f"scheduler.{key}": scheduler[key] for key in _SCHEDULER if scheduler.get(key) is not None}
    for name, settings in section(run, "callbacks").items():
        interval = settings.get(_INTERVALS.get(name, "")) if isinstance(settings, Mapping) else None
        if interval is not None:
            times[f"callbacks.{name}.{_INTERVALS[name]}"] = interval
    for where, value in times.items():
        good = fits(value, int) and value >= 0
        ours = where.removeprefix("callbacks.").partition(".")[0] in REPORTS
        if (time := parse_time(value)) is not None:
            good = time.of_composer
        if fits(value, int) and where.startswith(("max_duration", "scheduler.")):
            yield f"{where} ({value}) has no unit: use {value}ba for batches or {value}ep for epochs"
        elif where == "max_duration" and time is not None and time.unit in ("sec", "dur"):
            yield f"{where} ({value!r}) must be in ba, ep, sp or tok: Composer ends no run after a time"
        elif not good:
            yield f"{where} ({value!r}) must be a time such as 100ba, 1ep, 5000sp, 10000tok or 0.1dur"
        elif (parsed := _parse(value)).unit != "dur" and parsed.amount % 1 > 0:
            yield f"{where} ({value!r}) must be a whole number of {parsed.unit}; only dur has fractions"
        elif not parsed.amount and (where == "max_duration" or ours):
            yield f"{where} ({value!r}) must be above 0"
        elif ours and parsed.unit == "iter":
            yield f"{where} ({value!r}) must be in ba, ep, sp, tok, dur or sec"


def _parse(value: Any) -> Time:
    """A time that is good; a number alone counts epochs, as in Composer."""
    return parse_time(value) or Time(value, "ep")


def _scheduler(run: Mapping[str, Any]) -> Iterator[str]:
    scheduler, longest = section(run, "scheduler"), run["max_duration"]
    total, unit, *_ = _parse(longest)
    given = {key: scheduler[key] for key in _SCHEDULER if scheduler.get(key) is not None}
    seconds = [key for key, value in given.items() if _parse(value).unit == "sec"]
    for key in seconds:
        yield f"scheduler.{key} ({given[key]}) must not be in seconds: use {unit} or dur"
    if seconds:
        return
    if scheduler.get("name") == "inv_sqrt_with_warmup":
        for key in ("t_warmup", "t_scale", "t_cooldown"):
            if key in given and _parse(given[key]).unit != unit:
                yield f"scheduler.{key} ({given[key]}) must be in {unit}, the unit of max_duration ({longest})"
        return
    last = given.get("t_max", "1dur")
    end, end_unit, *_ = _parse(last)
    whole = {"dur": "ba" if unit == "ep" else unit, "ep": "ba"}  # units as Composer converts them
    wanted = whole.get(end_unit, end_unit)
    warmup = given.get("t_warmup")
    if warmup is not None and whole.get(own := _parse(warmup).unit, own) != wanted:
        other = f"max_duration ({longest})" if end_unit == "dur" else f"scheduler.t_max ({last})"
        yield f"scheduler.t_warmup ({warmup}) must have the unit of {other}: write it in {wanted}"
    if (end_unit == unit and end < total) or (end_unit == "dur" and end < 1):
        yield f"scheduler.t_max ({last}) must not be below max_duration ({longest}): raise it, or leave it out"
