"""Reads the `interval` of a callback."""

from collections.abc import Callable

from composer.core import Event, State, Time, TimeUnit
from composer.utils import create_interval_scheduler


def at_interval(interval: str, where: str) -> Callable[[State, Event], bool]:
    """Whether the interval ends with this event (ask at BATCH_END and EPOCH_END); true at the end of training too.

    Raises:
        ValueError: `interval` is not a Composer time string, or not above 0; `where` names the key.
    """
    try:
        every = Time.from_input(interval, TimeUnit.BATCH)
    except (ValueError, RuntimeError):  # for what is neither text nor a number
        raise ValueError(f"{where} ({interval!r}) must be a time such as 10ba, 1ep or 100000tok") from None
    if every.value <= 0:
        raise ValueError(f"{where} ({interval!r}) must be above 0")
    return create_interval_scheduler(every, checkpoint_events=False, final_events={Event.BATCH_END})
