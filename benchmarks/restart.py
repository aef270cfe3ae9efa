"""Where the time goes between the loss of a node and the first new batch, as a user starts and loses a run.

    python benchmarks/restart.py [--hosts 3] [--loss kill|silent] [--mbit 1000] [--width 512]      (root)

Each host is a network namespace with one link of `--mbit`, a /dev/shm and a working directory of its own, and runs
`docker/entrypoint.sh` with one process. The store is moto, outside of them, with objects in memory: moto itself reads a
whole object from a file for each range of 16 MiB that is requested. All hosts but one must be there
(MIN_NODES); with three of them two train and one is a spare. Once a checkpoint is committed, one that trains is lost:

    kill    all its processes get SIGKILL: its system closes their connections, as when a container dies
    silent  its link is cut without a notice to the others, as when power fails

The agents' log (LOGLEVEL=INFO) and that of the callback `elastic_checkpoint` have the times. Prints a table, and with
`--csv FILE` adds a row to that file.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import datetime
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
from hosts import Hosts

ROOT = Path(__file__).parents[1]
PORT = 5000
SERVER = """
import sys
from moto.s3.models import FakeKey
from moto.server import main
def read(key):
    if getattr(key, "kept", None) is None:
        key.kept = written.fget(key)
    return key.kept
def write(key, value):
    key.kept = None
    written.fset(key, value)
written = FakeKey.value
FakeKey.value = property(read, write)
main(sys.argv[1:])
"""
OWN_MEMORY = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec sh "$0" "$@"')
START_S, RESTART_S = 600.0, 1500.0
BATCH, TOKENS = 4, 64
LEFT = re.compile(r"Stopping worker group")
JOINED = re.compile(r"Rendezvous complete for workers")
RESUMED = re.compile(r"Resumed at batch (\d+).*: ([\d.]+) MB fetched .*, ([\d.]+) MB sent between ranks, ([\d.]+) s")
FIRST_BATCH = re.compile(r"First batch, since this process began: ([\d.]+) s \((.*)\)")
PART = re.compile(r"(?P<part>[^,(]+) (?P<seconds>[\d.]+)(?:, |$)")
STAMP = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3})|[IWE](\d{4} \d\d:\d\d:\d\d\.\d{6})")


@dataclass(frozen=True, kw_only=True)
class Restart:
    """Seconds by what they went to, in order; bytes in MB, of all ranks; resumed_at: the batch.

    load: of this machine when the host was lost, and at the end.
    """

    seconds: dict[str, float]
    fetched_mb: float
    sent_mb: float
    resumed_at: int
    load: tuple[float, float] = (0.0, 0.0)

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())


def said_at(line: str) -> float | None:
    """When a line was logged, in seconds since the epoch: in the form of Composer's runs, or of torch's logs."""
    found = STAMP.search(line)
    if found is None:
        return None
    if found[1]:
        return datetime.datetime.strptime(found[1], "%Y-%m-%d %H:%M:%S,%f").timestamp()
    year = datetime.datetime.now().year
    return datetime.datetime.strptime(f"{year}{found[2]}", "%Y%m%d %H:%M:%S.%f").timestamp()


def read_restart(outputs: list[str], lost_s: float) -> Restart | None:
    """The log of the remaining hosts since a host was lost; None until the first batch is done."""
    lines = [(at, line) for text in outputs for line in text.splitlines() if (at := said_at(line)) and at > lost_s]
    done = next(((at, found) for at, line in lines if (found := FIRST_BATCH.search(line))), None)
    resumed = next((found for _, line in lines if (found := RESUMED.search(line))), None)
    if done is None or resumed is None:
        return None
    end_s, first_batch = done
    began = end_s - float(first_batch[1])
    left = min(at for at, line in lines if LEFT.search(line))
    joined = max(at for at, line in lines if JOINED.search(line) and at < began + 1)
    parts = {found["part"]: float(found["seconds"]) for found in PART.finditer(first_batch[2])}
    return Restart(
        seconds={
            "detection": left - lost_s,
            "rendezvous": joined - left,
            "new processes": max(began - joined, 0.0),
            **parts,
        },
        fetched_mb=float(resumed[2]),
        sent_mb=float(resumed[3]),
        resumed_at=int(resumed[1]),
    )


def run_arguments(home: Path, endpoint: str, width: int, interval: str) -> list[str]:
    """A small dMoE of 8 experts on the demo's text, whose weights and moments take 1.0 GB at a width of 512."""
    from tests.chaos.loss_log import __file__ as loss_log

    checkpoint = {"folder": "s3://bucket/run", "interval": interval, "keep": 2, "endpoint_url": endpoint}
    return [
        f"{ROOT}/yamls/demo/cpu.yaml",
        *(f"variables.data={home}/data", f"variables.run={home}/run", f"max_seq_len={TOKENS}"),
        *(f"model.d_model={width}", f"model.moe.expert_hidden_size={3 * width}", "scheduler.t_warmup=4ba"),
        *("max_duration=100000ba", "eval_interval=0", f"global_train_batch_size={BATCH}"),
        *("save_folder=null", "autoresume=false", "python_log_level=WARNING"),
        *(f"callbacks.elastic_checkpoint.{key}={value}" for key, value in checkpoint.items()),
        *(f"code_paths=[{loss_log}]", f"callbacks.loss_log.path={home.parent}/log.jsonl"),
        *("model.moe.mesh={shard: 1, expert: 1, replicate: auto, spares: true}", "fsdp_config={}"),
    ]


