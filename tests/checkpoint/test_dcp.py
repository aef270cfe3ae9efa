"""Writer and Reader under torch.distributed.checkpoint's default planners, as any program uses them."""

from __future__ import annotations

import datetime
import inspect
import math
import os
import pickle
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    _EmptyStateDictLoadPlanner,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.testing._internal.distributed.fake_pg import FakeStore

from foundry_moe.checkpoint import Reader, Writer, open_store
from foundry_moe.checkpoint.dcp_writer import _digest
from foundry_moe.checkpoint.engine import CheckpointEngine
from foundry_moe.checkpoint.errors import CheckpointError, DamagedError
from foundry_moe.checkpoint.ledger import Ledger
from foundry_moe.checkpoint.range_reads import verify
from foundry_moe.launch.processes import run_processes
from tests.checkpoint import dcp_worker
from tests.helpers import checkpoints
from tests.helpers.forged_manifests import MANIFESTS
from tests.helpers.forging import forge_manifest
from tests.helpers.launching import PRELOAD
from tests.helpers.older_formats import FIXTURES
from tests.helpers.older_formats import make_state as make_fixture

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Counter:
    """A Stateful object."""

    def __init__(self, count: int) -> None:
        self.count, self.history = count, torch.arange(500) * count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "history": self.history}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count, self.history = state["count"], state["history"]


def make_state(step: int) -> dict[str, Any]:
    ramp = torch.arange(3000, dtype=torch.float32)
    return {
        "model": {
            "experts": (ramp.reshape(3, 20, 50) + step).to(torch.bfloat16),
            "turned": (ramp + step).reshape(60, 50).t(),
            "scalar": torch.tensor(float(step)),
            "empty": torch.empty(0, 7),
        },
        "optim": {"param_groups": [{"lr": 0.1 * step, "betas": (0.9, 0.95), "more": [torch.ones(300) * step]}]},
        "numbers": [step, math.inf, None, True],
        "array": np.arange(4) * step,
        "bytes": b"\0\1",
        "time": datetime.timedelta(seconds=step),
        "counter": Counter(step),
    }


def check(state: dict[str, Any], step: int) -> None:
    expected = make_state(step)
    for name, tensor in expected["model"].items():
        assert state["model"][name].dtype == tensor.dtype and torch.equal(state["model"][name], tensor), name
    groups, wanted = state["optim"]["param_groups"][0], expected["optim"]["param_groups"][0]
    assert torch.equal(groups["more"][0], wanted["more"][0])
    assert (groups["lr"], groups["betas"]) == (wanted["lr"], wanted["betas"])
    assert np.array_equal(state["array"], expected["array"])
    for name in ("numbers", "bytes", "time"):
        assert state[name] == expected[name], name


def save(store, *steps: int, **keys: Any) -> Writer:
    writer = Writer(store.url, options=store.options, **keys)
    for step in steps:
        dcp.save(make_state(step), storage_writer=writer, checkpoint_id=str(step))
    return writer


def test_a_nested_state_comes_back_with_its_stateful_objects(store) -> None:
    save(store, 1, 2)
    state, reader = make_state(0), Reader(store.url, options=store.options)
    assert reader.steps() == [2, 1]
    dcp.load(state, storage_reader=reader)
    check(state, 2)
    assert state["counter"].count == 2 and torch.equal(state["counter"].history, torch.arange(500) * 2)
    assert reader.step == 2
    dcp.load(state, storage_reader=reader, checkpoint_id="1")
    check(state, 1)
    assert reader.step == 1
    ledger = Ledger(store)
    assert not any(verify(store, ledger.open(key)) for key in ledger.newest_first())


def test_a_state_is_rebuilt_from_the_checkpoint_alone_as_format_utils_does(tmp_path) -> None:
    store = open_store(str(tmp_path))
    save(store, 3)
    state: dict[str, Any] = {}
    _load_state_dict(state, Reader(store.url), no_dist=True, planner=_EmptyStateDictLoadPlanner())
    check(state, 3)
    assert state["counter"]["count"] == 3


def test_a_step_that_nobody_names_is_the_next_and_keep_counts(tmp_path) -> None:
    writer = Writer(tmp_path, keep=2)
    for step in (1, 2, 3):
        dcp.save(make_state(step), storage_writer=writer)
    assert Reader(tmp_path).steps() == [2, 1], "0, 1, 2 were written"
    for step, left in {1: [1, 2], 0: [0, 1]}.items():  # the program goes back, lastly to a step that is gone
        dcp.save(make_state(step), storage_writer=writer, checkpoint_id=str(step))
        state = make_state(9)
        dcp.load(state, storage_reader=Reader(tmp_path))
        check(state, step)
        assert Reader(tmp_path).steps() == left


