"""A folder belongs to one run, and to the process of that run which came last."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from foundry_moe.checkpoint import open_store
from foundry_moe.checkpoint.collective_errors import portable
from foundry_moe.checkpoint.engine import CheckpointEngine, Policy
from foundry_moe.checkpoint.errors import CheckpointError, DamagedError, MismatchError, OwnedError, TakenOverError
from foundry_moe.checkpoint.ledger import Ledger
from foundry_moe.checkpoint.owners import Heartbeat, Identity, Lease, Owners, tensors_digest
from foundry_moe.checkpoint.records import CommitKey
from tests.helpers.checkpoints import blank, check, make_state, steps_in

A, B = Identity(run_name="a", model="m"), Identity(run_name="b", model="m")


class Clock:
    """A store whose clock a test moves."""

    def __init__(self, store) -> None:
        self._store, self.ahead_s = store, 0.0

    def __getattr__(self, name):
        return getattr(self._store, name)

    def now_s(self) -> float:
        return self._store.now_s() + self.ahead_s


def lease(store, identity: Identity, *, commits: bool = False) -> Lease:
    return Owners(store).acquire(identity, has_commits=lambda: commits)


def start(store, identity: Identity, **policy) -> CheckpointEngine:
    engine = CheckpointEngine(store, policy=Policy(**{"keep": 10, **policy}))
    engine.load(blank())
    engine.acquire(identity)
    return engine


def test_a_lease_whose_answer_is_lost_is_held_and_has_a_heartbeat_from_the_start(tmp_path, monkeypatch) -> None:
    store = open_store(str(tmp_path))
    put_new = store.put_new

    def lose_answer(key, data) -> bool:
        assert any(entry.key.endswith(".beat") for entry in store.scan("owners/")), "without one it counts as dead"
        put_new(key, data)
        return False  # as the retry of a request whose answer was lost

    monkeypatch.setattr(store, "put_new", lose_answer)
    assert lease(store, A).number == 1 and Owners(store).newest().number == 1


def test_a_second_run_is_refused_at_its_start(store) -> None:
    lease(store, A)
    with pytest.raises(
        OwnedError, match=r"to run 'a' \(process \d+ on .*\), whose heartbeat is .*this is run 'b': give"
    ):
        lease(store, B)


@pytest.mark.quick
def test_a_start_that_is_refused_before_it_trains_leaves_the_folder_to_the_running_process(tmp_path) -> None:
    store = open_store(str(tmp_path))
    first = start(store, A)
    for step in (1, 2):
        first.save(make_state(step), step)
        assert first.wait().error is None
    other = CheckpointEngine(store, policy=Policy(keep=1))
    other.check_owner(A)
    check(other.load(blank()), 2)
    other.close()
    first.save(make_state(3), 3)
    assert first.wait().error is None and steps_in(store) == [3, 2, 1]
    with pytest.raises(OwnedError, match="this is run 'b'"):
        other.check_owner(B)


@pytest.mark.quick
@pytest.mark.parametrize("begun", [0, 1])
def test_a_step_that_the_older_process_saves_during_a_start_is_that_of_the_next_start(begun, tmp_path) -> None:
    store = open_store(str(tmp_path))
    first = start(store, A)
    for step in range(1, begun + 1):
        first.save(make_state(step), step)
        assert first.wait().error is None
    second = CheckpointEngine(store)
    second.check_owner(A)
    second.load(blank())
    first.save(make_state(begun + 1), begun + 1)
    assert first.wait().error is None
    with pytest.raises(CheckpointError, match=f"has saved step {begun + 1} to .*: start again, to continue from there"):
        second.acquire(A)
    second.close()
    first.save(make_state(begun + 2), begun + 2)
    with pytest.raises(TakenOverError):
        first.wait()
    third = CheckpointEngine(store)
    third.check_owner(A)
    assert third.load(blank()).step == begun + 1
    third.acquire(A)
    third.save(make_state(begun + 2), begun + 2)
    assert third.wait().error is None
    assert Ledger(store).newest_first()[0] == CommitKey(generation=0, step=begun + 2)


def test_a_restart_takes_over_at_once_and_the_older_process_stops(store) -> None:
    first = start(store, A)
    first.save(make_state(1), 1)
    assert first.wait().error is None
    second = start(store, A)
    check(second.load(blank()), 1)
    first.save(make_state(2), 2)
    with pytest.raises(TakenOverError, match="another process has taken over: run 'a'"):
        first.wait()
    assert steps_in(store) == [1]
    assert {entry.key.split("/")[1] for entry in store.scan("steps/")} == {"000000000001"}
    second.save(make_state(2), 2)
    assert second.wait().error is None and steps_in(store) == [2, 1]
    assert second._committer.lease.run == first._committer.lease.run, "one run in all its lives"


def test_who_is_taken_over_while_it_writes_commits_and_deletes_nothing(store, monkeypatch) -> None:
    first = start(store, A, keep=1)
    for step in (1, 2):
        first.save(make_state(step), step)
        assert first.wait().error is None
    real, others = first.ledger.size_problems, []

    def meanwhile(*arguments):
        others.append(start(store, A))
        return real(*arguments)

    monkeypatch.setattr(first.ledger, "size_problems", meanwhile)
    first.save(make_state(3), 3)
    with pytest.raises(TakenOverError):
        first.wait()
    assert steps_in(store) == [2] and others


def test_the_heartbeat_notices_it_between_two_saves(store, caplog) -> None:
    owners = Owners(store)
    mine = lease(store, A)
    heartbeat = Heartbeat(owners, mine, every_s=0.05)
    lease(store, A)
    heartbeat._thread.join(30)
    assert heartbeat.lost is not None and "another process has taken over" in caplog.text


def test_a_name_that_nobody_gave_and_a_model_without_a_digest_agree_with_any(store) -> None:
    identities = (Identity(), A, Identity(model="m"), Identity(run_name="a"))
    names = [lease(store, identity, commits=True).run_name for identity in identities]
    assert names == ["", "a", "a", "a"], "who gives no name keeps the run's"
    with pytest.raises(OwnedError, match="this is run 'b'"):
        lease(store, B)


def test_a_name_that_a_lease_cannot_hold_is_cut_for_its_restarts_too(store) -> None:
    long = Identity(run_name="a\n" + "b" * 2000)
    assert lease(store, long).run_name == lease(store, long).run_name == "a" + "b" * 999
    with pytest.raises(OwnedError, match="this is run 'ab'"):
        lease(store, Identity(run_name="ab"))


def test_the_dead_are_passed_over_only_where_they_left_nothing(store) -> None:
    clock = Clock(store)
    lease(clock, A)
    clock.ahead_s = 3600.0
    with pytest.raises(OwnedError, match="not running now, and this is run 'b'"):
        lease(clock, B, commits=True)
    assert lease(clock, B).run_name == "b"
    with pytest.raises(OwnedError):
        lease(store, A)


def test_a_folder_that_was_freed_is_anyones_and_its_owner_stops(store) -> None:
    first = start(store, A)
    assert Owners(store).release().run_name == "a" and Owners(store).release() is None
    first.save(make_state(1), 1)
    with pytest.raises(TakenOverError, match="the folder was released"):
        first.wait()
    assert lease(store, B, commits=True).number == 3


def test_another_model_is_refused_before_the_first_commit_and_told_by_tensors_after_it(store) -> None:
    def load(state) -> None:
        engine = CheckpointEngine(store)
        engine.check_owner(other)
        engine.load(state)

    other = Identity(run_name="a", model="other")
    first = start(store, A)
    with pytest.raises(OwnedError, match="this run's model has other tensors"):
        load(blank)
    first.save(make_state(1), 1)
    assert first.wait().error is None
    with pytest.raises(OwnedError, match="this run's model has other tensors"):
        load(blank)  # all tensors of the checkpoint fit, and the digest differs
    state = blank()
    state["model"]["dense"] = torch.zeros(3)
    with pytest.raises(MismatchError, match=r"model.dense is float32 \[3\] here"):
        load(state)
    with pytest.raises(OwnedError):
        start(store, other)
    first.save(make_state(2), 2)
    assert first.wait().error is None, "who was there goes on"


def test_a_models_digest_is_that_of_names_and_shapes() -> None:
    state = {"b": torch.zeros(2, 3), "a": torch.zeros(4)}
    same = {"a": torch.ones(4, dtype=torch.bfloat16), "b": torch.zeros(2, 3)}
    assert tensors_digest(state) == tensors_digest(same) != tensors_digest({**state, "a": torch.zeros(5)})


def test_of_many_that_start_at_once_one_owns_the_folder(store) -> None:
    with ThreadPoolExecutor(6) as pool:
        leases = list(pool.map(lambda _: lease(store, A), range(6)))
    assert len({item.number for item in leases}) == 6
    owners, last = Owners(store), max(leases, key=lambda item: item.number)
    owners.check(last)
    for item in leases:
        if item is not last:
            with pytest.raises(TakenOverError):
                owners.check(item)


def test_of_two_runs_that_start_at_once_one_is_refused(store) -> None:
    def enter(identity: Identity) -> str:
        try:
            return lease(store, identity).run_name
        except OwnedError:
            return "refused"

    with ThreadPoolExecutor(2) as pool:
        assert sorted(pool.map(enter, (A, B))) in (["a", "refused"], ["b", "refused"])


@pytest.mark.parametrize(
    "raw", [b"", b"{}", b"[1]", b"\xff", b"[" * 10**5, b'{"xxh3": "0", "number": 7}', b"9" * 99999]
)
def test_a_lease_that_cannot_be_read_is_passed_over(store, raw, caplog) -> None:
    for number in (1, 2, 7, 999999):
        store.put(f"owners/{number:06d}.json", raw)
    with pytest.raises(DamagedError):
        Lease.from_bytes(raw, "owners/000007.json")
    mine = lease(store, A)
    Owners(store).check(mine)
    assert mine.number == 3 and "Passed over owners/000007.json" in caplog.text
    assert lease(store, A).number == 4


def test_a_lease_under_the_number_of_another_is_passed_over(store, caplog) -> None:
    first = lease(store, A)
    store.put("owners/000007.json", first.to_bytes())
    assert Owners(store).newest() == first and "owners/000007.json: the lease is that of 1" in caplog.text
    Owners(store).check(first)


def test_who_lost_its_own_lease_sees_the_newer(store) -> None:
    first = lease(store, A)
    last = lease(store, A)
    with pytest.raises(TakenOverError):
        Owners(store).check(first)
    store.delete([entry.key for entry in store.scan("owners/")])
    Owners(store).check(last)
    assert Owners(store).newest() == last, "a lease that was removed is made again"


def test_these_errors_reach_other_ranks_whole() -> None:
    error = OwnedError("mine")
    error.model_differs = True
    arrived = pickle.loads(pickle.dumps(portable(error)))
    assert isinstance(arrived, OwnedError) and arrived.model_differs and str(arrived) == "mine"


WRITER = """
import sys, time
from foundry_moe.checkpoint.engine import CheckpointEngine, Policy
from foundry_moe.checkpoint.errors import CheckpointError, OwnedError, TakenOverError
from foundry_moe.checkpoint.owners import Identity
from foundry_moe.checkpoint import open_store
from tests.helpers.checkpoints import blank, check, make_state
folder, name, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
while True:
    engine = CheckpointEngine(open_store(folder), policy=Policy(keep=2))
    try:
        engine.check_owner(Identity(run_name=name))
        loaded = engine.load(blank())
        engine.acquire(Identity(run_name=name))
        break
    except OwnedError as error:
        sys.exit(f"refused: {error}")
    except CheckpointError as error:
        assert "start again" in str(error)  # the older process saved meanwhile
        engine.close()
