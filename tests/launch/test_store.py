"""A rendezvous store off the nodes: the run outlives the loss of node 0."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests.helpers import entrypoint
from tests.helpers.entrypoint import wait_for
from tests.helpers.launching import free_port

WORKER = """
import os, sys, time
import torch.distributed as dist
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
open(f"{sys.argv[1]}/start-{os.environ['TORCHELASTIC_RESTART_COUNT']}-{rank}-of-{world}", "w").close()
while not os.path.exists(f"{sys.argv[1]}/end"):
    dist.barrier()
    time.sleep(0.1)
"""


@pytest.mark.timeout(300)
def test_the_rest_goes_on_without_node_0(tmp_path) -> None:
    (tmp_path / "worker.py").write_text(WORKER)
    port = free_port()
    environment = entrypoint.environment(
        **{"NNODES": "3", "MIN_NODES": "2", "NPROC": "1", "LAST_CALL_S": "3", "STORE": f"127.0.0.1:{port}"},
        **{"TRAIN_SCRIPT": f"{tmp_path}/worker.py", "PET_LOCAL_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"},
    )
    server = subprocess.Popen([entrypoint.SCRIPT, "store"], env=environment | {"MASTER_PORT": str(port)})
    outputs = [tmp_path / f"output{number}" for number in range(3)]
    nodes = []
    try:
        for number, output in enumerate(outputs):
            with open(output, "w") as file:
                nodes.append(
                    subprocess.Popen(
                        [entrypoint.SCRIPT, str(tmp_path)],
                        env=environment | {"NODE_RANK": str(number)},
                        stdout=file,
                        stderr=subprocess.STDOUT,
                    )
                )
        wait_for(lambda: len(list(tmp_path.glob("start-0-?-of-3"))) == 3, 120)
        for process in [psutil.Process(nodes[0].pid), *psutil.Process(nodes[0].pid).children(recursive=True)]:
            process.kill()
        began = time.monotonic()
        wait_for(lambda: len(list(tmp_path.glob("start-*-of-2"))) == 2, 120)
        print(f"the rest trained again after {time.monotonic() - began:.0f} s")
        Path(tmp_path / "end").touch()
        assert [node.wait(60) for node in nodes[1:]] == [0, 0], [output.read_text()[-2000:] for output in outputs]
    finally:
        for process in [*nodes, server]:
            if process.poll() is None:
                for child in psutil.Process(process.pid).children(recursive=True):
                    child.kill()
                process.kill()
    assert server.wait() == -signal.SIGKILL
    assert os.path.exists(tmp_path / "end")
