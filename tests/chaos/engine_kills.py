"""Drives the checkpoint engine alone through many kills: forked processes, small tensors, real stores.

Each incarnation is a group of 1 to 4 processes on a random mesh: it loads the newest checkpoint, compares every
element with what that step must be, trains on in place while saves run in the background, and is killed by SIGKILL,
at a named point of the engine on a random rank or at a random time. A fifth of the incarnations load and save through
torch.distributed.checkpoint and its default planners (`Reader`, `Writer`) in the same folder. What is held:
- the checkpoint that is loaded is exactly its step's state, never a mixture;
- no step that was reported as committed is lost, but to retention;
- in the end every commit in the store reads back right.

    python -m tests.chaos.engine_kills --kills 1000
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import logging
import mmap
import os
import random
import signal
import struct
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # peers that vanish are what this is about

import torch
import torch._dynamo  # DTensor imports it lazily: here once, and not 2 s in every forked process
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from foundry_moe.checkpoint import Reader, Writer, open_store
from foundry_moe.checkpoint.committer import Retention
from foundry_moe.checkpoint.engine import CheckpointEngine, Policy
from foundry_moe.checkpoint.ledger import Ledger
from foundry_moe.checkpoint.owners import Identity
from foundry_moe.checkpoint.store import Store, StoreOptions
from tests.helpers import faults
from tests.helpers.clouds import Azurite
from tests.helpers.launching import free_port
from tests.helpers.s3 import Moto

MESHES = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 1, 2), (1, 2, 2), (2, 2, 1), (4, 1, 1), (1, 1, 4)]
STEPS_PER_LIFE = 4
DCP_KILLS = "through torch.distributed.checkpoint"
BY_DCP = 0.2  # the part of the incarnations that use torch.distributed.checkpoint's planners
KEEP = 3
STALE = "steps/000000000000/20200101T000000-deadbeef/data/000000.bin"  # of an attempt that nobody finished
SHAPES = {"experts": (8, 8, 160), "dense": (64, 33), "bias": (128,)}  # an expert is 5 KiB: a block of its own
TRACES = f"{tempfile.gettempdir()}/engine-kills-{os.getpid()}"
PRIMES = {"experts": 1_000_003, "dense": 7919, "bias": 104_729}


def truth(name: str, step: int) -> torch.Tensor:
    """What a tensor must hold after `step` steps, in full."""
    count = torch.Size(SHAPES[name]).numel()
    return (torch.arange(count, dtype=torch.int64) * 31 + PRIMES[name] * (step + 1)).reshape(SHAPES[name])


def make_state(step: int, mesh: tuple[int, int, int]) -> dict:
    """The state of a step on a mesh; collective only in that every rank makes its own part."""
    replicate, shard, expert = mesh
    world = replicate * shard * expert
    if world == 1:
        tensors = {name: truth(name, step) for name in SHAPES}
    else:
        ranks = torch.arange(world)
        grid = DeviceMesh("cpu", ranks.reshape(mesh), mesh_dim_names=("r", "s", "e"), _init_backend=False)
        flat = DeviceMesh(
            "cpu", ranks.reshape(replicate, shard * expert), mesh_dim_names=("r", "f"), _init_backend=False
        )
        _, s, e = [int(i) for i in (ranks.reshape(mesh) == dist.get_rank()).nonzero()[0]]
        experts = truth("experts", step).chunk(expert, 0)[e].chunk(shard, 1)[s].contiguous()
        placements = [Replicate(), Shard(1), Shard(0)]
        tensors = {"experts": DTensor.from_local(experts, grid, placements, run_check=False)}
        for name in ("dense", "bias"):
            local = truth(name, step).chunk(shard * expert, 0)[s * expert + e].contiguous()
            tensors[name] = DTensor.from_local(local, flat, [Replicate(), Shard(0)], run_check=False)
    return {"model": tensors, "optim": {"step": torch.tensor(step)}, "cursor": {"sample": step * 8}}


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def compare(state: dict, step: int, mesh: tuple[int, int, int]) -> None:
    expected = make_state(step, mesh)
    for name in SHAPES:
        assert torch.equal(local(state["model"][name]), local(expected["model"][name])), f"{name} of step {step}"
    assert int(state["optim"]["step"]) == step and state["cursor"]["sample"] == step * 8


@dataclass(kw_only=True)
class Shared:
    """Memory that forked processes share with the harness: the newest step known to be committed."""

    memory: mmap.mmap = field(default_factory=lambda: mmap.mmap(-1, 16))

    @property
    def committed(self) -> int:
        return struct.unpack_from("q", self.memory, 0)[0]

    @committed.setter
    def committed(self, step: int) -> None:
        struct.pack_into("q", self.memory, 0, step)


@dataclass(frozen=True, kw_only=True)
class Life:
    """What becomes of one group of processes."""

    mesh: tuple[int, int, int]
    fault: str | None
    delay_s: float | None
    by_dcp: bool

    @property
    def world(self) -> int:
        return self.mesh[0] * self.mesh[1] * self.mesh[2]


def live(rank: int, life: Life, store: Store, port: int, shared: Shared) -> None:
    """One process's life: load, check, train and save until killed, or for STEPS_PER_LIFE steps."""
    mesh, world = life.mesh, life.world
    ctypes.CDLL("libc.so.6").prctl(1, signal.SIGKILL)  # die with the harness
    group = None
    if world > 1:
        tcp = dist.TCPStore("127.0.0.1", port, world, rank == 0, timeout=datetime.timedelta(seconds=60))
        dist.init_process_group("gloo", store=tcp, rank=rank, world_size=world)
        group = dist.group.WORLD
    faults.kill_at(life.fault, rank)
    if life.by_dcp:
        live_by_dcp(rank, mesh, store, shared)
        return
    engine = CheckpointEngine(store, group=group, policy=Policy(keep=KEEP, stale_s=0.0))
    engine.check_owner(Identity(run_name="storm"))
    state = make_state(0, mesh)
    for tensor in state["model"].values():
        local(tensor).fill_(-1)
    loaded = engine.load(state)
    step = 0
    if loaded is None:
        assert shared.committed < 0, f"step {shared.committed} was committed and nothing is found"
        state = make_state(0, mesh)
    else:
        step, state = loaded.step, loaded.state
        assert step >= shared.committed, f"went back to step {step}, {shared.committed} was committed"
        compare(state, step, mesh)
    engine.acquire(Identity(run_name="storm"))
    for _ in range(STEPS_PER_LIFE):
        step += 1
        train(state, step)  # in place, while the save before may be under way
        note(engine, rank, shared)
        engine.save(state, step)
    note(engine, rank, shared)


