"""Saves and loads in one process: what is kept, what is found, and what every kind of damage leads to."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from foundry_moe.checkpoint import ledger as commits_module
from foundry_moe.checkpoint import open_store
from foundry_moe.checkpoint.committer import Retention
from foundry_moe.checkpoint.engine import CheckpointEngine, Policy
from foundry_moe.checkpoint.errors import (
    CheckpointError,
    DamagedError,
    MismatchError,
    StoreError,
    TooManyFailuresError,
)
from foundry_moe.checkpoint.ledger import Ledger
from foundry_moe.checkpoint.records import CommitKey
from foundry_moe.checkpoint.training_state import Snapshotter
from tests.helpers.checkpoints import blank, check, damage, make_state, save, steps_in


@pytest.mark.quick
def test_state_comes_back_bit_for_bit(store) -> None:
    save(store, 7)
    state = blank()
    loaded = CheckpointEngine(store).load(state)
    check(loaded, 7)
    assert loaded.state["model"]["dense"] is state["model"]["dense"], "filled in place"
    assert loaded.traffic.bytes_fetched <= loaded.summary["bytes"]


def test_later_changes_do_not_leak_into_a_save(store) -> None:
    engine = CheckpointEngine(store)
    state = make_state(3)
    engine.save(state, 3)
    for tensor in state["model"].values():
        tensor.fill_(1)
    state["values"]["step"] = 99
    assert engine.wait().error is None
    check(CheckpointEngine(store).load(blank()), 3)


@pytest.mark.parametrize(
    "here",
    [torch.zeros(400, 300, dtype=torch.float64), torch.zeros(400, 300, dtype=torch.bfloat16), torch.zeros(500, 300)],
)
@pytest.mark.parametrize("rows", [400, 1])
def test_a_callbacks_tensor_of_another_kind_than_here_comes_as_it_was_saved(store, here, rows) -> None:
    saved = torch.arange(rows * 300.0).reshape(rows, 300)[:, : 300 if rows > 1 else 8].contiguous()
    engine = CheckpointEngine(store)
    engine.save({"model": {"w": torch.ones(9)}, "values": {"of a callback": saved}}, 1)
    assert engine.wait().error is None
    loaded = CheckpointEngine(store).load({"model": {"w": torch.zeros(9)}, "values": {"of a callback": here}})
    got = loaded.state["values"]["of a callback"]
    assert got.dtype == saved.dtype and torch.equal(got, saved)
    assert not here.any(), "nothing is read into what does not fit"
    assert torch.equal(loaded.state["model"]["w"], torch.ones(9))


def test_an_empty_folder_is_a_new_run_and_makes_no_state(store) -> None:
    def never(info) -> dict:
        raise AssertionError("making an optimizer's state changes it")

    assert CheckpointEngine(store).load(never) is None
    assert CheckpointEngine(store).load(never, "never") is None


KINDS = {
    "bit flipped": "hash",
    "object truncated": "bytes, not",
    "object too long": "bytes, not",
    "object missing": "is missing",
    "manifest missing": "MANIFEST is missing",
    "manifest of another attempt": "hash|bytes",
    "data of another attempt": "hash",
    "commit torn": "cannot be read",
    "commit altered": "does not have the hash",
}


@pytest.mark.quick
def test_a_resumed_run_counts_milestones_from_where_it_resumes(tmp_path) -> None:
    folder = open_store(str(tmp_path))
    save(folder, 12, keep_every=10)
    save(folder, 13, 21, keep_every=10)
    summaries = [Ledger(folder).read(key).summary for key in Ledger(folder).newest_first()]
    assert [bool(summary.get("milestone")) for summary in summaries] == [True, False, True]


@pytest.mark.quick
@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_named_and_the_one_before_is_used(store, kind, caplog) -> None:
    save(store, 1, 2)
    damage(store, 2, kind)
    with caplog.at_level(logging.WARNING):
        loaded = CheckpointEngine(store).load(blank())
    check(loaded, 1)
    assert re.search(KINDS[kind], caplog.text) and len(loaded.rejected) == 1
    # the run goes on, commits step 2 again beside the damaged one, and that is the newest from now on
    save(store, 2, 3)
    check(CheckpointEngine(store).load(blank()), 3)
    damaged_again = CheckpointEngine(store).load(blank(), 2)
    check(damaged_again, 2)


@pytest.mark.parametrize("kind", ["bit flipped", "manifest missing"])
def test_if_all_are_damaged_nothing_starts_from_scratch(store, kind) -> None:
    save(store, 1, 2)
    damage(store, 1, kind)
    damage(store, 2, "object missing")
    with pytest.raises(DamagedError, match=r"no checkpoint in .* can be used: .*Nothing was deleted"):
        CheckpointEngine(store).load(blank())
    assert steps_in(store) == [2, 1]


def test_an_attempt_that_was_not_committed_does_not_exist(store) -> None:
    save(store, 1, 2)
    store.delete([CommitKey(generation=0, step=2).key])
    check(CheckpointEngine(store).load(blank()), 1)
    retention = Retention(Ledger(store))
    assert retention.collect(3600) == {} and len(retention.collect(-1, dry_run=True)) == 1
    assert len(retention.collect(-1)) == 1
    assert {entry.key.split("/")[1] for entry in store.scan("steps/")} == {"000000000001"}


def test_a_flipped_byte_on_the_way_is_fetched_again(s3, behind_proxy) -> None:
    save(s3, 5)
    flips = iter(["flip", "flip"])
    shaky, proxy = behind_proxy(s3, lambda method, path: next(flips, None) if ".bin" in path else None)
    check(CheckpointEngine(shaky).load(blank()), 5)
    assert proxy.seen["flip"] == 2


@pytest.mark.parametrize("fault", ["drop", "503", "stall"])
def test_a_commit_whose_answer_is_lost_counts(s3, behind_proxy, fault) -> None:
    struck = iter([fault])
    shaky, proxy = behind_proxy(
        s3, lambda method, path: next(struck, None) if method == "PUT" and "commits/" in path else None
    )
    save(shaky, 1)
    assert proxy.seen[fault] == 1
    check(CheckpointEngine(s3).load(blank()), 1)


def test_a_save_through_a_store_at_fault_is_whole(s3, behind_proxy) -> None:
    turn = iter(range(10**6))
    faults = ("503", None, "cut", None, "drop", None, None)
    shaky, proxy = behind_proxy(s3, lambda method, path: faults[next(turn) % len(faults)])
    save(shaky, 1, 2, 3)
    check(CheckpointEngine(shaky).load(blank()), 3)
    assert sum(proxy.seen.values()) > 5


def test_two_runs_in_one_folder_are_told_and_the_first_commit_stays(store) -> None:
    first, second = CheckpointEngine(store), CheckpointEngine(store)
    first.save(make_state(1), 1)
    assert first.wait().error is None
    second.save(make_state(2), 1)
    report = second.wait()
    assert "committed" in report.error and "another run" in report.error and "folder of its own" in report.error
    check(CheckpointEngine(store).load(blank()), 1)


class Failing:
    """A store whose writes of data fail while `error` is set."""

    def __init__(self, store, error: StoreError | None) -> None:
        self._store, self.error = store, error

    def __getattr__(self, name):
        return getattr(self._store, name)

    def put(self, key, data) -> None:
        if self.error is not None and "/data/" in key:
            raise self.error
        self._store.put(key, data)


def test_failures_are_told_and_end_training_only_when_they_go_on(store) -> None:
    failing = Failing(store, None)
    engine = CheckpointEngine(failing, policy=Policy(max_failures=2))
    engine.save(make_state(1), 1)
    assert engine.wait().error is None
    failing.error = StoreError("could not write: the disk is full")
    engine.save(make_state(2), 2)
    assert "disk is full" in engine.wait().error
    failing.error = None
    engine.save(make_state(3), 3)
    assert engine.wait().error is None and engine.failures_in_a_row == 0
    failing.error = StoreError("could not write: the disk is full")
    engine.save(make_state(4), 4)
    engine.wait()
    engine.save(make_state(5), 5)
    with pytest.raises(TooManyFailuresError, match=r"2 saves in a row failed.*newest checkpoint.*step 3.*disk is full"):
        engine.wait()
    check(CheckpointEngine(store).load(blank()), 3)
    assert {entry.key.split("/")[1] for entry in store.scan("steps/")} == {"000000000001", "000000000003"}


def test_a_slow_store_does_not_block_training(store) -> None:
    gate = threading.Event()

    class Slow(Failing):
        def put(self, key, data) -> None:
            gate.wait(30)
            self._store.put(key, data)

    engine = CheckpointEngine(Slow(store, None))
    engine.save(make_state(1), 1)
    assert engine.busy and engine.poll() is None  # a save that waited for the store would have committed
    assert steps_in(store) == []
    gate.set()
    assert engine.wait().error is None and not engine.busy and steps_in(store) == [1]


def test_retention_keeps_the_newest_and_the_milestones(store) -> None:
    engine = save(store, 3, keep=2, keep_every=10)
    for step in (6, 9, 12, 15, 18, 21, 24, 27, 29):
        engine.save(make_state(step), step)
        assert engine.wait().error is None
    assert steps_in(store) == [29, 27, 21, 12]
    present = {int(entry.key.split("/")[1]) for entry in store.scan("steps/")}
    assert present == {29, 27, 21, 12}
    resumed = save(store, 30, keep=1, keep_every=10)
    assert steps_in(store) == [30, 21, 12] and resumed.generation == 0


def test_resume_at_a_step_forks_once_and_restarts_follow_the_fork(store) -> None:
    save(store, 1, 2, 3)
    engine = CheckpointEngine(store, policy=Policy(keep=10))
    check(engine.load(blank(), 1), 1)
    engine.save(make_state(2), 2)
    assert engine.wait().error is None
    restarted = CheckpointEngine(store, policy=Policy(keep=10))
    check(restarted.load(blank(), "auto"), 2)
    restarted.save(make_state(3), 3)
    assert restarted.wait().error is None
    again = CheckpointEngine(store, policy=Policy(keep=1))
    check(again.load(blank(), 1), 3)
    again.save(make_state(4), 4)
    again.wait()
    assert steps_in(store) == [4]
    check(CheckpointEngine(store).load(blank(), 1), 4)
    check(CheckpointEngine(store).load(blank(), "auto"), 4)
    with pytest.raises(CheckpointError, match="holds no checkpoint of step 2; it holds: 4"):
        CheckpointEngine(store).load(blank(), 2)
    with pytest.raises(CheckpointError, match="holds 1 checkpoints up to step 4, and resume is never"):
        CheckpointEngine(store).load(blank(), "never")


def test_another_model_is_told_by_its_tensors_and_changes_nothing(store) -> None:
    save(store, 1)
    state = blank()
    state["model"]["dense"] = torch.zeros(64, 65)
    state["model"]["new"] = torch.zeros(3)
    del state["model"]["experts"]
    with pytest.raises(MismatchError) as error:
        CheckpointEngine(store).load(state)
    for words in (
        "model.dense is float32 [64, 65] here and float32 [64, 64] there",
        "model.new is not in the checkpoint",
        "model.experts [4, 16, 64] is not in this model",
        "Nothing was loaded",
    ):
        assert words in str(error.value)
    assert float(state["model"]["view"].abs().sum()) == 0
    assert len(str(error.value)) < 1000


def test_staging_memory_is_taken_once() -> None:
    snapshotter = Snapshotter(0, 1)
    state = {"model": {"w": torch.zeros(1_000_000)}}
    first = snapshotter.take(state).staged.raw.data_ptr()
    assert snapshotter.take(state).staged.raw.data_ptr() == first


def test_manifests_and_commits_are_plain_json(store) -> None:
    save(store, 1)
    record = json.loads(store.get(CommitKey(generation=0, step=1).key))
    assert record["step"] == 1 and record["summary"]["world_size"] == 1
    raw = store.get(f"{record['attempt']}/MANIFEST")
    assert raw.startswith(b"foundry-moe checkpoint 1\n")
    source = Path(commits_module.__file__).parent
    reads = [path.name for path in source.glob("*.py") if re.search(r"import pickle|torch\.load", path.read_text())]
    # what a person asks to import may be of another format, ranks send each other errors by pickle, and a planner
    # of PyTorch's pickles the values that its own process saves before the writer sees them
    assert set(reads) <= {"importing.py", "collective_errors.py", "dcp_writer.py"}


def test_the_engine_needs_no_trainer() -> None:
    script = (
        "import sys, foundry_moe.checkpoint.engine, foundry_moe.checkpoint.store_s3; "
        "assert not {'composer', 'llmfoundry'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, env=os.environ)
