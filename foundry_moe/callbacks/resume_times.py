"""Where the time went between the start of a process and its first batch after a resume, for the log."""

from __future__ import annotations

import time

import psutil


class ResumeTimes:
    """Seconds of this process by what they went to, in the order in which they passed.

    The first part begins when the system started the process; each ends with a `mark`, where the next begins.
    """

    def __init__(self, began_s: float | None = None) -> None:
        self._last_s = psutil.Process().create_time() if began_s is None else began_s  # since the epoch
        self.parts: dict[str, float] = {}

    def mark(self, part: str) -> None:
        """What has passed since the last mark was `part`; a part that is there already grows."""
        now = time.time()
        self.parts[part] = self.parts.get(part, 0.0) + now - self._last_s
        self._last_s = now

    @property
    def total_s(self) -> float:
        return sum(self.parts.values())

    def __str__(self) -> str:
        """`41.2 s (imports 14.1, data and model 3.2, ...)`."""
        return f"{self.total_s:.1f} s ({', '.join(f'{part} {seconds:.1f}' for part, seconds in self.parts.items())})"
