"""Agents that watch each other: a node that falls silent, one whose processes fail, and one that leaves in order."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import psutil
import pytest
from torch.distributed import HashStore

from foundry_moe.launch.lost_nodes import SILENT_S, NodeWatch, beat, silent_s
from tests.helpers.launching import free_port
from tests.helpers.stop_worker import ROOT, WORKER


def watch(store: HashStore, node: int, nodes: int = 2, silent_s: float = 0.4) -> NodeWatch:
    return NodeWatch(store, node, nodes, silent_s=silent_s, beat_s=0.05)


def wait_until(what: Callable[[], object], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not what() and time.monotonic() < deadline:
        time.sleep(0.02)
    return bool(what())


@pytest.mark.quick
def test_a_node_that_falls_silent_or_never_spoke_is_lost_and_one_that_beats_is_not() -> None:
    store = HashStore()
    first, second = watch(store, 0, 3), watch(store, 1, 3)
    first.start()
    second.start()
    assert wait_until(lambda: first.over and second.over, 5)
    assert str(first.over).startswith("node 2 of 3 has been silent for 0 s")
    second._ended.set()  # without a word
    again = watch(store, 0)
    again.start()
    assert wait_until(lambda: again.over, 5) and "node 1 of 2" in str(again.over)
    first.stop()
    again.stop()


@pytest.mark.quick
def test_nodes_that_leave_in_order_are_not_lost_and_failures_are_heard_at_once() -> None:
    store = HashStore()
    first, second = watch(store, 0), watch(store, 1)
    first.start()
    second.start()
    second.stop()
    time.sleep(0.8)
    assert first.over is None
    second.report_failed()
    assert wait_until(lambda: first.over, 5) and first.over == "processes of node 1 failed"
    first.stop()


@pytest.mark.quick
def test_the_last_word_of_a_node_that_leaves_is_that_it_left() -> None:
    store = SlowStore()
    first = NodeWatch(store, 0, 2, silent_s=60.0, beat_s=2.0)
    first.start()
    assert store.writes.wait(10)
    first.stop()  # while a heartbeat is on its way
    first._thread.join(10)
    assert store.get("foundry_moe/beat/0") == b"left"


class SlowStore(HashStore):
    """A heartbeat takes 0.3 s."""

    def __init__(self) -> None:
        super().__init__()
        self.writes = threading.Event()

    def set(self, key: str, value: str) -> None:
        self.writes.set()
        if value != "left":
            time.sleep(0.3)
        super().set(key, value)


@pytest.mark.quick
def test_silence_counts_only_while_this_node_could_listen() -> None:
    store = HashStore()
    first = watch(store, 0)
    store.set("foundry_moe/beat/1", "1")
    first.look()
    time.sleep(0.5)  # this node was stopped
    first.look()
    assert first.over is None
    for _ in range(12):
        time.sleep(0.05)
        first.look()
    assert first.over is not None


@pytest.mark.quick
def test_the_environment_says_how_long_a_silence_is(monkeypatch) -> None:
    assert silent_s() == SILENT_S
    for text, seconds in (("60", 60.0), ("1", 5.0), ("soon", SILENT_S)):
        monkeypatch.setenv("NODE_SILENCE_S", text)
        assert silent_s() == seconds


@pytest.mark.timeout(300)
def test_the_rest_starts_anew_when_a_node_stops_without_a_word(tmp_path) -> None:
    (tmp_path / "worker.py").write_text(WORKER)
    (tmp_path / "run.yaml").write_text("callbacks: {elastic_checkpoint: {folder: x, grace: 60s}}\n")
    port, agents = free_port(), []
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": paths, "NODE_SILENCE_S": "10"}
    for node in range(2):
        host = "true" if node == 0 else "false"
        conf = f"is_host={host},last_call_timeout=90,keep_alive_interval=1"
        words = ["--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-backend=foundry", "--rdzv-id=x"]
        words += [f"--rdzv-endpoint=127.0.0.1:{port}", f"--rdzv-conf={conf}", "--local-addr=127.0.0.1"]
        words += [f"{tmp_path}/worker.py", f"{tmp_path}/run.yaml", f"folder={tmp_path}", "kind=long"]
        agents.append(
            subprocess.Popen(
                [sys.executable, "-m", "foundry_moe.launch.torchrun", *words],
                env={**environment, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        assert wait_until(lambda: len(list(tmp_path.glob("life-?-0"))) == 2, 120)
        time.sleep(2)  # both have beaten
        for process in [psutil.Process(agents[1].pid), *psutil.Process(agents[1].pid).children(recursive=True)]:
            process.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        # the one that is left was not asked to save, for which it would have 60 s
        assert wait_until(lambda: list(tmp_path.glob("life-0-1")), 55)
        assert time.monotonic() - began > 5 and not list(tmp_path.glob("signal-*"))
    finally:
        for agent in agents:
            for process in [*psutil.Process(agent.pid).children(recursive=True), psutil.Process(agent.pid)]:
                process.kill()
    assert "node 1 of 2 has been silent for 1" in agents[0].communicate()[1]
    agents[1].communicate()


@pytest.mark.quick
def test_one_process_of_a_node_touches_the_heartbeat(tmp_path, monkeypatch) -> None:
    beat()
    monkeypatch.setenv("HEARTBEAT", str(tmp_path / "beat"))
    monkeypatch.setenv("LOCAL_RANK", "1")
    beat()
    assert not (tmp_path / "beat").exists()
    monkeypatch.setenv("LOCAL_RANK", "0")
    beat()
    assert (tmp_path / "beat").exists()


@pytest.mark.quick
def test_a_heartbeat_that_cannot_be_touched_is_one_warning(tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.setattr(logging.getLogger("foundry_moe"), "propagate", True)
    monkeypatch.setenv("HEARTBEAT", str(tmp_path / "missing" / "beat"))
    beat()
    beat()
    assert [record.message for record in caplog.records] == [
        f"HEARTBEAT ({tmp_path}/missing/beat) cannot be touched: No such file or directory"
    ]