def train(state: dict, step: int) -> None:
    for name, tensor in state["model"].items():
        local(tensor).add_(PRIMES[name])
    state["optim"]["step"].fill_(step)
    state["cursor"]["sample"] = step * 8


def live_by_dcp(rank: int, mesh: tuple[int, int, int], store: Store, shared: Shared) -> None:
    """The same through PyTorch's functions and default planners."""
    warnings.simplefilter("ignore")
    reader, writer = Reader(store.url, options=store.options), Writer(store.url, keep=KEEP, run_name="storm")
    reader.ledger, writer._store = Ledger(store), store  # its S3 client was made before the fork
    state, step = make_state(0, mesh), 0
    if reader.steps():
        for tensor in state["model"].values():
            local(tensor).fill_(-1)
        dcp.load(state, storage_reader=reader)
        assert reader.step is not None
        step = reader.step
        assert step >= shared.committed, f"went back to step {step}, {shared.committed} was committed"
        compare(state, step, mesh)
    else:
        assert shared.committed < 0, f"step {shared.committed} was committed and nothing is found"
    for _ in range(STEPS_PER_LIFE):
        step += 1
        train(state, step)
        dcp.save(state, storage_writer=writer, checkpoint_id=str(step), no_dist=mesh == (1, 1, 1))
        if rank == 0:
            shared.committed = step


def note(engine: CheckpointEngine, rank: int, shared: Shared) -> None:
    """Waits for the save under way and writes down what was committed."""
    report = engine.wait()
    if report is not None and report.error is not None:
        raise RuntimeError(report.error)  # fine if the peer was killed, see `reap`
    if report is not None and rank == 0:
        shared.committed = report.step


def incarnate(life: Life, store: Store, shared: Shared) -> str:
    """Forks one group and waits for its end; returns `killed` or `finished`.

    Raises:
        AssertionError: a process failed otherwise than by the kill; what it printed is above.
    """
    port = free_port()
    children = []
    for rank in range(life.world):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                live(rank, life, store, port, shared)
                code = 0
            except BaseException:
                Path(f"{TRACES}-{os.getpid()}").write_text(traceback.format_exc())
            finally:
                os._exit(code)
        children.append(pid)
    if life.delay_s is not None:
        time.sleep(life.delay_s)
        os.kill(random.choice(children), signal.SIGKILL)
    return reap(children, str(life))


def reap(children: list[int], what: str) -> str:
    """Waits for a group as a launcher does: one death ends it. Only a death by SIGKILL is accepted."""
    codes: dict[int, int] = {}
    while len(codes) < len(children) and not any(codes.values()):
        pid, status = os.waitpid(-1, 0)
        codes[pid] = os.waitstatus_to_exitcode(status)
    deadline = time.monotonic() + 0.3  # who lost its peer may be seen first: let the killed one show up
    while len(codes) < len(children) and -signal.SIGKILL not in codes.values() and time.monotonic() < deadline:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            codes[pid] = os.waitstatus_to_exitcode(status)
        else:
            time.sleep(0.005)
    killed = -signal.SIGKILL in codes.values()
    for pid in set(children) - set(codes):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    traces = [path.read_text() for pid in children if (path := Path(f"{TRACES}-{pid}")).exists()]
    for pid in children:
        Path(f"{TRACES}-{pid}").unlink(missing_ok=True)
    assert killed or not any(codes.values()), f"{what}: ended with {codes}\n" + "\n".join(traces)
    wrong = [trace for trace in traces if "AssertionError" in trace]
    assert not wrong, f"{what}:\n" + "\n".join(wrong)
    return "killed" if killed else "finished"


