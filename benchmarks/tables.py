"""Writes the tables of RESULTS.md from the figures beside it: run `python benchmarks/tables.py` when figures change.

A line `<!-- figures/NAME.csv -->` and an empty one stand above each table, which is replaced.
The CSV files hold plain numbers; the page shows integers of five digits and more with thousands separators.
"""

from __future__ import annotations

import csv
import re
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE / "RESULTS.md"
_TABLE = re.compile(r"(?P<mark><!-- (?P<file>figures/[a-z0-9_]+\.csv) -->\n\n)(?:\|.*\n)*\n?")


def markdown_table(path: Path) -> str:
    """The CSV file as a table of markdown; its first row is the header."""
    with path.open(newline="", encoding="utf-8") as file:
        header, *rows = csv.reader(file)
    lines = [header, ["---"] * len(header), *([_shown(cell) for cell in row] for row in rows)]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def _shown(cell: str) -> str:
    return f"{int(cell):,}" if re.fullmatch(r"\d{5,}", cell) else cell


def render(page: str) -> str:
    """The page with every table made from its file, an empty line below it."""
    filled = _TABLE.sub(lambda found: found["mark"] + markdown_table(HERE / found["file"]) + "\n", page)
    return filled.rstrip("\n") + "\n"


def main() -> None:
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
