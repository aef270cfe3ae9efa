"""Files of loads: a bad line is an error in one sentence, and a long run has few points."""

from __future__ import annotations

import json

import numpy as np
import pytest

from foundry_moe.cli import main
from foundry_moe.loads.history import POINTS, over_mean, read_history

pytestmark = pytest.mark.quick


def line(batch=1, loads=None, metrics=None):
    return json.dumps({"batch": batch, "loads": loads or {"0": [3, 1], "2": [2, 2]}, "metrics": metrics or {}})


def written(folder, *lines):
    path = folder / "load.jsonl"
    path.write_text("".join(f"{text}\n" for text in lines))
    return path


def test_lines_are_read_and_an_incomplete_last_one_is_ignored(tmp_path):
    path = written(tmp_path, line(5), line(9, metrics={"loss/train/total": 0.5, "b": None}))
    path.write_text(path.read_text() + '{"batch": 12, "lo')
    history = read_history(path)
    assert history.ends == [5, 9] and history.lines == 2 and history.layers == (0, 2)
    assert np.isnan(history.points[0].loss) and history.points[1].loss == 0.5
    assert history.loads_NLE.tolist() == [[[3, 1], [2, 2]]] * 2


DEEP = "[" * 100_000
FORM = "line 2 is not one that callbacks.expert_load writes"
OTHER = "line 2: it is of another run than the line before"
BAD = {
    "hello": FORM,
    DEEP: FORM,
    '{"batch": 2, "loads": {"0": [NaN, 1]}}': FORM,
    "[1, 2]": FORM,
    '{"batch": 2}': FORM,
    line("2"): FORM,
    line(-1): FORM,
    line(2.5): FORM,
    line(1): OTHER,
    line(2, {"0": [3, 1]}): OTHER,
    line(2, {"0": [3, 1, 1], "2": [1, 1, 1]}): OTHER,
    line(2, {"<b>": [1, 2]}): FORM,
    line(2, {"0": [1, 2], "00": [1, 2]}): FORM,
    '{"batch": 2, "loads": [1]}': FORM,
    '{"batch": 2, "loads": {}}': FORM,
    line(2, {"0": "12"}): FORM,
    line(2, {"0": []}): FORM,
    line(2, {"0": [1], "2": [1, 2]}): FORM,
    line(2, {"0": [1, -2]}): FORM,
    line(2, {"0": [1, 10**30]}): FORM,
    line(2, metrics=[1]): FORM,
    line(2, metrics={"loss/train/total": "<script>"}): FORM,
    line(2, metrics={"loss/train/total": 10**400}): FORM,
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
    monkeypatch.setattr("foundry_moe.loads.history.MOST_LINE_BYTES", 1000)
    with pytest.raises(ValueError, match="line 1 is not one"):
        read_history(written(tmp_path, "{" * 2000))


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "cannot be read: No such file or directory"),
        (b"", "has no line yet"),
        (b"\xff\xfe\n", "line 1 is not one"),
        (b"\xff\xfe", "line 1 is not one"),
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
    assert "is the file of loads itself" in capsys.readouterr().err and path.read_text().startswith('{"batch"')


@pytest.mark.parametrize("lines", [1, POINTS, POINTS + 1, 5 * POINTS + 3])
def test_a_long_run_has_few_points_and_loses_no_load(lines, tmp_path):
    path = written(tmp_path, *(line(n, metrics={"loss/train/total": n}) for n in range(1, lines + 1)))
    history = read_history(path)
    assert len(history.ends) <= POINTS and history.ends[-1] == lines == history.lines
    assert history.loads_NLE.sum() == lines * 8
    np.testing.assert_allclose(over_mean(history.loads_NLE.sum(0)), [[1.5, 0.5], [1, 1]])
    each = history.lines_a_point
    assert history.ends == [*range(each, lines + 1, each), *([lines] if lines % each else [])]
    assert [point.loss for point in history.points] == history.ends


@pytest.mark.parametrize("name", [".", "x" * 5000])
def test_a_folder_and_a_name_that_is_too_long_are_one_sentence(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        main(["loads", name])
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and error.startswith("error: ") and error.count("\n") == 1
