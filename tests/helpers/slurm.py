"""A Slurm of three nodes on one machine: one slurmctld and three slurmd, with a munge of their own."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil

NODES = ("node0", "node1", "node2")
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol")
CONF = """
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
SlurmctldPort={port}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
SlurmdTimeout=20
KillWait=10
ReturnToService=2
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SchedulerType=sched/backfill
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
NodeName=node[0-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs=2 RealMemory=2000 State=UNKNOWN
PartitionName=low Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=1 PreemptMode=REQUEUE GraceTime=120
PartitionName=high Nodes=ALL MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF
"""


def reason_without() -> str:
    """Why no Slurm can run here; "" if one can."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]
    if missing:
        return f"{' and '.join(missing)} missing: apt-get install munge slurmctld slurmd slurm-client"
    return "" if os.geteuid() == 0 else "slurmd needs root"


class Slurm:
    """Runs while the context lasts. `environment`: of its commands."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "PATH": f"{os.environ['PATH']}:/usr/sbin"}
        self.environment["SLURM_CONF"] = f"{folder}/slurm.conf"
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Slurm:
        ports = _free_ports(4)
        self.configure(ports)
        (self.folder / "state").mkdir()
        (self.folder / "key").write_bytes(os.urandom(64))
        (self.folder / "key").chmod(0o600)
        own = [f"--{name}={self.folder}/{file}" for name, file in (("key-file", "key"), ("socket", "munge.sock"))]
        own += [f"--{name}={self.folder}/munge.{name}" for name in ("pid-file", "log-file", "seed-file")]
        self._start("munged", "--force", "--foreground", *own)
        wait_for(lambda: (self.folder / "munge.sock").exists(), 20)
        self._start("slurmctld", "-D")
        for node in NODES:
            self.start_node(node)
        wait_for(lambda: self.run("sinfo", "-h", "-o", "%T %D", "-p", "low").strip() == "idle 3", 60)
        return self

    def configure(self, ports: list[int], *more: str) -> None:
        first = ports[1]
        text = CONF.format(folder=self.folder, host=socket.gethostname(), port=ports[0], first=first, last=first + 2)
        self._ports = ports
        (self.folder / "slurm.conf").write_text(text + "\n".join(more) + "\n")

    def reconfigure(self, *more: str) -> None:
        """Adds lines to slurm.conf, which the daemons read again."""
        self.configure(self._ports, *more)
        self.run("scontrol", "reconfigure")

    def _start(self, name: str, *words: str) -> None:
        key = words[-1] if name == "slurmd" else name
        with open(self.folder / f"{key}.out", "ab") as out:
            self._daemons[key] = subprocess.Popen([name, *words], env=self.environment, stdout=out, stderr=out)

    def start_node(self, node: str) -> None:
        (self.folder / f"spool-{node}").mkdir(exist_ok=True)

        def is_up() -> bool:
            if node not in self._daemons or self._daemons[node].poll() is not None:  # its port was not free yet
                self._start("slurmd", "-D", "-N", node)
            state = self.run("sinfo", "-h", "-n", node, "-o", "%T").split("\n")[0]
            return state in ("idle", "allocated", "mixed")

        wait_for(is_up, 60)

    def lose_node(self, node: str) -> None:
        """Kills a node's slurmd and all that it has started."""
        self._daemons.pop(node).kill()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                name = node_of(process) if process.name() == "slurmstepd" else process.environ().get("SLURMD_NODENAME")
                if name == node:
                    process.kill()

    def run(self, *words: str) -> str:
        done = subprocess.run(words, env=self.environment, capture_output=True, text=True, timeout=60)
        return done.stdout + done.stderr

    def job(self, number: str) -> dict[str, str]:
        """What `scontrol show job` says."""
        words = self.run("scontrol", "show", "job", "-o", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def __exit__(self, *error: object) -> None:
        self.run("scancel", "--state=RUNNING", "--user=root")
        self.run("scancel", "--user=root")
        time.sleep(3)
        for name in reversed(list(self._daemons)):
            self._daemons[name].send_signal(signal.SIGTERM)
        for daemon in self._daemons.values():
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def wait_for(condition: Callable[[], object], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not hold in time"
        time.sleep(0.3)


def node_of(stepd: psutil.Process) -> str:
    """The node of a slurmstepd: that of the processes that it has started."""
    names = [child.environ().get("SLURMD_NODENAME", "") for child in stepd.children(recursive=True)]
    return next(filter(None, names), "")


def _free_ports(count: int) -> list[int]:
    """Ports, of which all but the first follow one another."""
    for first in range(27000, 32000, count):
        try:
            sockets = [socket.create_server(("127.0.0.1", first + number)) for number in range(count)]
        except OSError:
            continue
        for opened in sockets:
            opened.close()
        return [first + number for number in range(count)]
    raise OSError("no free ports")
