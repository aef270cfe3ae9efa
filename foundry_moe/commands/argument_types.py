"""Arguments that several commands have, and types of arguments: what cannot be is refused before anything runs."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_overrides(parser: argparse.ArgumentParser, help: str | None = None) -> None:
    """Keys of a run after its YAML, or none. Without a default argparse would name them among what is required."""
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help=help)


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
    """A path of this host, as an argument's type: an address would become folders named `s3:`."""
    if "://" in text:
        raise argparse.ArgumentTypeError(f"{text} must be a path of this host: write there, and copy it")
    return Path(text)