def test_a_model_without_a_name_of_its_own_is_known_by_all_tensors() -> None:
    def digest(**tensors: torch.Tensor) -> str:
        return _digest([create_default_local_save_plan(tensors, is_coordinator=True)])

    one, other = torch.ones(2), torch.ones(3)
    assert digest(w=one) != digest(w=other) and digest(w=one) != digest(v=one)
    named = {"model.w": one, "optim.w": one}
    assert digest(**named) == digest(**named | {"optim.w": other}) != digest(**named | {"model.w": other})


@pytest.mark.quick
def test_a_save_that_failed_on_a_rank_leaves_nothing_once_the_next_begins(tmp_path, monkeypatch) -> None:
    writer, write = Writer(tmp_path), Writer.write_data

    def fail(self: Writer, *arguments: Any) -> Any:
        write(self, *arguments)
        raise OSError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(Writer, "write_data", fail)
        assert "no memory" in failure(lambda: dcp.save(make_state(1), storage_writer=writer, checkpoint_id="1"))
    dcp.save(make_state(2), storage_writer=writer, checkpoint_id="2")
    assert [path.name for path in (tmp_path / "steps").iterdir()] == [f"{2:012d}"]


@pytest.mark.quick
def test_a_reader_that_found_nothing_finds_what_is_saved_later(tmp_path) -> None:
    reader, state = Reader(tmp_path), make_state(0)
    assert "holds no checkpoint" in failure(lambda: dcp.load(state, storage_reader=reader))
    dcp.save(make_state(3), storage_writer=Writer(tmp_path), checkpoint_id="3")
    dcp.load(state, storage_reader=reader)
    check(state, 3)


@pytest.mark.quick
@pytest.mark.parametrize("alone", [True, False])
def test_ranks_that_load_separately_do_not_fall_back_separately(tmp_path, alone: bool) -> None:
    """Two of four ranks: one may find the newest commit damaged that the other has loaded."""
    writer, state = Writer(tmp_path), {"w": torch.arange(3000.0)}
    for step in ("1", "2"):
        dcp.save(state, storage_writer=writer, checkpoint_id=step)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        reader, planner = Reader(tmp_path), DefaultLoadPlanner()
        planner.set_up_planner({"w": torch.zeros(3000)}, reader.read_metadata(), is_coordinator=True)
        plan = planner.create_local_plan()
        (plan, *_) = reader.prepare_global_plan([plan] * (1 if alone else 2))
        checkpoints.damage(reader.ledger.store, 2, "bit flipped")
        if alone:
            reader.read_data(plan, planner)
            assert reader.step == 1
        else:
            with pytest.raises(DamagedError, match="do not have the recorded hash"):
                reader.read_data(plan, planner)
    finally:
        dist.destroy_process_group()


def test_the_engine_and_the_planners_load_what_the_other_has_saved(tmp_path) -> None:
    theirs, ours = open_store(str(tmp_path / "dcp")), open_store(str(tmp_path / "engine"))
    dcp.save(checkpoints.make_state(4), storage_writer=Writer(theirs.url), checkpoint_id="4")
    checkpoints.check(CheckpointEngine(theirs).load(checkpoints.blank()), 4)
    checkpoints.save(ours, 5)
    state = checkpoints.make_state(0)
    dcp.load(state, storage_reader=Reader(ours.url))
    for name, tensor in checkpoints.make_state(5)["model"].items():
        assert torch.equal(state["model"][name], tensor), name
    assert state["optim"]["groups"] == [{"lr": 0.5}] and state["values"]["tuple"] == (1, {"a": None})


@pytest.mark.parametrize("name", sorted(path.name for path in FIXTURES.iterdir()))
def test_planners_load_an_earlier_format(name: str, tmp_path: Path) -> None:
    expected, state = make_fixture(), make_fixture()
    for tensor in [*state["model"].values(), *state["optim"]["state"]["dense"].values()]:
        tensor.fill_(-1)
    state["values"]["step"] = -1
    dcp.load(state, storage_reader=Reader(FIXTURES / name))
    for tensor_name, tensor in expected["model"].items():
        assert torch.equal(state["model"][tensor_name], tensor), tensor_name
    assert torch.equal(*(s["optim"]["state"]["dense"]["exp_avg"] for s in (state, expected)))
    assert state["values"]["step"] == expected["values"]["step"]


