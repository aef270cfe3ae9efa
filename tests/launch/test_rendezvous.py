"""The rendezvous of several nodes, while its store restarts."""

from __future__ import annotations

import datetime
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import PrefixStore
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousParameters

from foundry_moe.launch import rendezvous
from foundry_moe.launch.lost_nodes import NodeWatch
from tests.helpers.launching import free_port
from tests.helpers.sockets import reachable

SECURITY = Path(__file__).parents[2] / "docs" / "explanation" / "security.md"


def start_store(port: int) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "foundry_moe.launch.rendezvous", str(port)]
    store = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert store.stdout is not None and f"serving port {port}" in store.stdout.readline()
    return store


def agent(port: int, nodes: str = "1:3") -> Any:
    least, most = map(int, nodes.split(":"))
    keys = {"is_host": "false", "last_call_timeout": 3, "keep_alive_interval": 1, "read_timeout": 20}
    endpoint = f"127.0.0.1:{port}"
    return rendezvous.create_handler(RendezvousParameters("foundry", endpoint, "run", least, most, "127.0.0.1", **keys))


def all_join(agents: list[Any]) -> list[Any]:
    found: list[Any] = [None] * len(agents)

    def join(number: int) -> None:
        found[number] = agents[number].next_rendezvous()

    threads = [threading.Thread(target=join, args=(number,)) for number in range(len(agents))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def wait_until(what: Callable[[], object], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not what() and time.monotonic() < deadline:
        time.sleep(0.05)
    return bool(what())


@pytest.mark.timeout(240)
def test_agents_outlive_a_restart_of_their_store_and_meet_again(monkeypatch) -> None:
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    port = free_port()
    store = start_store(port)
    try:
        agents = [agent(port), agent(port)]
        first = all_join(agents)
        assert [port for _, _, port in reachable(store.pid)] == [port]
        assert "| the store's server | `MASTER_PORT`, 29500 | all |" in SECURITY.read_text()
        assert sorted(one.rank for one in first) == [0, 1] and {one.world_size for one in first} == {2}
        watches = [NodeWatch(one.store, one.rank, 2, silent_s=5, beat_s=0.5) for one in first]
        for watch in watches:
            watch.start()
        store.kill()
        store.wait()
        time.sleep(5)  # longer than three heartbeats of the rendezvous
        store = start_store(port)
        assert [one.num_nodes_waiting() for one in agents] == [0, 0]  # they belong to the same round still
        time.sleep(3)
        watches[1]._ended.set()  # without a word
        assert wait_until(lambda: watches[0].over, 20) and "has been silent" in str(watches[0].over)

        late = agent(port)  # a node that comes later joins the others, and no run of its own
        joining = threading.Thread(target=all_join, args=([late],))
        joining.start()
        assert wait_until(lambda: agents[0].num_nodes_waiting() == 1, 20)
        again = all_join(agents)
        joining.join(60)
        assert {one.world_size for one in again} == {3}
        assert PrefixStore("x", again[0].store).add("count", 1) == 1
        for one in [*agents, late]:
            assert one.shutdown()
    finally:
        store.kill()
        store.wait()


@pytest.mark.timeout(120)
def test_agents_do_not_wait_for_ever_and_not_at_all_at_the_end(monkeypatch) -> None:
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    port = free_port()
    store = start_store(port)
    one = agent(port, "1:1")
    all_join([one])
    store.kill()
    store.wait()
    one.backend.wait_s = 2.0
    time.sleep(1.2)  # torch answers from memory for a second
    began = time.monotonic()
    with pytest.raises(RendezvousConnectionError, match="does not answer"):
        one.num_nodes_waiting()
    assert time.monotonic() - began > 1
    one.backend.wait_s = 300.0  # over this test's limit
    assert not one.shutdown()


@pytest.mark.quick
def test_a_restart_waits_for_other_nodes_more_briefly_than_the_first_start() -> None:
    timeouts = rendezvous._Timeouts(last_call=datetime.timedelta(seconds=30))
    timeouts.nodes = 64
    assert timeouts.last_call.total_seconds() == 30
    timeouts.restarting = True
    assert timeouts.last_call.total_seconds() == pytest.approx(2.14)


@pytest.mark.quick
def test_each_start_after_the_first_is_a_restart() -> None:
    parameters = RendezvousParameters("foundry", "", "job", 1, 1, "127.0.0.1", store_type="hash", last_call_timeout=30)
    handler = rendezvous.create_handler(parameters)
    assert not handler.timeouts.restarting
    for _ in range(2):
        assert (found := handler.next_rendezvous()).world_size == 1 and handler.timeouts.restarting
        assert found.bootstrap_store_info.master_addr == "127.0.0.1"
    assert handler.shutdown()