def apart(work: Callable[[], int]) -> int:
    """What `work` returns in a forked process: a store's client may start threads, and later forks would lack them."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.write(write, struct.pack("q", work()))
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        raw = pipe.read()
    _, status = os.waitpid(pid, 0)
    assert status == 0, "see above"
    return struct.unpack("q", raw)[0]


def check_all(store: Store) -> int:
    """Reads every commit in this process and compares it in full; returns how many there are."""
    ledger = Ledger(store)
    keys = ledger.newest_first()
    for key in keys:
        engine = CheckpointEngine(store)
        state = make_state(0, (1, 1, 1))
        loaded = engine.load(state, resume=key.step)
        assert loaded is not None and loaded.step == key.step and not loaded.rejected, loaded
        compare(loaded.state, key.step, (1, 1, 1))
    return len(keys)


def storm(store: Store, kills: int, seed: int, *, check_every: int = 25) -> Counter:
    """Kills `kills` groups, visiting every named point on every rank first; returns counts by cause."""
    random.seed(seed)
    shared = Shared()
    shared.committed = -1
    counts: Counter = Counter()
    points = [point for point in faults.POINTS for _ in range(2)]
    random.shuffle(points)
    while sum(n for cause, n in counts.items() if cause not in ("finished", DCP_KILLS)) < kills:
        mesh = random.choice(MESHES)
        world = mesh[0] * mesh[1] * mesh[2]
        fault, delay_s, cause = None, None, "random time"
        if points or random.random() < 0.6:
            point = points.pop() if points else random.choice(faults.POINTS)
            coordinators = point.startswith(("commit", "retention", "collect", "load.listed", "load.manifest"))
            rank = 0 if coordinators else random.randrange(world)
            if point.startswith("collect"):
                apart(lambda: store.put(STALE, b"1") or 0)
            fault, cause = f"{point}:{rank}:{random.randint(1, 3 if point[:4] not in ('load', 'coll') else 1)}", point
        else:
            delay_s = random.uniform(0.0, 0.6)
        life = Life(mesh=mesh, fault=fault, delay_s=delay_s, by_dcp=random.random() < BY_DCP)
        ended = incarnate(life, store, shared)
        counts[cause if ended == "killed" else "finished"] += 1
        if ended == "killed" and life.by_dcp:
            counts[DCP_KILLS] += 1
        if (sum(counts.values()) - counts[DCP_KILLS]) % check_every == 0:
            apart(lambda: check_all(store))
    commits = apart(lambda: check_all(store))

    def collect() -> int:
        retention = Retention(Ledger(store))
        retention.collect(0.0, own=True)
        return len(retention.collect(0.0, own=True, dry_run=True))

    assert apart(collect) == 0
    assert apart(lambda: check_all(store)) == commits
    counts["commits at the end"] = commits
    counts["steps"] = shared.committed
    return counts


def warm(store: Store) -> Store:
    """Makes an S3 client before the fork, so that no process pays for it; it opens no connection yet."""
    if store.url.startswith("s3://"):
        getattr(store, "_client", None)
    return store


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--s3", type=float, default=0.25, help="the part of the kills that runs on S3 (moto)")
    parser.add_argument("--azure", type=float, default=0.0, help="the part that runs on Azurite (needs npm)")
    parser.add_argument("--folder", help="a store of yours, for example s3://bucket/run; default: a new folder, moto")
    parser.add_argument("--endpoint-url")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.ERROR)
    torch.set_num_threads(1)
    print(f"seed {arguments.seed}", flush=True)
    began = time.monotonic()
    if arguments.folder:
        store = open_store(arguments.folder, StoreOptions(endpoint_url=arguments.endpoint_url))
        report(arguments.folder, storm(warm(store), arguments.kills, arguments.seed), began)
        return 0
    on_s3, on_azure = round(arguments.kills * arguments.s3), round(arguments.kills * arguments.azure)
    on_files = arguments.kills - on_s3 - on_azure
    if on_files:
        with tempfile.TemporaryDirectory() as folder:
            report("files", storm(open_store(str(Path(folder) / "run")), on_files, arguments.seed), began)
    if on_s3:
        with Moto() as moto:
            store = open_store("s3://bucket/run", StoreOptions(endpoint_url=moto.url))
            report("moto", storm(warm(store), on_s3, arguments.seed + 1), began)
    if on_azure:
        with Azurite() as azurite:
            store = open_store("az://bucket/run", StoreOptions(endpoint_url=azurite.url))
            report("Azurite", storm(store, on_azure, arguments.seed + 2), began)
    return 0


def report(where: str, counts: Counter, began: float) -> None:
    kills = sum(n for cause, n in counts.items() if cause in faults.POINTS or cause == "random time")
    print(f"{where}: {kills} kills, none left a checkpoint that loads wrong ({time.monotonic() - began:.0f} s)")
    for cause, count in sorted(counts.items()):
        print(f"  {cause:26} {count}")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
