"""What deletion must never touch, whatever somebody has put into the folder and whoever else deletes meanwhile."""

from __future__ import annotations

import json
import logging
import re
import time

import pytest

from foundry_moe.checkpoint import open_store
from foundry_moe.checkpoint.committer import Retention
from foundry_moe.checkpoint.engine import CheckpointEngine, Policy
from foundry_moe.checkpoint.errors import CheckpointError, DamagedError
from foundry_moe.checkpoint.ledger import Ledger
from foundry_moe.checkpoint.owners import Identity
from foundry_moe.checkpoint.records import Commit, CommitKey, file_hash
from foundry_moe.checkpoint.store_file import FileStore
from tests.helpers import faults
from tests.helpers.checkpoints import blank, check, damage, make_state, save, steps_in


@pytest.fixture
def at(monkeypatch):
    """`at(point, action)`: runs the action once when the engine is at a named point."""

    def arrange(point: str, action) -> None:
        left = [action]

        def hook(name: str) -> None:
            if name == point and left:
                left.pop()()

        faults.install(hook, monkeypatch.setattr)

    return arrange


def forge(store, key: CommitKey, attempt: str) -> None:
    """A record of another's making whose hash is right."""
    body = json.loads(
        Commit(where=key, attempt=attempt, nonce="0" * 16, manifest_bytes=9, manifest_hash="0" * 32).to_bytes()
    )
    body.pop("xxh3")
    store.put(key.key, json.dumps({**body, "xxh3": file_hash(json.dumps(body, sort_keys=True).encode())}).encode())


def start(folder, *, keep: int) -> CheckpointEngine:
    """A new process of the folder's run."""
    engine = CheckpointEngine(open_store(str(folder)), policy=Policy(keep=keep))
    engine.load(blank)
    engine.acquire(Identity(run_name="run", model="m"))
    return engine


@pytest.mark.quick
def test_a_lower_keep_frees_room_when_a_run_starts(tmp_path) -> None:
    engine = start(tmp_path, keep=3)
    for step in (1, 2, 3):
        engine.save(make_state(step), step)
        engine.wait()
    engine.close()
    start(tmp_path, keep=1).close()
    store = open_store(str(tmp_path))
    assert steps_in(store) == [3]
    assert {entry.key.split("/")[1] for entry in store.scan("steps/")} == {"000000000003"}


@pytest.mark.quick
def test_a_load_without_a_lease_deletes_nothing(tmp_path) -> None:
    store = open_store(str(tmp_path))
    save(store, 1, 2, 3)
    CheckpointEngine(store, policy=Policy(keep=1)).load(blank)
    assert steps_in(store) == [3, 2, 1]


@pytest.mark.quick
def test_the_commit_that_a_run_resumed_from_stays_though_newer_ones_exist(tmp_path) -> None:
    save(open_store(str(tmp_path)), 1, 2, 3)
    engine = CheckpointEngine(open_store(str(tmp_path)), policy=Policy(keep=1))
    engine.load(blank, 1)
    engine.acquire(Identity(run_name="run", model="m"))
    engine.close()
    assert steps_in(open_store(str(tmp_path))) == [3, 1]


@pytest.mark.quick
@pytest.mark.parametrize(("keep", "left"), [(2, [4, 3]), (1, [4, 3])])
def test_a_save_without_room_deletes_old_commits_before_it_writes(tmp_path, monkeypatch, keep, left) -> None:
    engine = start(tmp_path, keep=3)
    for step in (1, 2, 3):
        engine.save(make_state(step), step)
        engine.wait()
    engine.policy, engine._committer.keep = Policy(keep=keep), keep
    size = engine.ledger.read(engine.ledger.newest_first()[0]).summary["bytes"]
    disk = 4 * size - 1  # of four checkpoints

    def free_bytes(store) -> int:
        return disk - sum(entry.size_bytes for entry in store.scan("steps/"))

    monkeypatch.setattr(FileStore, "free_bytes", free_bytes)
    at_begin = []
    monkeypatch.setattr(
        engine._committer, "begin", lambda *a, **k: at_begin.append(steps_in(engine.ledger.store)) or begin(*a, **k)
    )
    begin = type(engine._committer).begin.__get__(engine._committer)
    engine.save(make_state(4), 4)
    assert engine.wait().error is None
    assert at_begin == [[3]]
    assert steps_in(engine.ledger.store) == left[:keep]


