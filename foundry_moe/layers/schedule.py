"""Progress of the training, and schedules over it. Independent of trainers: the training loop sets `Progress`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from foundry_moe.schema import UserError, form, from_mapping, one_of
from foundry_moe.times import COUNTS, Time, parse_time

A_TIME = "a time such as 100ba, 1ep, 5000sp, 10Mtok or 0.1dur"
_UNITS = (*COUNTS, "dur")


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Progress of the training, in the units of Composer's time strings.

    Attributes:
        ba: batches.
        ep: epochs, which may be fractions.
        sp: samples of the whole job.
        tok: tokens of the whole job.
        dur: share of the training's length, or None where that is not known.
    """

    ba: int = 0
    ep: float = 0.0
    sp: int = 0
    tok: int = 0
    dur: float | None = None


def parse_duration(text: Any, where: str) -> Time:
    """`100ba`, `1ep`, `10Mtok`, `2.5e6tok`, `0.1dur`.

    Raises:
        ValueError: not such a text.
    """
    time = parse_time(text)
    if time is None or time.unit not in _UNITS:
        raise UserError(
            f"{where} ({text!r}) must be {A_TIME}: a number, perhaps k, M, B or T, and one of {', '.join(_UNITS)}"
        )
    return time


def share_of(time: Time, progress: Progress) -> float:
    """The share of a time that has passed, 1 from its end on; 1 for a time of zero."""
    done = getattr(progress, time.unit)
    if done is None:
        raise UserError(f"a time in {time.unit} needs a training whose length is known: use ba, ep, sp or tok")
    return min(done / time.amount, 1.0) if time.amount else 1.0


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A number that changes from `start` to `end` between two points of training, then stays at `end`.

    after, until: times in one unit; before `after` the number is `start`; empty = from the beginning.
    shape: linear | exponential | cosine.
    """

    start: float
    end: float
    until: str = field(metadata=form(A_TIME))
    after: str = field(default="", metadata=form(A_TIME))
    shape: str = "linear"

    def __post_init__(self) -> None:
        one_of("shape", self.shape, ("linear", "exponential", "cosine"))
        after, until = self._times
        if after.unit != until.unit:
            raise UserError(f"after ({self.after}) and until ({self.until}) must have one unit")
        if until.amount <= after.amount:
            raise UserError(
                f"the schedule ends (until: {self.until}) before it starts (after: {self.after or '0'}); raise until"
            )
        if self.shape == "exponential" and (self.start <= 0 or self.end <= 0):
            raise UserError(f"an exponential goes from {self.start} to {self.end}, and both must be above 0")

    @cached_property
    def _times(self) -> tuple[Time, Time]:
        until = parse_duration(self.until, "until")
        return parse_duration(self.after or f"0{until.unit}", "after"), until

    def at(self, progress: Progress) -> float:
        """The current value: a function of the progress only, so a resumed run continues the schedule."""
        if self.is_constant:
            return self.start
        after, until = self._times
        done = share_of(until, progress) * until.amount  # `share_of` checks the unit
        share = min(max((done - after.amount) / (until.amount - after.amount), 0.0), 1.0)
        if self.shape == "exponential":
            return self.start * (self.end / self.start) ** share
        if self.shape == "cosine":
            share = (1 - math.cos(math.pi * share)) / 2
        return self.start + (self.end - self.start) * share

    @property
    def is_constant(self) -> bool:
        return self.start == self.end

    @property
    def bounds(self) -> tuple[float, float]:
        """Its smallest and largest value."""
        return min(self.start, self.end), max(self.start, self.end)


def parse_schedule(value: float | Mapping[str, Any], where: str) -> Schedule:
    """A number, or `{start: 1.0, end: 0.5, until: 1000ba}` with perhaps `after: 100ba` and `shape: exponential`.

    Args:
        where: the key, for messages.

    Raises:
        ValueError: an unknown or missing key, an invalid time, mixed units, an end before the start, or an
            exponential through zero.
    """
    if not isinstance(value, Mapping):
        return Schedule(start=float(value), end=float(value), until="1ba")
    return from_mapping(Schedule, value, where)
