"""Loads on each rank of a launch while a rank fails at one step of the exchange; then loads again, undisturbed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from foundry_moe.checkpoint import exchange
from foundry_moe.checkpoint.engine import CheckpointEngine
from foundry_moe.checkpoint.errors import DamagedError, StoreError
from foundry_moe.checkpoint.exchange import Targets
from foundry_moe.checkpoint.ledger import Ledger
from foundry_moe.checkpoint.range_reads import Fetcher
from foundry_moe.checkpoint.store_file import FileStore

# 1 MiB on each of 4 ranks, which is read straight to its place if it is needed whole, and 16 KiB, which never is
SHAPES = [(512, 2048)] * 6 + [(64, 256)] * 8


class TwoPartError(Exception):
    """Cannot be made again from its message alone, so pickle brings it to no other rank."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


ERRORS: dict[str, Callable[[], Exception]] = {
    "device": lambda: torch.OutOfMemoryError("injected: the device has no memory"),
    "memory": lambda: MemoryError("injected: no memory"),
    "os": lambda: OSError(5, "injected: input/output error"),
    "bug": lambda: TwoPartError("injected:", "a bug"),
    "silent store": lambda: StoreError("injected: the store does not answer"),
    "damage": lambda: DamagedError("injected: a block does not have the recorded hash"),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """Where which rank fails.

    way: how ranks get what another one fetches: they read it too, as on one host | it is sent.
    whole: each rank needs all of the tensors, and not some columns of each.
    step: memory | read | place.
    call: which call of it fails.
    errors: by rank.
    """

    way: str
    whole: bool
    step: str
    call: int = 2
    errors: dict[int, str] = field(default_factory=lambda: {1: "device"})


@dataclass(frozen=True)
class Ended:
    """How a load ended on one rank; `struck` says that the error was injected there."""

    kind: str
    message: str
    seconds: float
    step: int | None
    struck: bool


def truth(index: int, step: int) -> torch.Tensor:
    rows, columns = SHAPES[index]
    return torch.arange(rows * columns, dtype=torch.float32).reshape(rows, columns) * (index + 1) + step


def make_state(placement: Replicate | Shard, step: int | None) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensors = {}
    for index, shape in enumerate(SHAPES):
        whole = truth(index, step) if step is not None else torch.full(shape, -1.0)
        local = whole
        if isinstance(placement, Shard):
            local = whole.chunk(dist.get_world_size(), placement.dim)[dist.get_rank()].contiguous()
        tensors[f"w{index:02}"] = DTensor.from_local(local.clone(), mesh, [placement], run_check=False)
    return {"model": tensors}


@contextmanager
def reached(way: str, store: FileStore) -> Iterator[None]:
    """Ranks read what another of their host has read, or are sent it."""
    with mock.patch.object(store, "host", store.host if way == "one host" else None):
        yield


@contextmanager
def injected(case: Case) -> Iterator[list[str]]:
    """Makes one call of one step fail on this rank; yields a list that then says so."""
    struck: list[str] = []
    calls = 0

    def failing(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keys: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == case.call and not struck:
                struck.append(case.step)
                raise ERRORS[case.errors[dist.get_rank()]]()
            return function(*arguments, **keys)

        return call

    if case.step == "read":
        patch = mock.patch.object(Fetcher, "fetch", failing(Fetcher.fetch))
    else:
        patch = mock.patch.object(Targets, case.step, failing(getattr(Targets, case.step)))
    with patch:
        yield struck


def load(engine: CheckpointEngine, whole: bool, case: Case | None = None) -> Ended:
    """One load, checked if it succeeds."""
    placement = Replicate() if whole else Shard(1)
    state, began = make_state(placement, None), time.perf_counter()
    struck: list[str] = []
    try:
        if case is not None and dist.get_rank() in case.errors:
            with injected(case) as struck:
                loaded = engine.load(state)
        else:
            loaded = engine.load(state)
    except Exception as error:
        return Ended(type(error).__name__, str(error), time.perf_counter() - began, None, bool(struck))
    assert loaded is not None
    expected = make_state(placement, loaded.step)["model"]
    for name, tensor in state["model"].items():
        assert torch.equal(tensor.to_local(), expected[name].to_local()), name
    return Ended("loaded", "", time.perf_counter() - began, loaded.step, bool(struck))


def save(folder: str) -> None:
    """Commits of steps 1 and 2."""
    engine = CheckpointEngine(FileStore(folder), group=dist.new_group(backend="gloo"))
    for step in (1, 2):
        engine.save(make_state(Shard(0), step), step)
        report = engine.wait()
        assert report is not None and report.error is None


def fail_each(folder: str, cases: list[Case], timeout_s: float) -> list[tuple[Case, list[Ended], list[Ended]]]:
    """For each case how a load ends on each rank, and then one without an injected error on the same group."""
    save(folder)
    results = []
    for case in cases:
        store = FileStore(folder)
        Ledger(store).damaged.clear()  # of the case before
        store.range_bytes = 2**20  # several rounds
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        engine = CheckpointEngine(store, group=group)
        with reached(case.way, store):
            failed, again = _of_all(load(engine, case.whole, case)), []
            if max(ended.seconds for ended in failed) < timeout_s:  # else the group is broken
                again = _of_all(load(engine, case.whole))
        results.append((case, failed, again))
    return results


def _of_all(ended: Ended) -> list[Ended]:
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, ended)
    return every


def fail_beside_the_exchange(folder: str, timeout_s: float) -> dict[str, list[Ended]]:
    """How a save ends of which one rank's part fails, and a load of which the choice of a commit does."""
    save(folder)

    def bug(*_: Any, **__: Any) -> None:
        raise ERRORS["bug"]()

    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    engine = CheckpointEngine(FileStore(folder), group=group)
    results = {}
    for name, owner, method, rank in (("write", FileStore, "put", 1), ("commit", Ledger, "record", 0)):
        began = time.perf_counter()
        with mock.patch.object(owner, method, bug if dist.get_rank() == rank else getattr(owner, method)):
            engine.save(make_state(Shard(0), 3), 3)
            report = engine.wait()
        assert report is not None
        results[f"save: {name}"] = _of_all(Ended("", report.error or "", time.perf_counter() - began, None, False))
    with mock.patch.object(Ledger, "choose", bug):
        results["load: choose"] = _of_all(load(engine, whole=True))
    with mock.patch.object(exchange, "plan_reads", bug if dist.get_rank() == 1 else exchange.plan_reads):
        results["load: plan"] = _of_all(load(engine, whole=True))
    results["nothing"] = _of_all(load(engine, whole=True))
    return results