@pytest.mark.quick
def test_a_disk_that_stays_full_is_a_sentence_with_both_sizes_and_the_newest_commit_stays(
    tmp_path, monkeypatch
) -> None:
    engine = start(tmp_path, keep=2)
    for step in (1, 2):
        engine.save(make_state(step), step)
        engine.wait()
    monkeypatch.setattr(FileStore, "free_bytes", lambda store: 1234)
    engine.save(make_state(3), 3)
    error = engine.wait().error
    assert re.search(r"disk is full: a checkpoint needs [0-9,]{5,} bytes, and .* has 1,234 bytes free", error), error
    assert steps_in(engine.ledger.store) == [2]
    assert {entry.key.split("/")[1] for entry in engine.ledger.store.scan("steps/")} == {"000000000002"}


VICTIMS = ["../victim", "steps", "commits", "", ".", "steps/000000000001", "steps/000000000001/../../../victim"]


@pytest.mark.parametrize("attempt", VICTIMS)
def test_a_record_that_names_something_else_deletes_nothing(store, attempt) -> None:
    parent = open_store(store.url.rpartition("/")[0], store.options)
    parent.put("victim/precious", b"1")
    save(store, 1, 2, 3)
    before = {entry.key for entry in store.scan()}
    forge(store, CommitKey(generation=0, step=0), attempt)
    retention = Retention(Ledger(store))
    retention.retain(3)
    retention.collect(-1)
    after = {entry.key for entry in store.scan()}
    assert before <= after and parent.get("victim/precious") == b"1"
    with pytest.raises(CheckpointError, match="is not the name of an attempt"):
        retention.delete_attempt(attempt)
    parent.delete(["victim/precious"])


def test_a_record_that_names_anothers_data_does_not_take_it_along(store) -> None:
    save(store, 1, 2, 3)
    ledger = Ledger(store)
    good = ledger.read(CommitKey(generation=0, step=2)).attempt
    forge(store, CommitKey(generation=0, step=0), good)  # of another step
    store.put(
        CommitKey(generation=1, step=2).key,
        Commit(
            where=CommitKey(generation=1, step=2), attempt=good, nonce="n", manifest_bytes=1, manifest_hash="0" * 32
        ).to_bytes(),
    )  # of the same step; it sorts as the newest, and cannot be opened
    Retention(ledger).retain(1)
    assert any(entry.key.startswith(f"{good}/data/") for entry in store.scan("steps/"))


def test_a_linked_attempt_is_left_alone_with_what_it_points_to(tmp_path, caplog) -> None:
    store = open_store(str(tmp_path / "run"))
    save(store, 1, 2, 3)
    outside = tmp_path / "outside"
    real = tmp_path / "run" / Ledger(store).read(CommitKey(generation=0, step=1)).attempt
    real.rename(outside)
    real.symlink_to(outside)
    with pytest.raises(DamagedError, match="is a symbolic link"):
        Ledger(store).open(CommitKey(generation=0, step=1))
    retention = Retention(Ledger(store))
    retention.collect(-1)
    retention.retain(1)
    assert steps_in(store) == [3]
    assert (outside / "MANIFEST").exists() and list((outside / "data").iterdir())
    assert "is a symbolic link" in caplog.text


