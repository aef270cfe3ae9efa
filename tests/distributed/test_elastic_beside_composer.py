"""`elastic_checkpoint` beside Composer's own checkpoints: which of them a run goes on from, and weights taken over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.commands import tool
from tests.helpers.tiny_runs import launch, model_of, run

ONE = (1, 1, 1)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Any]:
    """One launch: a run that both saved until batch 2 and that then broke off; and runs that find what it left."""
    root = tmp_path_factory.mktemp("beside")
    keys, saver = {"interval": "1ba"}, {"save_interval": "1ba", "max_duration": "3ba"}
    theirs, first = str(root / "composer"), str(root / "composer" / "ep0-ba1-rank0.pt")
    again = {"autoresume": True, "max_duration": "4ba", "save_interval": "100ba"}
    again["keys"] = {"keep": 9}  # batch 2 is compared below
    later = {**again, "max_duration": "5ba"}
    wanted = {
        "broken": run(root / "ours", ONE, keys=keys, save_folder=theirs, break_at=2, **saver),
        "weights of a folder": run(
            root / "e", ONE, load_path=str(root / "ours"), load_weights_only=True, max_duration="1ba"
        ),
        "state of a folder": run(root / "f", ONE, load_path=str(root / "ours"), max_duration="3ba"),
        "load_path, no commit": run(root / "a", ONE, load_path=first, max_duration="2ba"),
        "load_path, commits": run(root / "ours", ONE, load_path=first, max_duration="3ba", may_fail=True),
        "load_path gone, commits": run(
            root / "a", ONE, load_path=str(root / "gone.pt"), max_duration="3ba", may_fail=True
        ),
        "load_path gone, no commit": run(root / "d", ONE, load_path=str(root / "gone.pt"), may_fail=True),
        "autoresume, both": run(root / "ours", ONE, save_folder=theirs, **again),
        "autoresume, ours": run(root / "ours", ONE, save_folder=str(root / "new"), **later),
        "autoresume, theirs": run(root / "b", ONE, save_folder=theirs, **later),
        "weights by load_path": run(
            root / "c", ONE, load_path=f"{theirs}/ep0-ba2-rank0.pt", load_weights_only=True, max_duration="1ba"
        ),
    }
    return {"root": root, **dict(zip(wanted, launch(1, *wanted.values()), strict=True))}


def test_load_path_counts_only_where_there_is_no_commit(runs) -> None:
    assert runs["load_path, no commit"]["began_at"] == 1
    assert runs["load_path, commits"]["error"] is None and runs["load_path, commits"]["began_at"] == 2


def test_load_path_may_be_the_folder_of_another_run(runs) -> None:
    weights, state = runs["weights of a folder"], runs["state of a folder"]
    assert weights["error"] is None and weights["began_at"] == 0
    assert weights["losses"] == runs["weights by load_path"]["losses"]
    assert state["began_at"] == 2 and state["losses"] == runs["load_path, commits"]["losses"]


def test_load_path_may_be_gone_once_there_is_a_commit(runs) -> None:
    gone = runs["load_path gone, commits"]
    assert gone["error"] is None and gone["began_at"] == 2
    assert "gone.pt" in runs["load_path gone, no commit"]["error"]


def test_autoresume_goes_on_from_what_it_finds_where_there_is_no_commit(runs) -> None:
    assert runs["autoresume, both"]["began_at"] == 3, "where the run before ended: not batch 2, Composer's newest"
    assert runs["autoresume, ours"]["began_at"] == runs["autoresume, theirs"]["began_at"] == 4


def check_imported(source: Path, root: Path, ours: Path, step: int) -> Path:
    """Imports what Composer saved, and compares with what `elastic_checkpoint` saved at the same step."""
    folder = root / f"imported-{source.name}"
    assert tool("import", folder, source, "--trust-pickle") == 0
    imported, expected = model_of(folder, 0), model_of(ours, step)
    assert imported.keys() == expected.keys() and len(expected) > 10
    for name, tensor in expected.items():
        assert torch.equal(imported[name], tensor), name
    return folder


def test_a_checkpoint_that_composer_wrote_is_a_starting_point(runs) -> None:
    root = runs["root"]
    folder = check_imported(root / "composer" / "ep0-ba2-rank0.pt", root, root / "ours", 2)
    (begun,) = launch(1, run(folder, ONE, max_duration="1ba"))
    assert begun["began_at"] == 0
    assert begun["losses"] == runs["weights by load_path"]["losses"] != runs["broken"]["losses"]


def test_a_sharded_checkpoint_that_composer_wrote_is_a_starting_point(tmp_path) -> None:
    mesh = (1, 1, 2)
    saver = {
        "save_folder": str(tmp_path / "composer"),
        "save_interval": "2ba",
        "fsdp_config.state_dict_type": "sharded",
    }
    launch(2, run(tmp_path / "ours", mesh, max_duration="2ba", **saver))
    folder = check_imported(tmp_path / "composer" / "ep0-ba2", tmp_path, tmp_path / "ours", 2)
    (begun,) = launch(2, run(folder, mesh, max_duration="1ba"))
    assert begun["began_at"] == 0 and begun["error"] is None
