"""In which order objects appear and go, and what of a save that failed stays."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from foundry_moe.checkpoint import committer as committer_module
from foundry_moe.checkpoint import open_store
from foundry_moe.checkpoint.committer import Committer, Retention
from foundry_moe.checkpoint.engine import CheckpointEngine, Policy
from foundry_moe.checkpoint.errors import CheckpointError, StoreError
from foundry_moe.checkpoint.ledger import Ledger
from foundry_moe.checkpoint.manifest import Manifest, object_key
from foundry_moe.checkpoint.owners import Identity, Owners
from foundry_moe.checkpoint.records import CommitKey
from tests.helpers.checkpoints import blank, check, damage, make_state, save, steps_in

pytestmark = pytest.mark.quick
HOUR_S = 3600.0


def attempts_in(store: Any) -> list[int]:
    """The step of each attempt that has data."""
    return sorted({int(entry.key.split("/")[1]) for entry in store.scan("steps/")})


@pytest.fixture
def store(tmp_path: Path) -> Any:
    return open_store(str(tmp_path))


def test_a_save_that_failed_leaves_its_data_only_if_its_record_may_exist(store: Any, monkeypatch: Any) -> None:
    engine = CheckpointEngine(store, policy=Policy(max_failures=9))
    put_new, put = store.put_new, store.put

    def lose_answer(key: str, data: bytes) -> bool:
        put_new(key, data)
        raise StoreError("the answer is lost")

    def refuse(key: str, data: bytes) -> None:
        put(key, data)
        raise StoreError("refused")

    with monkeypatch.context() as patch:
        patch.setattr(store, "put_new", lose_answer)
        engine.save(make_state(1), 1)
        assert "answer is lost" in engine.wait().error
    check(CheckpointEngine(store).load(blank()), 1)
    with monkeypatch.context() as patch:
        patch.setattr(store, "put", refuse)
        engine.save(make_state(2), 2)
        assert "refused" in engine.wait().error
    assert attempts_in(store) == [1]


def test_a_record_is_written_only_where_all_objects_are_there(store: Any) -> None:
    """The check after the record covers objects that go meanwhile; a crash in between would leave a damaged commit."""
    committer = Committer(Ledger(store), keep=None)
    attempt = committer.begin(CommitKey(generation=0, step=1), info={"world_size": 1})
    store.put(f"{attempt}/{object_key(0)}", bytes(63))
    store.put_new = lambda key, data: pytest.fail(f"{key} is written")
    objects = [(object_key(rank), 64) for rank in range(7)]
    with pytest.raises(CheckpointError, match="step 1 was not committed: ") as caught:
        committer.commit(Manifest(info=committer.info, objects=objects, tensors={}))
    assert "000000.bin has 63 bytes, not 64; " in str(caught.value) and "000001.bin is missing; " in str(caught.value)
    assert "000003.bin is missing; and 3 more; older" in str(caught.value)


def test_the_oldest_goes_first_and_its_record_before_its_data(store: Any, monkeypatch: Any) -> None:
    save(store, 1, 2, 3)
    retention, deleted = Retention(Ledger(store)), []
    assert [key.step for key in retention.retain(1, dry_run=True)] == [1, 2]
    delete = store.delete
    monkeypatch.setattr(store, "delete", lambda keys: delete(deleted.extend(keys := list(keys)) or keys))
    retention.retain(1)
    order = list(
        dict.fromkeys((key.split("/")[0], int(key.split("/")[1].removesuffix(".json")[-12:])) for key in deleted)
    )
    assert order == [("commits", 1), ("steps", 1), ("commits", 2), ("steps", 2)]


def test_a_commit_that_is_found_damaged_later_does_not_count(store: Any) -> None:
    save(store, 1, 2, 3)
    ledger = Ledger(store)
    retention = Retention(ledger)
    assert [key.step for key in retention.retain(2)] == [1]  # 2 and 3 were found good
    ledger.damaged.add(CommitKey(generation=0, step=3))
    assert retention.retain(1) == [] and steps_in(store) == [3, 2]


def test_damaged_commits_are_not_deleted_when_enough_newer_ones_are_there(store: Any) -> None:
    save(store, 1, 2, 3)
    retention = Retention(Ledger(store))
    damage(store, 3, "object missing")
    retention.ledger.damaged.add(CommitKey(generation=0, step=2))
    assert retention.retain(1) == []
    save(store, 4, 5)
    assert [key.step for key in retention.retain(1)] == [1, 4] and steps_in(store) == [5, 3, 2]


def test_an_attempt_is_collected_once_all_of_it_is_old_and_no_record_names_it(store: Any, monkeypatch: Any) -> None:
    save(store, 1, 2)
    growing, dead = (f"steps/000000000003/20260101T000000-{name * 8}" for name in "ad")
    for name in ("a/first", "a/last", "d/first"):
        store.put(f"{growing if name[0] == 'a' else dead}/data/{name[2:]}", b"1")
        if name != "a/last":
            path = store.root / (growing if name[0] == "a" else dead) / "data" / name[2:]
            os.utime(path, (path.stat().st_mtime - 9 * HOUR_S,) * 2)
    ledger = Ledger(store)
    retention = Retention(ledger)
    assert retention.collect(HOUR_S, dry_run=True) == {dead: 1}
    listed, whole = [ledger.newest_first()[1:]], ledger.newest_first()
    with monkeypatch.context() as patch:  # 2 is committed while attempts are looked at
        patch.setattr(ledger, "newest_first", lambda: listed.pop() if listed else whole)
        assert sorted(retention.collect(-1, dry_run=True)) == [growing, dead]
    damage(store, 2, "commit torn")
    assert sorted(retention.collect(-1, dry_run=True)) == [growing, dead], "a torn record may name its step's data"


def test_an_owner_removes_what_it_left_itself(store: Any) -> None:
    engine = CheckpointEngine(store, policy=Policy(stale_s=0.0))
    engine.acquire(Identity(run_name="a"))
    store.put("steps/000000000001/20260101T000000-deadbeef/data/000000.bin", b"1")
    engine.save(make_state(2), 2)
    assert engine.wait().error is None
    engine.close()
    assert attempts_in(store) == [2]


def test_who_is_taken_over_after_its_commit_deletes_nothing(store: Any, monkeypatch: Any, caplog: Any) -> None:
    engine = CheckpointEngine(store, policy=Policy(keep=1, asynchronous=False))
    engine.acquire(Identity(run_name="a"))
    engine.save(make_state(1), 1)
    clean_up = Committer.clean_up

    def meanwhile(committer: Committer) -> None:
        Owners(store).acquire(Identity(run_name="a"), has_commits=lambda: True)
        clean_up(committer)

    monkeypatch.setattr(Committer, "clean_up", meanwhile)
    engine.save(make_state(2), 2)
    assert steps_in(store) == [2, 1] and "another process has taken over" in caplog.text


def test_abandoned_attempts_are_looked_for_once_in_their_age(store: Any, monkeypatch: Any) -> None:
    """By a clock that nobody sets."""
    now_s, calls = [0.0], []
    clock = SimpleNamespace(monotonic=lambda: now_s[0], strftime=time.strftime, gmtime=time.gmtime)
    monkeypatch.setattr(committer_module, "time", clock)
    monkeypatch.setattr(Retention, "collect", lambda *_, **__: calls.append(now_s[0]) or {})
    engine = CheckpointEngine(store, policy=Policy(stale_s=100.0, asynchronous=False))
    for step, now_s[0] in enumerate((5.0, 105.0, 106.0, 206.0), 1):
        engine.save(make_state(step), step)
    assert calls == [5.0, 106.0]