def test_junk_among_the_commits_costs_no_good_one(store, caplog) -> None:
    engine = save(store, 1, 2, keep=3)
    for step in (1, 2, 3):
        store.put(f"commits/999999-{step:012d}.json", b"{}")
    forge(store, CommitKey(generation=999998, step=9), "steps/000000000009/20260101T000000-deadbeef")
    with caplog.at_level(logging.WARNING):
        for step in (3, 4, 5):
            engine.save(make_state(step), step)
            assert engine.wait().error is None
    good = [key.step for key in Ledger(store).newest_first() if key.generation == 0]
    assert good == [5, 4, 3]
    assert caplog.text.count("passed over commits/999999-000000000001.json") == 1, "said, and once"
    assert "MANIFEST is missing" in caplog.text
    loaded = CheckpointEngine(store).load(blank())
    check(loaded, 5)
    # who resumes passes over the junk too, and what it commits is the newest
    save(store, 6, keep=2)
    check(CheckpointEngine(store).load(blank()), 6)
    assert [key.step for key in Ledger(store).newest_first() if key.generation in (0, 10**6)] == [6, 5]


@pytest.mark.parametrize("kind", ["object missing", "manifest missing", "commit torn", "object truncated"])
def test_damaged_commits_do_not_count(store, kind) -> None:
    save(store, 1, 2, 3)
    for step in (2, 3):
        damage(store, step, kind)
    Retention(Ledger(store)).retain(1)
    assert 1 in steps_in(store)
    check(CheckpointEngine(store).load(blank()), 1)


def test_the_commit_just_made_stays_though_others_sort_as_newer(store) -> None:
    """As when a second run, which has forked, commits to the folder of a first."""
    old, new = CheckpointEngine(store, policy=Policy(keep=1)), CheckpointEngine(store, policy=Policy(keep=9))
    new.generation = 5
    for step in (1, 2):
        new.save(make_state(step), step)
        assert new.wait().error is None
    old.save(make_state(7), 7)
    assert old.wait().error is None
    check(CheckpointEngine(store).load(blank(), 7), 7)


def gc(store, older_than_s: float = -1.0) -> dict[str, int]:
    """Another process's `gc`, to which all is old enough."""
    return Retention(Ledger(open_store(store.url, store.options))).collect(older_than_s)


@pytest.mark.parametrize("point", ["save.written", "commit.sizes_checked", "commit.manifest_written"])
def test_a_save_whose_data_was_collected_under_it_is_not_reported_as_good(store, at, point) -> None:
    engine = save(store, 1)
    at(point, lambda: gc(store))
    engine.save(make_state(2), 2)
    report = engine.wait()
    assert report.error is not None and steps_in(store) == [1]
    check(CheckpointEngine(store).load(blank()), 1)
    engine.save(make_state(3), 3)
    assert engine.wait().error is None
    check(CheckpointEngine(store).load(blank()), 3)


def test_gc_leaves_a_living_run_alone_and_clears_up_after_a_dead_one(store, at) -> None:
    dead = "steps/000000000001/20260101T000000-deadbeef/data/000000.bin"
    store.put(dead, b"12345")
    time.sleep(1.1)  # S3 has whole seconds
    engine = CheckpointEngine(store)
    engine.acquire(Identity(run_name="a"))
    found = []
    at("commit.sizes_checked", lambda: found.append(gc(store)))
    engine.save(make_state(2), 2)
    assert engine.wait().error is None
    assert [sorted(gone) for gone in found] == [[dead.rpartition("/data/")[0]]]
    check(CheckpointEngine(store).load(blank()), 2)
    store.delete([CommitKey(generation=0, step=2).key])
    assert gc(store) == {}
    engine.close()
    assert len(gc(store)) == 1, "the owner has ended"


def test_ages_are_of_the_stores_clock(tmp_path, at, monkeypatch) -> None:
    """A host whose clock is hours ahead collects nothing that was written just now."""
    store = open_store(str(tmp_path / "run"))
    engine = save(store, 1)
    found = []
    at("commit.sizes_checked", lambda: found.append(gc(store, 3600.0)))
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 5 * 3600)
    engine.save(make_state(2), 2)
    assert engine.wait().error is None and found == [{}]
