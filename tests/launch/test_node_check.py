"""A node's check before it joins: planted faults are found, in memory, products, sums and bandwidth."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from foundry_moe.launch import node_check
from foundry_moe.launch.user_errors import BAD_NODE

pytestmark = pytest.mark.quick
CPU = torch.device("cpu")


def test_a_good_processor_has_no_fault() -> None:
    assert node_check.memory_fault(CPU, 1 << 20) is None and node_check.product_fault(CPU) is None
    assert node_check.link_faults([CPU] * 3, 0.0) == {} and node_check.link_faults([CPU], 1e9) == {}


@pytest.mark.parametrize("bit", [2, 3])  # one is set in the first pattern, one in its complement
@pytest.mark.parametrize("stuck", [0, 1])
def test_a_bit_that_does_not_hold_is_found(bit: int, stuck: int, monkeypatch) -> None:
    fill = torch.Tensor.fill_

    def fill_with_a_stuck_bit(block: torch.Tensor, value: int) -> torch.Tensor:
        fill(block, value)
        block[7] = (block[7] | 1 << bit) if stuck else (block[7] & ~(1 << bit))
        return block

    monkeypatch.setattr(torch.Tensor, "fill_", fill_with_a_stuck_bit)
    assert node_check.memory_fault(CPU, 1 << 20) == "1 words of its memory do not hold what was written"


def test_addresses_that_reach_the_same_memory_are_found(monkeypatch) -> None:
    monkeypatch.setattr(node_check, "CHUNK_BYTES", 4096)
    assert node_check.memory_fault(CPU, 4 * 4096) is None
    block = torch.empty(1024, dtype=torch.int32)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: block)
    assert node_check.memory_fault(CPU, 4 * 4096) == f"{2 * 3 * 1024} words of its memory do not hold what was written"


def test_one_wrong_element_of_a_product_is_found(monkeypatch) -> None:
    multiply = torch.Tensor.__matmul__

    def multiply_wrong(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        product = multiply(left, right)
        product[3, 5] *= 1.01
        return product

    monkeypatch.setattr(torch.Tensor, "__matmul__", multiply_wrong)
    assert node_check.product_fault(CPU) == "2 elements of matrix products are wrong"


def test_a_device_with_a_wrong_sum_and_a_slow_link_are_found(monkeypatch) -> None:
    reduce = node_check._all_reduce

    def reduce_wrong(values: list[torch.Tensor]) -> None:
        reduce(values)
        values[1][0] += 1

    assert "less than LINK_GB_S (1e+09)" in node_check.link_faults([CPU] * 2, 1e9)[0]
    monkeypatch.setattr(node_check, "_all_reduce", reduce_wrong)
    assert node_check.link_faults([CPU] * 3, 0.0) == {1: "its part of an all-reduce of this node is wrong"}


def test_a_bad_node_is_one_sentence_and_an_exit_code_of_its_own(monkeypatch, capsys) -> None:
    monkeypatch.setattr(node_check, "product_fault", lambda device: "3 elements of matrix products are wrong")
    assert node_check.main() == BAD_NODE == 5
    error = capsys.readouterr().err
    assert "3 elements of matrix products are wrong; take this node out of service" in error and error.count("\n") == 1


def test_a_bad_node_starts_no_launcher(tmp_path) -> None:
    root = Path(__file__).parents[2]
    (tmp_path / "python").write_text('#!/bin/sh\ncase "$*" in *node_check*) exit 5 ;; esac\necho launched\n')
    (tmp_path / "python").chmod(0o755)
    node = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "a", "NPROC": "1", "PATH": f"{tmp_path}:/usr/bin:/bin"}
    words = ["/bin/sh", str(root / "docker" / "entrypoint.sh"), "worker"]
    assert subprocess.run(words, env=node, capture_output=True).returncode == BAD_NODE
    done = subprocess.run(words, env={**node, "NODE_CHECK": "0"}, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "launched\n"


@pytest.mark.gpu
def test_the_gpus_of_this_machine_pass() -> None:
    done = subprocess.run([sys.executable, "-m", "foundry_moe.launch.node_check"], capture_output=True, text=True)
    assert done.returncode == 0 and "node check:" in done.stdout, done.stderr
