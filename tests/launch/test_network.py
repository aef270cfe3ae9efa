"""The network between nodes is measured when a run starts."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from foundry_moe.commands.plan.constants import shipped_constants
from foundry_moe.launch import network
from foundry_moe.launch.processes import run_processes
from tests.helpers.launching import PRELOAD


@pytest.mark.quick
def test_the_warning_compares_with_what_plan_assumes() -> None:
    for chip in ("h100", "h200"):
        assert shipped_constants(chip).network.bytes_per_s == network.ASSUMED_GB_S * 1e9
    assert network.warning_of(4.6) == ""
    assert "has 1.2 GB/s per GPU, less than a tenth of the 45 GB/s" in network.warning_of(1.2)


def measure() -> float:
    return network.all_reduce_gb_s(nodes=2, device=torch.device("cpu"), seconds=0.2)


def report() -> str:
    os.environ["LOCAL_WORLD_SIZE"] = "1"  # two nodes of one process
    with contextlib.redirect_stdout(io.StringIO()) as out:
        network.log_network_speed()
    return out.getvalue()


def test_two_nodes_measure_and_log_their_network() -> None:
    assert 0.001 < run_processes(measure, world_size=2, preload=PRELOAD) < 1000
    said = run_processes(report, world_size=2, preload=PRELOAD)
    assert said.startswith("network: ") and said.endswith(" GB/s per process between 2 nodes\n")


@pytest.fixture
def four_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two nodes of two processes on a fake process group, whose messages carry nothing."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


@pytest.mark.quick
def test_the_bandwidth_is_what_each_process_sends_to_other_nodes(four_ranks: None, monkeypatch: Any) -> None:
    monkeypatch.setattr(network, "_seconds", lambda values, count: 0.25 * count)
    sent_bytes = 4 * 2 * network.CPU_BYTES * (2 - 1) / 2  # in a second, by each node
    assert network.all_reduce_gb_s(2, torch.device("cpu"), seconds=1.0) == sent_bytes / 2 / 1e9


@pytest.mark.quick
def test_the_network_is_not_measured_after_a_restart_or_on_one_node(four_ranks: None, monkeypatch: Any, capsys) -> None:
    monkeypatch.setattr(network, "all_reduce_gb_s", lambda nodes, device: 1.5)
    for restarts, ranks, words in (("1", "2", ""), ("0", "4", ""), ("0", "2", "network: 1.5 GB/s per process")):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        network.log_network_speed()
        said = capsys.readouterr().out
        assert words in said and bool(words) == bool(said)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("given", "served", "changed"),
    [
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "1", "RANK": "0"}, [], []),
        ({"MASTER_PORT": "1"}, [], ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"]),
        ({}, [], ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"]),
        (
            {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "7", "RANK": "0", "MASTER_ADDR": "host"},
            [7],
            ["GLOO_SOCKET_IFNAME", "MASTER_ADDR", "NCCL_SOCKET_IFNAME", "TORCHELASTIC_USE_AGENT_STORE"],
        ),
        (
            {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "7", "RANK": "1", "MASTER_ADDR": "host"},
            [],
            ["GLOO_SOCKET_IFNAME", "MASTER_ADDR", "NCCL_SOCKET_IFNAME", "TORCHELASTIC_USE_AGENT_STORE"],
        ),
        (
            {"WORLD_SIZE": "2", "MASTER_PORT": "7", "RANK": "0", "TORCHELASTIC_USE_AGENT_STORE": "True"},
            [],
            ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"],
        ),
        ({"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth0"}, [], []),
    ],
    ids=["two nodes", "no launcher", "one process", "first rank", "second rank", "torchrun", "chosen"],
)
def test_a_run_on_one_machine_listens_on_loopback_alone(
    given: dict[str, str], served: list[int], changed: list[str], monkeypatch: Any
) -> None:
    ports: list[int] = []
    environment = dict(given)
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(network, "local_store", ports.append)
    network.stay_on_one_machine()
    assert ports == served
    assert sorted(name for name, value in environment.items() if given.get(name) != value) == changed
    if changed:
        assert (environment["GLOO_SOCKET_IFNAME"], environment["NCCL_SOCKET_IFNAME"]) == ("lo", "=lo")
    if "MASTER_ADDR" in changed:
        assert (environment["MASTER_ADDR"], environment["TORCHELASTIC_USE_AGENT_STORE"]) == ("127.0.0.1", "True")
