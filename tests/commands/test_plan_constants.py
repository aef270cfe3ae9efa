"""The constants of `foundry-moe plan`: their file, and what `benchmarks/calibrate.py` measures on a CPU."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.calibrate import Sizes, calibrate, fit_link
from foundry_moe.commands.plan.constants import Constants, rate_at, read_constants, shipped_constants
from foundry_moe.launch.processes import run_processes


@pytest.mark.quick
def test_a_link_is_fitted_to_its_times_and_noise_gives_no_impossible_one() -> None:
    link = fit_link([(size, 40e-6 + size / 200e9) for size in (1e6, 16e6, 128e6)])
    assert asdict(link) == pytest.approx({"latency_s": 40e-6, "bytes_per_s": 200e9}, rel=1e-6)
    falling = fit_link([(1e6, 3e-3), (16e6, 2e-3)])
    assert falling.latency_s > 0 and falling.bytes_per_s == pytest.approx(16e6 / 2e-3)


@pytest.mark.quick
def test_a_rate_lies_between_those_of_the_nearest_widths() -> None:
    rates = {"1024": 4e14, "4096": 6e14}
    assert rate_at(rates, 2048) == pytest.approx(5e14)
    assert rate_at(rates, 9000) == 6e14 and rate_at(rates, 1024) == 4e14
    assert 2e14 < rate_at(rates, 512) < 4e14


@pytest.mark.quick
def test_a_chip_without_constants_is_one_sentence() -> None:
    assert shipped_constants("h100").device.startswith("NVIDIA H100")
    with pytest.raises(ValueError, match=r"--chip \(a100\) has not been measured: run benchmarks/calibrate.py"):
        shipped_constants("a100")


@pytest.mark.quick
@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"format": 2}, r"format \(2\) must be 1"),
        ({"memory_bytes_per_s": 0}, r"memory_bytes_per_s \(0\) must be a number above 0"),
        ({"memory_bytes_per_s": "fast"}, "memory_bytes_per_s must be a number, not 'fast'"),
        ({"contention": -1}, r"contention \(-1\) must be 0 or more"),
        ({"dense_flops_per_s": {}}, r"dense_flops_per_s \(\{\}\) must have a rate for at least one width"),
        ({"dense_flops_per_s": {"wide": 1e12}}, r"dense_flops_per_s \(.*wide.*\) must have a rate"),
        ({"expert_flops_per_s": {"1024": -1}}, r"expert_flops_per_s.1024 \(-1\)"),
        ({"all_to_all": {"latency_s": 1e-5}}, "all_to_all.bytes_per_s is missing"),
        ({"network": {"latency_s": 0, "bytes_per_s": 1}}, r"network.latency_s \(0\) must be a number above 0"),
        ({"memory_byte_per_s": 1}, "did you mean 'memory_bytes_per_s'"),
    ],
)
def test_a_file_that_is_not_of_this_form_is_one_sentence(
    changes: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    path = tmp_path / "constants.json"
    path.write_text(json.dumps({**asdict(shipped_constants("h200")), **changes}))
    with pytest.raises(ValueError, match=sentence):
        read_constants(path)


@pytest.mark.quick
def test_a_file_that_is_not_there_or_no_json_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No such file"):
        read_constants(tmp_path / "none.json")
    (tmp_path / "torn.json").write_text('{"format": 1,')
    with pytest.raises(ValueError, match="is not JSON"):
        read_constants(tmp_path / "torn.json")


TINY = Sizes(
    tokens=32,
    widths=(32, 64),
    experts=((32, 32, 4, 2, 32),),
    attention=(1, 2, 32, 16),
    copied_bytes=2**16,
    launches=50,
    message_bytes=(2**12, 2**15, 2**17),
)


def calibrate_a_cpu() -> Constants:
    return calibrate(torch.device("cpu"), TINY)


def test_two_processes_measure_all_but_the_network_and_plan_reads_the_file(tmp_path: Path) -> None:
    found = run_processes(calibrate_a_cpu, world_size=2)
    assert (found.device, found.gpus, found.assumed) == ("CPU", 2, ("network",))
    assert set(found.dense_flops_per_s) == {"32", "64"} and set(found.expert_flops_per_s) == {"32"}
    assert found.all_to_all != shipped_constants("h200").all_to_all
    (tmp_path / "mine.json").write_text(json.dumps(asdict(found)))
    assert read_constants(tmp_path / "mine.json") == found


def test_one_process_assumes_the_shipped_links() -> None:
    alone = calibrate_a_cpu()
    assert set(alone.assumed) == {"network", "all_to_all", "all_gather", "reduce_scatter", "contention"}
    assert alone.all_gather == shipped_constants("h200").all_gather
