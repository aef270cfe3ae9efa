"""The grammar of times, for all keys: `30m`, `1h30m`, `500ba`, `1ep`, `5000sp`, `10Mtok`, `0.1dur`.

Each key says which units it takes. Imports neither torch nor Composer.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

COUNTS = ("ba", "ep", "sp", "tok")
_SUFFIX = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "B": 10**9, "T": 10**12}
_SECONDS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0}
_COUNT = re.compile(r"([0-9][0-9_]*(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?)\s*([kMGBT]?)(ba|ep|sp|tok|dur|iter|sec)")
_CLOCK = re.compile("".join(rf"(?:([0-9]+(?:\.[0-9]+)?)\s*{unit}\s*)?" for unit in _SECONDS))


class Time(NamedTuple):
    """`amount` of `unit`: seconds (`sec`), a count (`ba`, `ep`, `sp`, `tok`, `iter`) or a share of the run (`dur`).

    of_composer: Composer reads it too, which takes no clock time such as `2h` for a key of a run.
    """

    amount: float
    unit: str
    of_composer: bool = True


def parse_time(value: Any) -> Time | None:
    """The time that a text names; None if it names none."""
    text = value.strip() if isinstance(value, str) else ""
    if match := _COUNT.fullmatch(text):
        number, suffix, unit = match.groups()
        return Time(float(number.replace("_", "")) * _SUFFIX[suffix], unit, of_composer=not suffix)
    if not text or not (match := _CLOCK.fullmatch(text)):
        return None
    parts = zip(match.groups(), _SECONDS.values(), strict=True)
    seconds = sum(float(number) * each for number, each in parts if number)
    return Time(seconds, "sec", of_composer=False)
