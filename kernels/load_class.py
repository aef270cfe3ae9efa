"""The load that tiles are chosen by: that of the operands, or a pretended one while kernels are compiled ahead.

A tile is chosen by rows an expert. Whoever compiles for all loads runs few rows and says here which load these stand
for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

MOST_ROWS = 2**17  # of one expert, of the loads that are compiled ahead
_pretended: list[tuple[int, int]] = []  # rows of an expert, rows in all; the last one counts


@contextmanager
def pretend(rows_per_expert: int, experts: int) -> Iterator[None]:
    """Within, tiles are chosen as if `experts` experts had `rows_per_expert` rows each; nothing is timed."""
    _pretended.append((rows_per_expert, rows_per_expert * experts))
    try:
        yield
    finally:
        _pretended.pop()


def is_pretended() -> bool:
    return bool(_pretended)


def per_expert(rows: int, experts: int) -> int:
    """Rows of an expert on average."""
    return _pretended[-1][0] if _pretended else rows // max(experts, 1)


def rows(rows: int) -> int:
    """Rows of all experts."""
    return _pretended[-1][1] if _pretended else rows


def all_loads() -> list[int]:
    """Rows an expert that stand for every class of load: half steps of log2, as `tuning.shape_class` has them."""
    loads = dict.fromkeys(round(2 ** (half / 2)) for half in range(2 * (MOST_ROWS.bit_length() - 1) + 1))
    return list(loads)