def test_on_four_ranks_each_byte_is_fetched_once_into_other_placements(tmp_path) -> None:
    found = run_processes(
        dcp_worker.save_and_load, str(tmp_path / "run"), world_size=4, timeout_s=200.0, preload=PRELOAD
    )
    assert found["steps"] == [4, 3]
    for name, step in (("newest", 4), ("named", 3), ("damaged", 3)):
        assert (found[name]["step"], found[name]["problems"]) == (step, []), name
        assert found[name]["fetched"] <= 1.05 * found["bytes"], name
    assert found["engine"] == (4, [400, 401, 402, 403], 4)
    assert "more.1 is a builtins.slice, which a checkpoint cannot hold" in found["refused"]


def test_every_forged_manifest_is_damage_for_planners_too(tmp_path) -> None:
    store = open_store(str(tmp_path / "run"))
    checkpoints.save(store, 1, 2)
    kept = {entry.key: store.get(entry.key) for entry in store.scan() if "owners" not in entry.key}
    for name, change in MANIFESTS.items():
        for key, raw in kept.items():
            store.put(key, raw)
        forge_manifest(store, 2, change)
        Ledger(store).damaged.clear()  # of the case before
        state, reader = checkpoints.make_state(0), Reader(store.url)
        dcp.load({"model": state["model"]}, storage_reader=reader)
        assert reader.step == 1 and torch.equal(state["model"]["dense"], checkpoints.make_state(1)["model"]["dense"]), (
            name
        )


def failure(action) -> str:
    with pytest.raises((CheckpointException, CheckpointError, ValueError)) as caught:
        action()
    if isinstance(caught.value, CheckpointException):
        return "; ".join(str(reason) for reason, _ in caught.value.failures.values())
    return str(caught.value)


def test_what_cannot_be_done_is_a_sentence(tmp_path) -> None:
    folder = str(tmp_path / "run")

    def store_it(value: Any, **keys: Any) -> str:
        keys = {"storage_writer": Writer(folder), **keys}
        return failure(lambda: dcp.save({"x": {"y": value}}, **keys))

    assert "holds no checkpoint" in failure(lambda: dcp.load({"w": torch.ones(1)}, storage_reader=Reader(folder)))
    assert "x.y is a builtins.object, which a checkpoint cannot hold" in store_it(object())
    assert "must be the step, a whole number" in store_it(1, checkpoint_id="/tmp/elsewhere")
    if "use_collectives" in inspect.signature(dcp.save).parameters:  # not in PyTorch 2.7
        assert "omit it" in store_it(1, use_collectives=False)
    assert "keep (0) must be at least 1" in failure(lambda: Writer(folder, keep=0))
    writer, state = Writer(folder), {"w": torch.ones(100)}
    for again in (False, True):

        def with_cache() -> None:
            dcp.save(state, storage_writer=writer, planner=DefaultSavePlanner(enable_plan_caching=True))

        if again:
            assert "enable_plan_caching=True reuses the plan of an earlier save" in failure(with_cache)
        else:
            with_cache()
    wrong = {"w": torch.ones(101)}
    assert "Size mismatch" in failure(lambda: dcp.load(wrong, storage_reader=Reader(folder)))
    assert Reader(folder).steps() == [0]


def other_process(store, state: str, *words: str) -> subprocess.CompletedProcess:
    """A save of step 9 by a job of its own."""
    program = (
        "import sys, torch, torch.distributed.checkpoint as dcp; from foundry_moe.checkpoint import Writer;"
        "assert not {'composer', 'llmfoundry', 'boto3'} & set(sys.modules);"
        f"dcp.save({state}, storage_writer=Writer({store.url!r}, {', '.join(words)}), checkpoint_id='9')"
    )
    return subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, timeout=120)


def test_of_two_jobs_in_one_folder_one_is_refused_and_neither_loses_anything(tmp_path) -> None:
    store = open_store(str(tmp_path / "run"))
    state = {"model": {"w": torch.ones(100)}}
    first = Writer(store.url, run_name="first")
    dcp.save(state, storage_writer=first, checkpoint_id="1")
    # another run's first commit is refused
    refused = other_process(store, "{'model': {'w': torch.ones(101)}}")
    assert (
        refused.returncode == 1 and "and this run's model has other tensors: give this run a folder" in refused.stderr
    )
    dcp.save(state, storage_writer=first, checkpoint_id="2")
    # the same run, started again, takes over; the process before is refused at its next commit
    taken = other_process(store, "{'model': {'w': torch.ones(100)}}", "run_name='first'")
    assert taken.returncode == 0, taken.stderr
    for writer in (first, Writer(store.url, run_name="first")):  # a new writer of the old process is the old owner
        error = failure(lambda writer=writer: dcp.save(state, storage_writer=writer, checkpoint_id="10"))
        assert "another process has taken over: run 'first'" in error
    assert Reader(store.url).steps() == [9, 2, 1]
    assert not any(verify(store, Ledger(store).open(key)) for key in Ledger(store).newest_first())
    assert not Ledger(store).newest_first()[0].generation


