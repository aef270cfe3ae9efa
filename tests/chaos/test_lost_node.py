"""A node is lost for good: the run goes on with those that are left, a spare among them, as the image starts it."""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests.helpers import entrypoint
from tests.helpers.kills import Outcome, check, read_log
from tests.helpers.launching import free_port

BATCHES = 16
OWN_MEMORY = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec sh "$0" "$@"']


def start_node(number: int, nodes: int, port: int, data: Path, folder: Path) -> subprocess.Popen[bytes]:
    """A node of one process, through the entrypoint; two processes train.

    As hosts do it has a working directory, data and /dev/shm of its own: LLM Foundry and Streaming leave files there
    with one name for all nodes.
    """
    home = folder / f"node{number}"
    shutil.copytree(data, home / "data")
    arguments = entrypoint.arguments(home / "data", folder / "checkpoints", folder / "log.jsonl", BATCHES)
    arguments += ["model.moe.mesh.replicate=auto", "model.moe.mesh.spares=true"]
    node = {"NNODES": str(nodes), "NODE_RANK": str(number), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    node |= {"MIN_NODES": "2", "NPROC": "1", "LAST_CALL_S": "5", "MAX_RESTARTS": "5"}
    with open(home / "output", "w") as file:
        return subprocess.Popen(
            [*OWN_MEMORY, entrypoint.SCRIPT, *arguments],
            cwd=home,
            env=entrypoint.environment(**node),
            stdout=file,
            stderr=subprocess.STDOUT,
        )


def run(data: Path, folder: Path, *, nodes: int, lose_after: int | None) -> list[dict]:
    """The log of a run on some nodes, one of which is killed with all its processes after so many batches."""
    folder.mkdir()
    log = folder / "log.jsonl"
    port = free_port()
    agents = [start_node(number, nodes, port, data, folder) for number in range(nodes)]
    outputs = [folder / f"node{number}" / "output" for number in range(nodes)]
    try:
        if lose_after is not None:
            deadline = time.monotonic() + 300
            while len(read_log(log)) < lose_after:
                assert time.monotonic() < deadline, [o.read_text()[-3000:] for o in outputs]
                time.sleep(0.1)
            lost = next(agent for agent in agents[1:] if any(rank < 2 for rank in ranks(agent.pid)))
            agents.remove(lost)
            for process in [psutil.Process(lost.pid), *psutil.Process(lost.pid).children(recursive=True)]:
                process.kill()
        codes = [agent.wait(timeout=600) for agent in agents]
        assert codes == [0] * len(agents), [o.read_text()[-5000:] for o in outputs]
    finally:
        for agent in agents:
            if agent.poll() is None:
                agent.send_signal(signal.SIGTERM)
    if lose_after is not None:
        assert any("mesh.spares: 2 of 3 GPUs train, 1 wait" in o.read_text() for o in outputs)
    return read_log(log)


def ranks(agent: int) -> list[int]:
    """Ranks of the processes that an agent has started."""
    return [int(child.environ().get("RANK", 99)) for child in psutil.Process(agent).children()]


def can_unshare() -> bool:
    try:
        return subprocess.run([*OWN_MEMORY, "-c", "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


@pytest.mark.slow
@pytest.mark.skipif(not can_unshare(), reason="needs the right to mount, to give nodes a /dev/shm each")
@pytest.mark.timeout(1500)
def test_a_run_goes_on_without_a_lost_node(tiny_text, tmp_path) -> None:
    calm = run(tiny_text, tmp_path / "calm", nodes=2, lose_after=None)
    lines = run(tiny_text, tmp_path / "lost", nodes=3, lose_after=5)
    batches = [line["batch"] for line in lines]
    again = [at for at in range(1, len(batches)) if batches[at] <= batches[at - 1]]
    assert len(again) == 1, f"one restart: {batches}"
    check(Outcome(), lines, calm, BATCHES)
