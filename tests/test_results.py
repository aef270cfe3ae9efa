"""The page of results shows the figures that stand in its CSV files, and its links lead somewhere."""

import csv
import re
from pathlib import Path

import pytest

from benchmarks.tables import render

pytestmark = pytest.mark.quick

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
PAGE = (BENCHMARKS / "RESULTS.md").read_text()


def test_every_table_is_made_from_its_file():
    assert render(PAGE) == PAGE, "run: python benchmarks/tables.py"


def test_every_file_of_figures_is_shown_once_and_has_rows_as_wide_as_its_header():
    shown = re.findall(r"<!-- (figures/\w+\.csv) -->\n\n\|", PAGE)
    assert sorted(shown) == sorted(f"figures/{path.name}" for path in (BENCHMARKS / "figures").iterdir())
    for name in shown:
        with (BENCHMARKS / name).open(newline="") as file:
            header, *rows = csv.reader(file)
        assert rows and {len(row) for row in rows} == {len(header)} and len(set(header)) == len(header), name


def test_every_script_that_a_command_names_exists():
    named = set(re.findall(r"benchmarks/\w+\.py", PAGE))
    assert len(named) > 10 and not [name for name in named if not (BENCHMARKS.parent / name).exists()]
