"""A commit says whether what training changes is finite; resume and retention go by it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from foundry_moe.checkpoint import Reader, ledger, open_store
from foundry_moe.checkpoint.engine import CheckpointEngine, Policy
from foundry_moe.checkpoint.records import Commit, CommitKey
from foundry_moe.checkpoint.training_state import Snapshotter, is_finite

NAN, INF = float("nan"), float("inf")


def state(**spoilt: tuple[str, float]) -> dict[str, Any]:
    """A model of a large and a small parameter with a mask, and their optimizer's state."""
    model = {"w": torch.ones(40, 40), "b": torch.ones(4), "mask": torch.full((20, 20), -INF)}
    optim = {name: {"step": torch.tensor(3.0), "m": torch.ones_like(model[name])} for name in ("w", "b")}
    for section, (name, value) in spoilt.items():
        (model[name] if section == "model" else optim[name]["m"])[-1] = value
    return {"model": model, "optim": {"state": optim, "param_groups": [{"lr": INF}]}, "other": torch.full((99,), NAN)}


@pytest.mark.parametrize(
    ("spoilt", "finite"),
    [
        ({}, True),
        ({"model": ("w", NAN)}, False),
        ({"model": ("w", -INF)}, False),
        ({"model": ("b", NAN)}, False),  # so small that it is a value of the manifest
        ({"model": ("mask", INF)}, True),  # not what training changes
        ({"optim": ("w", INF)}, False),
        ({"optim": ("b", NAN)}, False),
    ],
)
def test_what_training_changes_is_looked_at(spoilt, finite) -> None:
    assert is_finite(Snapshotter(0, 1).take(state(**spoilt))) is finite


def test_weights_alone_and_other_shapes_of_a_state() -> None:
    for dtype in (torch.bfloat16, torch.float8_e5m2):
        for value in (1.0, NAN):
            spoilt = {"model": {"w": torch.full((999,), value).to(dtype)}}
            assert is_finite(Snapshotter(0, 1).take(spoilt)) is (value == 1)
    assert is_finite(Snapshotter(0, 1).take({"a": torch.full((99,), NAN), "model": {"n": torch.arange(99)}}))
    assert is_finite(Snapshotter(0, 1).take({"model": {}, "optim": {}}))


def test_the_last_finite_commit_outlives_keep_and_is_resumed(tmp_path) -> None:
    engine = CheckpointEngine(open_store(str(tmp_path)), policy=Policy(keep=2, asynchronous=False))
    for step in range(1, 7):
        spoilt = {} if step in (1, 2) else {"model": ("w", NAN)}
        engine.save(state(**spoilt), step)
        report = engine.wait()
        assert report is not None and report.error is None
    assert [key.step for key in engine.ledger.newest_first()] == [6, 5, 2]
    into = state(model=("w", 5.0))
    loaded = engine.load(into)
    assert loaded is not None and loaded.step == 2 and torch.equal(into["model"]["w"], torch.ones(40, 40))
    assert all("not finite" in sentence for sentence in loaded.rejected) and len(loaded.rejected) == 2
    engine.save(state(), 7)
    engine.wait()
    assert [(key.generation, key.step) for key in engine.ledger.newest_first()] == [(1, 7), (0, 6)]
    named = CheckpointEngine(open_store(str(tmp_path))).load(state(), resume=6)
    assert named is not None and named.step == 6, "a step that is named is the user's choice"


def test_a_record_of_before_that_does_not_say_counts_as_finite() -> None:
    commit = Commit(where=CommitKey(generation=0, step=1), attempt="", nonce="")
    found = [
        ledger.is_finite(replace(commit, summary=summary)) for summary in ({}, {"finite": True}, {"finite": False})
    ]
    assert found == [True, True, False]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_load_passes_over_a_newest_commit_that_is_not_finite(tmp_path) -> None:
    engine = CheckpointEngine(open_store(str(tmp_path)), policy=Policy(asynchronous=False))
    for step, value in ((1, 3.0), (2, NAN)):
        engine.save({"model": {"w": torch.full((40, 40), value)}}, step)
        assert engine.wait().error is None
    for asked, step in ((None, 1), ("2", 2)):
        into = {"model": {"w": torch.zeros(40, 40)}}
        reader = Reader(tmp_path)
        dcp.load(into, checkpoint_id=asked, storage_reader=reader)
        assert reader.step == step and bool(into["model"]["w"].isfinite().all()) == (step == 1)
