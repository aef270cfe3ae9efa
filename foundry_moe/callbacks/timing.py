"""How long a resume took, from the start of the process to its first batch, for the log."""

from __future__ import annotations

import time

import psutil


class ResumeTimes:
    """Seconds of this process by phase, in the order in which the phases passed.

    The first phase begins when the operating system started the process; each `mark` ends one and begins the next.
    """

    def __init__(self, began_s: float | None = None) -> None:
        self._last_s = psutil.Process().create_time() if began_s is None else began_s  # since the epoch
        self.phases: dict[str, float] = {}

    def mark(self, phase: str) -> None:
        """Adds the time since the last mark to `phase`."""
        now = time.time()
        self.phases[phase] = self.phases.get(phase, 0.0) + now - self._last_s
        self._last_s = now

    @property
    def total_s(self) -> float:
        return sum(self.phases.values())

    def __str__(self) -> str:
        """`41.2 s (imports 14.1, data and model 3.2, ...)`."""
        return f"{self.total_s:.1f} s ({', '.join(f'{phase} {seconds:.1f}' for phase, seconds in self.phases.items())})"