def start_host(hosts: Hosts, host: int, data: Path, folder: Path, words: list[str]) -> subprocess.Popen[bytes]:
    home = folder / f"host{host}"
    shutil.copytree(data, home / "data")
    (home / "tmp").mkdir()
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        **{"TRAIN_SCRIPT": f"{ROOT}/foundry_moe/train.py", "FSDP_VERSION": "2", "OMP_NUM_THREADS": "1"},
        **{"TMPDIR": str(home / "tmp"), "GLOO_SOCKET_IFNAME": "net0", "PET_LOCAL_ADDR": hosts.address(host)},
        **{"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "LOGLEVEL": "INFO"},
        **{"NNODES": str(hosts.count), "NODE_RANK": str(host), "MIN_NODES": str(hosts.count - 1), "NPROC": "1"},
        **{"MASTER_ADDR": hosts.address(0), "MASTER_PORT": "29500"},
    }
    with open(home / "output", "w") as file:
        return subprocess.Popen(
            [*hosts.inside(host), *OWN_MEMORY, f"{ROOT}/docker/entrypoint.sh", *words],
            cwd=home,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
        )


@contextlib.contextmanager
def moto(address: str) -> Iterator[str]:
    """An S3 server with a bucket; its URL."""
    import boto3

    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, "-H", address, "-p", str(PORT)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError):
                socket.create_connection((address, PORT), timeout=1).close()
                break
            if server.poll() is not None or time.monotonic() > deadline:
                sys.exit("error: moto does not start: pip install 'moto[server]'")
            time.sleep(0.1)
        url = f"http://{address}:{PORT}"
        boto3.client("s3", endpoint_url=url).create_bucket(Bucket="bucket")
        yield url
    finally:
        server.kill()
        server.wait()


def kill_all(hosts: Hosts, host: int) -> None:
    for process in hosts.processes(host):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def host_that_trains(hosts: Hosts) -> int:
    """One that is not host 0, which has the launcher's store, and has a rank that is no spare."""
    for host in range(1, hosts.count):
        for process in hosts.processes(host):
            with contextlib.suppress(psutil.Error):
                if int(psutil.Process(process).environ().get("RANK", "99")) < hosts.count - 1:
                    return host
    raise RuntimeError("no host but host 0 trains")


