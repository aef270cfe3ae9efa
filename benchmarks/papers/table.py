"""What every script here does with its rows: prints a table, writes a CSV file, and says where a plot goes."""

from __future__ import annotations

import argparse
import csv
import statistics
from collections.abc import Sequence
from pathlib import Path


def parser_of(text: str | None) -> argparse.ArgumentParser:
    """With `--csv` and `--plot`."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--csv", type=Path, help="file for the table")
    parser.add_argument("--plot", type=Path, help="file for the plot")
    return parser


def show(columns: Sequence[str], rows: Sequence[Sequence[str]], path: Path | None) -> None:
    """Prints the table in markdown, and writes it to `path`."""
    for line in (columns, ["---"] * len(columns), *rows):
        print("| " + " | ".join(line) + " |")
    if path:
        with path.open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([columns, *rows])


def spread(ratios: Sequence[float]) -> str:
    """As the MegaBlocks paper has it: mean, standard deviation, least and most."""
    deviation = statistics.stdev(ratios) if len(ratios) > 1 else 0.0
    return f"{statistics.mean(ratios):.1%} +- {deviation:.1%} ({min(ratios):.1%} to {max(ratios):.1%})"
