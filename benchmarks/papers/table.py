"""What every script here does with its rows: prints a table, writes it as CSV, draws a plot where one is asked for."""

from __future__ import annotations

import argparse
import csv
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from timing import header

Rows = list[list[str]]


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


def finish(
    columns: Sequence[str],
    rows: Rows,
    plot: Callable[[Rows, Path], None],
    arguments: argparse.Namespace,
    notes: Sequence[str] = (),
) -> None:
    """Shows the table with notes below it, and draws the plot where `--plot` asks for one."""
    show(columns, rows, arguments.csv)
    for note in notes:
        print(note)
    if arguments.plot:
        plot(rows, arguments.plot)


def measure(
    columns: Sequence[str],
    rows_of: Callable[[], Rows],
    plot: Callable[[Rows, Path], None],
    arguments: argparse.Namespace,
    summary: Callable[[Rows], Sequence[str]] = lambda rows: (),
) -> None:
    """A line on the device and the versions, then what `rows_of` measures as `finish` shows it, above its summary."""
    torch.manual_seed(0)
    print(header(), flush=True)
    rows = rows_of()
    finish(columns, rows, plot, arguments, summary(rows))


def spread(ratios: Sequence[float]) -> str:
    """As the MegaBlocks paper has it: mean, standard deviation, least and most."""
    deviation = statistics.stdev(ratios) if len(ratios) > 1 else 0.0
    return f"{statistics.mean(ratios):.1%} +- {deviation:.1%} ({min(ratios):.1%} to {max(ratios):.1%})"