def wait_for_commit(endpoint: str, agents: list[subprocess.Popen[bytes]], outputs: list[Path]) -> int:
    """The step of the first commit.

    Raises:
        SystemExit: there is none in time, or a host has ended.
    """
    from foundry_moe.checkpoint import open_store
    from foundry_moe.checkpoint.ledger import Ledger
    from foundry_moe.checkpoint.store import StoreOptions

    ledger = Ledger(open_store("s3://bucket/run", StoreOptions(endpoint_url=endpoint)))
    deadline = time.monotonic() + START_S
    while not (commits := ledger.newest_first()):
        if time.monotonic() > deadline or any(agent.poll() is not None for agent in agents):
            sys.exit("error: the run commits nothing\n" + "\n".join(o.read_text()[-3000:] for o in outputs))
        time.sleep(0.5)
    return commits[0].step


def measure(arguments: argparse.Namespace, folder: Path) -> Restart:
    """One run, from its start to the first batch after a host was lost."""
    from examples.demo_data import prepare

    prepare(folder / "data", speeches=25)
    hosts = Hosts(arguments.hosts, arguments.mbit, name="rst", subnet="10.78.0", burst_kb=max(16, arguments.mbit // 8))
    outputs = [folder / f"host{host}" / "output" for host in range(arguments.hosts)]
    with hosts, moto(hosts.outside) as endpoint:
        agents = []
        try:
            for host in range(hosts.count):
                words = run_arguments(folder / f"host{host}", endpoint, arguments.width, "4ba")
                agents.append(start_host(hosts, host, folder / "data", folder, words))
            wait_for_commit(endpoint, agents, outputs)
            time.sleep(2)  # into a batch
            lost = host_that_trains(hosts)
            lost_s = time.time()
            if arguments.loss == "silent":
                hosts.unplug(lost)
            kill_all(hosts, lost)
            load = os.getloadavg()[0]
            print(f"host {lost} is lost, load {load:.1f}", flush=True)
            left = [path for host, path in enumerate(outputs) if host != lost]
            while (restart := read_restart([path.read_text() for path in left], lost_s)) is None:
                if time.time() > lost_s + RESTART_S or agents[0].poll() is not None:
                    sys.exit("error: the run does not go on\n" + "\n".join(o.read_text()[-5000:] for o in left))
                time.sleep(0.5)
            return replace(restart, load=(load, os.getloadavg()[0]))
        finally:
            for host in range(hosts.count):
                kill_all(hosts, host)
            for agent in agents:
                agent.wait()


def main() -> int:
    """Measures and prints; see the text at the top."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=3)
    parser.add_argument("--loss", choices=("kill", "silent"), default="kill")
    parser.add_argument("--mbit", type=int, default=1000)
    parser.add_argument("--width", type=int, default=512, help="512: 1 GB of parameters and AdamW state")
    parser.add_argument("--csv", type=Path, help="adds a row to this file")
    parser.add_argument("--name", help="of that row (default: of --loss)")
    parser.add_argument("--keep", type=Path, help="keeps the hosts' output in this new folder")
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        os.environ.setdefault(name, "testing")
    os.environ.setdefault("AWS_DEFAULT_REGION", "us-east-1")
    with tempfile.TemporaryDirectory(prefix="restart-") as scratch:
        try:
            restart = measure(arguments, Path(scratch))
        finally:
            if arguments.keep:
                for output in Path(scratch).glob("host*/output"):
                    arguments.keep.mkdir(parents=True, exist_ok=True)
                    shutil.copy(output, arguments.keep / output.parent.name)
    print(
        f"{arguments.hosts} hosts on {os.cpu_count()} cores, links of {arguments.mbit} Mbit/s, loss: {arguments.loss}; "
        f"{restart.fetched_mb:.0f} MB fetched from moto, {restart.sent_mb:.0f} MB sent between ranks"
    )
    for part, seconds in restart.seconds.items():
        print(f"{part:28}{seconds:8.1f} s")
    print(f"{'in all':28}{restart.total_s:8.1f} s")
    if arguments.csv:
        row = {
            "date": datetime.date.today().isoformat(),
            "run": arguments.name or arguments.loss,
            "load": " to ".join(f"{load:.0f}" for load in restart.load),
            **{part: f"{seconds:.1f}" for part, seconds in restart.seconds.items()},
            "in all": f"{restart.total_s:.1f}",
        }
        new = not arguments.csv.exists()
        with arguments.csv.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(row))
            if new:
                writer.writeheader()
            writer.writerow(row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