def test_a_writer_goes_to_another_process_and_is_the_same_owner(tmp_path) -> None:
    writer = Writer(tmp_path / "run", keep=1)
    for step in (1, 2):  # as `async_save` with a process does for each save
        other = pickle.loads(pickle.dumps(writer))
        dcp.save({"w": torch.ones(100) * step}, storage_writer=other, checkpoint_id=str(step))
    assert Reader(tmp_path / "run").steps() == [2]
    assert len(list((tmp_path / "run" / "owners").glob("*.json"))) == 1


def test_a_save_in_a_thread_holds_what_was_there_at_its_call(tmp_path) -> None:
    state = {"w": torch.ones(3000)}
    future = dcp.async_save(state, storage_writer=Writer(tmp_path), checkpoint_id="1")
    state["w"].fill_(7)
    future.result()
    dcp.load(state, storage_reader=Reader(tmp_path))
    assert torch.equal(state["w"], torch.ones(3000))


def torchrun(processes: int, *program: str) -> str:
    """What a program prints under torchrun."""
    root = Path(__file__).parents[2]
    words = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    paths = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, *words, str(root / program[0]), *program[1:]],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


def test_a_save_in_a_process_of_pytorchs_is_a_commit_of_all_ranks(tmp_path) -> None:
    said = torchrun(2, "tests/checkpoint/process_saver.py", str(tmp_path / "run"))
    assert "steps [3, 2], loaded 3: [3.0]\n" in said
    assert re.search(r"refused: .*slice.*; steps \[3, 2\]\n", said, re.S), said
    assert len(list((tmp_path / "run" / "owners").glob("*.json"))) == 1, "one owner, whichever process saves"


def test_the_example_goes_on_with_two_processes_where_four_ended(tmp_path) -> None:
    """`examples/fsdp2_checkpoint.py` under torchrun, as its text says."""

    def launch(processes: int) -> str:
        return torchrun(processes, "examples/fsdp2_checkpoint.py", str(tmp_path / "run"))

    (total,) = re.findall(r"^saved step 3 on 4 processes, sum of weights (\S+)$", launch(4), re.M)
    two = launch(2)
    assert f"loaded step 3 on 2 processes, sum of weights {total}\n" in two
    assert "saved step 6 on 2 processes" in two


@pytest.mark.quick
def test_a_save_that_begins_during_another_does_not_mix_with_it(tmp_path) -> None:
    writer = Writer(tmp_path)

    def save(step: int, planner: DefaultSavePlanner | None = None) -> None:
        state = {"a": torch.full((3000,), step), "b": torch.full((3000,), step)}
        dcp.save(state, storage_writer=writer, checkpoint_id=step, planner=planner)

    class Slow(DefaultSavePlanner):
        def resolve_data(self, item: Any) -> Any:
            if item.index.fqn == "b":
                save(2)
            return super().resolve_data(item)

    assert "another save of this Writer began before this one ended" in failure(lambda: save(1, Slow()))
    state, reader = {"a": torch.zeros(3000), "b": torch.zeros(3000)}, Reader(tmp_path)
    assert reader.steps() == [2]
    dcp.load(state, storage_reader=reader)
    assert all(torch.equal(tensor, torch.full((3000,), 2.0)) for tensor in state.values())
    save(3)
    assert reader.steps() == [3, 2]


@pytest.mark.quick
def test_saves_in_threads_keep_their_steps(tmp_path) -> None:
    writer = Writer(tmp_path)
    begin, began, saved = writer.set_up_storage_writer, threading.Event(), threading.Event()

    def wait(*arguments: Any, **keys: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            began.set()
            assert saved.wait(60)
        begin(*arguments, **keys)

    writer.set_up_storage_writer = wait  # type: ignore[method-assign]
    first = threading.Thread(target=lambda: dcp.save({"w": 1}, storage_writer=writer, checkpoint_id="1"))
    first.start()
    assert began.wait(60)
    dcp.save({"w": 2}, storage_writer=writer, checkpoint_id="2")
    writer.reset("3")  # as `async_save` does in the caller's thread
    saved.set()
    first.join()
    state = {"w": 0}
    dcp.load(state, storage_reader=Reader(tmp_path), checkpoint_id="1")
    assert state == {"w": 1} and sorted(Reader(tmp_path).steps()) == [1, 2]
