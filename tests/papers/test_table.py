"""What all scripts do with their rows: the order of what they print, the file, the plot where one is asked for."""

import pytest
import torch

from benchmarks.papers.table import finish, measure, parser_of

ROWS = [["16", "0.5"], ["32", "0.7"]]


@pytest.mark.quick
def test_a_measured_table_stands_below_its_machine_and_above_its_summary(tmp_path, capsys):
    drawn = []
    csv, picture = tmp_path / "table.csv", tmp_path / "plot.png"
    arguments = parser_of("").parse_args(["--csv", str(csv), "--plot", str(picture)])
    measure(
        ("tokens", "ms"), lambda: ROWS, lambda rows, path: drawn.append((rows, path)), arguments,
        lambda rows: [f"{len(rows)} rows"],
    )  # fmt: skip
    first, *lines = capsys.readouterr().out.splitlines()
    assert torch.__version__ in first
    assert lines == ["| tokens | ms |", "| --- | --- |", "| 16 | 0.5 |", "| 32 | 0.7 |", "2 rows"]
    assert csv.read_text() == "tokens,ms\n16,0.5\n32,0.7\n"
    assert drawn == [(ROWS, picture)]


@pytest.mark.quick
def test_nothing_is_written_that_was_not_asked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    finish(("tokens", "ms"), ROWS, lambda rows, path: pytest.fail("a plot"), parser_of("").parse_args([]))
    assert not list(tmp_path.iterdir())
