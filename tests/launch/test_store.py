"""A rendezvous store off the nodes: the run outlives the loss of node 0, and a restart of the store."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import yaml

from benchmarks.hosts import Hosts
from tests.helpers import entrypoint
from tests.helpers.entrypoint import wait_for
from tests.helpers.launching import free_port

WORKER = """
import os, sys, time
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
open(f"{sys.argv[1]}/start-{os.getpid()}-of-{world}", "w").close()
over = torch.zeros(1)
while not over:  # all agree: one that ended first would make the others restart
    over.fill_(os.path.exists(f"{sys.argv[1]}/end"))
    dist.all_reduce(over)
    time.sleep(0.1)
"""


def work(hosts: Hosts) -> bool:
    """Whether this machine lets a namespace reach the outside."""
    try:
        hosts.__enter__()
        with socket.create_server(("", 0)) as here:
            reach = f"import socket; socket.create_connection(({hosts.outside!r}, {here.getsockname()[1]}), 5)"
            subprocess.run([*hosts.inside(0), sys.executable, "-c", reach], check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return False
    return True


@pytest.fixture
def hosts() -> Iterator[Hosts | None]:
    """A network namespace with an address of its own for each pod; None where there can be none."""
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        yield None
        return
    made = Hosts(3, 1000, name="pod", subnet="10.79.0", burst_kb=128)
    try:
        yield made if work(made) else None
    finally:
        made.__exit__()


@pytest.mark.timeout(600)
def test_the_rest_goes_on_without_node_0_and_without_the_store_until_they_are_back(tmp_path, hosts) -> None:
    """Entrypoints with the environment of docker/kubernetes.yaml's pods, each in a namespace where there can be one."""
    (tmp_path / "worker.py").write_text(WORKER)
    port = free_port()
    job = list(yaml.safe_load_all((Path(entrypoint.ROOT) / "docker" / "kubernetes.yaml").read_text()))[-1]
    (container,) = job["spec"]["template"]["spec"]["containers"]
    pod = {item["name"]: item.get("value", "127.0.0.1") for item in container["env"]}  # its address is the pod's
    environment = entrypoint.environment(**pod | {"NPROC": "1", "LAST_CALL_S": "120"})
    environment |= {"STORE": f"{hosts.outside if hosts else '127.0.0.1'}:{port}"}
    environment |= {"TRAIN_SCRIPT": f"{tmp_path}/worker.py", "GLOO_SOCKET_IFNAME": "net0" if hosts else "lo"}
    serve = [entrypoint.SCRIPT, "store"], environment | {"MASTER_PORT": str(port)}
    server = subprocess.Popen(serve[0], env=serve[1])
    outputs = [tmp_path / f"output{number}" for number in range(3)]
    nodes: list[subprocess.Popen[bytes]] = []

    def start(index: int) -> None:
        mine = {"JOB_COMPLETION_INDEX": str(index), "HEARTBEAT": str(tmp_path / f"heartbeat{index}")}
        with open(outputs[index], "a") as file:
            words = [*(hosts.inside(index) if hosts else []), entrypoint.SCRIPT, str(tmp_path)]
            if hosts:
                mine["PET_LOCAL_ADDR"] = hosts.address(index)
            nodes.append(subprocess.Popen(words, env=environment | mine, stdout=file, stderr=subprocess.STDOUT))

    try:
        for index in range(3):
            start(index)
        wait_for(lambda: len(list(tmp_path.glob("start-*-of-3"))) == 3, 120)
        for process in [psutil.Process(nodes[0].pid), *psutil.Process(nodes[0].pid).children(recursive=True)]:
            process.kill()
        began = time.monotonic()
        wait_for(lambda: len(list(tmp_path.glob("start-*-of-2"))) == 2, 120)
        print(f"the rest trained again after {time.monotonic() - began:.0f} s")
        server.kill()
        server.wait()
        time.sleep(8)  # longer than the rendezvous' heartbeats last
        server = subprocess.Popen(serve[0], env=serve[1])
        time.sleep(3)
        assert len(list(tmp_path.glob("start-*-of-2"))) == 2 and all(node.poll() is None for node in nodes[1:])
        start(0)  # as Kubernetes replaces a pod
        wait_for(lambda: len(list(tmp_path.glob("start-*-of-3"))) >= 6, 120)
        assert all((tmp_path / f"heartbeat{index}").exists() for index in range(3))
        (tmp_path / "end").touch()
        assert [node.wait(120) for node in nodes[1:]] == [0] * 3, [output.read_text()[-2000:] for output in outputs]
    finally:
        for process in [*nodes, server]:
            if process.poll() is None:
                for child in psutil.Process(process.pid).children(recursive=True):
                    child.kill()
                process.kill()
