"""The network between nodes is measured when a run starts."""

from __future__ import annotations

import contextlib
import io
import os

import pytest
import torch

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
