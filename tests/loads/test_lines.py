"""Files of loads are read strictly: a bad line is one sentence, and a long run few points."""

from __future__ import annotations

import json

import numpy as np
import pytest

from foundry_moe.cli import main
from foundry_moe.loads.history import POINTS, read_history
from foundry_moe.loads.lines import read_lines

pytestmark = pytest.mark.quick


def line(batch=1, loads=None, metrics=None):
    return json.dumps({"batch": batch, "loads": loads or {"0": [3, 1], "2": [2, 2]}, "metrics": metrics or {}})


def written(folder, *lines):
    path = folder / "load.jsonl"
    path.write_text("".join(f"{text}\n" for text in lines))
    return path


def test_lines_are_read_and_one_that_is_being_written_is_left_out(tmp_path):
    path = written(tmp_path, line(5, metrics={"a": 1, "b": None}), line(9))
    path.write_text(path.read_text() + '{"batch": 12, "lo')
    first, second = read_lines(path)
    assert (first.batch, second.batch, first.layers, first.metrics) == (5, 9, (0, 2), {"a": 1.0})
    assert first.loads_LE.tolist() == [[3, 1], [2, 2]]


DEEP = "[" * 100_000
BAD = {
    "hello": "line 2: this is not JSON",
    DEEP: "line 2: this is not JSON",
    '{"batch": 2, "loads": {"0": [NaN, 1]}}': "this is not JSON",
    "[1, 2]": 'this is not {"batch": ...',
    '{"batch": 2}': 'this is not {"batch": ...',
    line(True): "batch (True) must be a whole number",
    line(-1): "batch (-1) must be a whole number",
    line(2.5): "batch (2.5) must be a whole number",
    line(1): "line 2: batch 1 comes after batch 1",
    line(2, {"0": [3, 1]}): "its layers or experts are others than those of the line before",
    line(2, {"0": [3, 1, 1], "2": [1, 1, 1]}): "its layers or experts are others",
    line(2, {"<b>": [1, 2]}): "loads ('<b>') must name a layer by its index",
    line(2, {"0": [1, 2], "00": [1, 2]}): "loads names a layer twice",
    line(2, {"0": "12"}): "loads.0 must be a list of 1 to 65536 counts",
    line(2, {"0": [1], "2": [1, 2]}): "loads.2 has 2 experts where another layer has 1",
    line(2, {"0": [1, -2]}): "loads.0 has -2 where a count of 0 to 2^50 belongs",
    line(2, {"0": [1, 10**30]}): "where a count of 0 to 2^50 belongs",
    line(2, {"0": [1, 1.5]}): "loads.0 has 1.5 where a count",
    '{"batch": 2, "loads": [1]}': "loads must be a mapping of 1 to 4096 layers, not [1]",
    line(2, metrics=[1]): "metrics must be a mapping of names to numbers, not [1]",
    line(2, metrics={"x": "<script>"}): "metrics ('x') must be a number or null, not '<script>'",
    line(2, metrics={"x": 10**400}): "metrics ('x') is too large a number",
    line(2, metrics={"x": 1e300}): "metrics ('x') is too large a number",
    line(2, metrics={"x" * 300: 1}): "metrics has a name of 300 characters",
}


@pytest.mark.parametrize("bad", BAD, ids=range(len(BAD)))
def test_a_bad_line_is_one_sentence_with_its_number(bad, tmp_path, capsys):
    path = written(tmp_path, line(1), bad, line(3))
    with pytest.raises(SystemExit) as stopped:
        main(["loads", str(path), "--html", str(tmp_path / "out.html")])
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and error.startswith(f"error: {path} line 2") and error.count("\n") == 1
    assert BAD[bad] in error and len(error) < 400 and not (tmp_path / "out.html").exists()


def test_a_line_without_end_is_not_held_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("foundry_moe.loads.lines.MOST_LINE_BYTES", 1000)
    with pytest.raises(ValueError, match="line 1 is longer than 1000 bytes: no file of loads"):
        list(read_lines(written(tmp_path, "x" * 2000)))


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "cannot be read: No such file or directory"),
        (b"", "has no line yet"),
        (b"\xff\xfe\n", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
    ],
)
def test_a_file_without_loads_is_one_sentence(content, sentence, tmp_path, capsys):
    if content is not None:
        (tmp_path / "load.jsonl").write_bytes(content)
    with pytest.raises(SystemExit) as stopped:
        main(["loads", str(tmp_path / "load.jsonl")])
    assert stopped.value.code == 2 and sentence in capsys.readouterr().err


def test_the_page_does_not_replace_its_source(tmp_path, capsys):
    path = written(tmp_path, line(1))
    with pytest.raises(SystemExit):
        main(["loads", str(path), "--html", str(path)])
    assert "is the file that is read" in capsys.readouterr().err and path.read_text().startswith('{"batch"')


@pytest.mark.parametrize("lines", [1, POINTS, POINTS + 1, 5 * POINTS + 3])
def test_a_long_run_has_few_points_and_loses_no_load(lines, tmp_path):
    path = written(tmp_path, *(line(n, metrics={"m": n} if n % 2 else {}) for n in range(1, lines + 1)))
    history = read_history(path)
    assert len(history.ends) <= POINTS and history.ends[-1] == lines == history.lines
    assert history.loads_NLE.sum() == lines * 8
    np.testing.assert_allclose(history.total(), [[1.5, 0.5], [1, 1]])
    assert history.relative().shape == (len(history.ends), 2, 2)
    assert history.ends == sorted(set(history.ends))
    if lines > POINTS:
        per_point = history.lines_a_point
        odd = [n for n in range(1, per_point + 1) if n % 2]
        assert history.series("m")[0] == pytest.approx(sum(odd) / len(odd)), "the mean of the lines that have it"
