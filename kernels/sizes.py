"""Whole-number arithmetic of launch grids.

Triton's own functions look for constants to unwrap first: 0.4 ms of a layer's step under cProfile, 41 calls.
"""

from __future__ import annotations


def cdiv(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The least power of two that is n at least, n from 1 up."""
    return 1 << (n - 1).bit_length()
