"""Types of command-line arguments, for argparse."""

from __future__ import annotations

import argparse
from pathlib import Path


def positive(text: str) -> float:
    """A finite number above 0, as an argument's type."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} must be a finite number above 0")
    return value


def positive_int(text: str) -> int:
    """A whole number of 1 or more, as an argument's type."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} must be 1 or more")
    return value


def local_path(text: str) -> Path:
    """A path of this host, as an argument's type. An address would create folders named `s3:`."""
    if "://" in text:
        raise argparse.ArgumentTypeError(
            f"{text} must be a path of this host: write to a local path and copy the result"
        )
    return Path(text)