begin = loaded.step if loaded else 0
if loaded:
    check(loaded, begin)
print("ready", begin, flush=True)
for step in range(begin + 1, begin + steps + 1):
    engine.save(make_state(step), step)
    try:
        report = engine.wait()
    except TakenOverError as error:
        sys.exit(f"taken over at {step}: {error}")
    if report.error is not None:  # the older process was at its record when this one took over
        assert step == begin + 1 and "that one is kept" in str(report.error), report
    print("saved", step, flush=True)
    time.sleep(0.05)
"""


def writer(folder, name: str, steps: int) -> subprocess.Popen:
    words = [sys.executable, "-c", WRITER, str(folder), name, str(steps)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ))


def test_two_processes_in_one_folder(tmp_path) -> None:
    """The older of one run's processes stops within two saves; another run's never begins; nothing saved is lost."""
    folder = tmp_path / "run"
    older = writer(folder, "a", 10**6)
    seen: list[str] = []
    first_saves = threading.Event()

    def listen() -> None:
        for line in older.stdout:
            seen.append(line.strip())
            if len(seen) > 3:
                first_saves.set()

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    assert first_saves.wait(60)
    stranger, newer = writer(folder, "b", 1), writer(folder, "a", 20)
    assert newer.stdout.readline().startswith("ready")
    begun = time.monotonic()
    saved_before = len(seen)
    older.wait(60)
    listener.join(10)
    assert time.monotonic() - begun < 30 and len(seen) - saved_before <= 2
    assert older.returncode == 1 and "another process has taken over: run 'a'" in older.stderr.read()
    _, refusal = stranger.communicate(timeout=60)
    assert stranger.returncode == 1 and "refused" in refusal and "belongs to run 'a'" in refusal
    out, err = newer.communicate(timeout=60)
    assert newer.returncode == 0, err
    last = int(out.split()[-1])
    store = open_store(str(folder))
    assert steps_in(store) == [last, last - 1]
    check(CheckpointEngine(store).load(blank()), last)
    for key in Ledger(store).newest_first():
        Ledger(store).open(key)
