"""`foundry-moe plan --calibrate`: what it measures on a CPU, and the file that it writes."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from foundry_moe.commands.plan import calibrate as module
from foundry_moe.commands.plan import measure
from foundry_moe.commands.plan.calibrate import calibrate, chip_of, format_constants
from foundry_moe.commands.plan.constants import (
    CHIPS,
    MEMORY_GIB,
    Constants,
    at_width,
    constants_of,
    read_constants,
    write_constants,
)
from foundry_moe.commands.plan.measure import fit_link

ROOT = Path(__file__).parents[2]


@pytest.mark.quick
def test_a_link_is_found_in_its_times_and_noise_makes_none_impossible() -> None:
    points = [(size, 40e-6 + size / 200e9) for size in (1e6, 16e6, 128e6)]
    assert fit_link(points) == pytest.approx({"latency_s": 40e-6, "bytes_per_s": 200e9}, rel=1e-6)
    falling = fit_link([(1e6, 3e-3), (16e6, 2e-3)])
    assert falling["latency_s"] > 0 and falling["bytes_per_s"] == pytest.approx(16e6 / 2e-3)
    with pytest.raises(ValueError, match="at least two sizes"):
        fit_link([(1e6, 1e-3), (1e6, 2e-3)])


@pytest.mark.quick
def test_rates_between_widths_lie_between_theirs() -> None:
    rates = {"1024": 4e14, "4096": 6e14}
    assert at_width(rates, 2048) == pytest.approx(5e14)
    assert at_width(rates, 9000) == 6e14 and at_width(rates, 1024) == 4e14
    assert 2e14 < at_width(rates, 512) < 4e14


@pytest.mark.quick
def test_a_gpu_is_known_by_its_name() -> None:
    assert [chip_of(name) for name in ("NVIDIA H200", "NVIDIA A100-SXM4-80GB", "NVIDIA GB9000")] == [
        "h200",
        "a100",
        "nvidia-gb9000",
    ]


@pytest.mark.quick
def test_a_file_is_read_as_it_was_written_and_found_beside_the_tiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOUNDRY_MOE_TUNING_CACHE", str(tmp_path / "tiles.json"))
    shipped = constants_of("h200")
    mine = replace(shipped, source="mine")
    write_constants(mine, tmp_path / "constants-h200.json")
    assert constants_of("h200") == mine != shipped and constants_of("h100").device == "NVIDIA H100"
    with pytest.raises(ValueError, match=r"--chip \(a100\) has not been measured: run foundry-moe plan --calibrate"):
        constants_of("a100")
    assert set(MEMORY_GIB) == set(CHIPS)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"format": 2}, r"format \(2\) must be 1"),
        ({"memory_bytes_per_s": 0}, r"memory_bytes_per_s \(0\) must be above 0"),
        ({"memory_bytes_per_s": "fast"}, "memory_bytes_per_s must be a number, not 'fast'"),
        ({"contention": -1}, r"contention \(-1\) must be 0 or more"),
        ({"dense_flops_per_s": {}}, "dense_flops_per_s is empty"),
        ({"dense_flops_per_s": {"wide": 1e12}}, "dense_flops_per_s.wide .* must be a width"),
        ({"expert_flops_per_s": {"1024": -1}}, r"expert_flops_per_s.1024 \(-1\)"),
        ({"all_to_all": {"latency_s": 1e-5}}, "all_to_all.bytes_per_s is missing"),
        ({"network": {"latency_s": 0, "bytes_per_s": 1}}, r"network: latency_s \(0\) must be above 0"),
        ({"memory_byte_per_s": 1}, "did you mean 'memory_bytes_per_s'"),
    ],
)
def test_a_file_that_is_not_of_this_form_is_one_sentence(
    changes: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    path = tmp_path / "constants.json"
    path.write_text(json.dumps({**asdict(constants_of("h200")), **changes}))
    with pytest.raises(ValueError, match=sentence):
        read_constants(path)


@pytest.mark.quick
def test_a_file_that_is_not_there_or_no_json_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No such file"):
        read_constants(tmp_path / "none.json")
    (tmp_path / "torn.json").write_text('{"format": 1,')
    with pytest.raises(ValueError, match="is no JSON"):
        read_constants(tmp_path / "torn.json")


@pytest.fixture(scope="module")
def of_this_cpu() -> Constants:
    tiny = measure.Sizes(
        tokens=32,
        widths=(32, 64),
        experts=((32, 32, 4, 2, 32),),
        attention=(1, 2, 32, 16),
        copied_bytes=2**16,
        launches=50,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "CPU", tiny)
        return calibrate("cpu")


def test_two_cpu_processes_measure_themselves_and_say_that_they_are_cpus(of_this_cpu: Constants) -> None:
    assert (of_this_cpu.device, of_this_cpu.gpus, of_this_cpu.assumed) == ("CPU", 2, ("network",))
    assert set(of_this_cpu.dense_flops_per_s) == {"32", "64"} and set(of_this_cpu.expert_flops_per_s) == {"32"}
    assert of_this_cpu.all_to_all != constants_of("h200").all_to_all
    text = format_constants(of_this_cpu)
    assert "warning: these constants are of CPUs" in text and "assumed: network" in text


def test_one_process_takes_its_links_from_what_is_shipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "CPU_ROUNDS", 1)
    alone = calibrate("cpu", gpus=1)
    assert set(alone.assumed) == {"network", "all_to_all", "all_gather", "reduce_scatter", "contention"}
    assert alone.all_gather == constants_of("h200").all_gather
    with pytest.raises(ValueError, match=r"--gpus \(9\)"):
        module.calibrate("cpu", gpus=9)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ValueError, match="torch sees no GPU here"):
        module.calibrate("cuda")


def test_it_needs_no_trainer() -> None:
    code = (
        "import sys, foundry_moe.commands.plan.calibrate, foundry_moe.ops\n"
        "print({'omegaconf', 'composer', 'llmfoundry', 'transformers', 'yaml'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr
