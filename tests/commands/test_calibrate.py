"""`foundry-moe plan --calibrate`: its measurements on a CPU, and the file that it writes."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from foundry_moe.cli import main
from foundry_moe.commands.plan.calibrate import Sizes, calibrate, chip_of, fit_link
from foundry_moe.commands.plan.constants import constants_of, default_path, rate_at, read_constants

ROOT = Path(__file__).parents[2]


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
def test_a_gpu_is_known_by_its_name() -> None:
    assert [chip_of(name) for name in ("NVIDIA H200", "NVIDIA A100-SXM4-80GB", "NVIDIA GB9000")] == [
        "h200",
        "a100",
        "nvidia-gb9000",
    ]


@pytest.mark.quick
def test_a_file_is_read_as_it_was_written_and_found_where_calibrate_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    shipped = constants_of("h200")
    mine = replace(shipped, source="mine")
    default_path("h200").parent.mkdir(parents=True)
    default_path("h200").write_text(json.dumps(asdict(mine)))
    assert constants_of("h200") == mine != shipped and constants_of("h100").device.startswith("NVIDIA H100")
    with pytest.raises(ValueError, match=r"--chip \(a100\) has not been measured: run foundry-moe plan --calibrate"):
        constants_of("a100")


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
    path.write_text(json.dumps({**asdict(constants_of("h200")), **changes}))
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


def test_two_processes_measure_all_but_the_network_and_plan_reads_the_file(tmp_path: Path) -> None:
    found = calibrate(torch.device("cpu"), 2, TINY)
    assert (found.device, found.gpus, found.assumed) == ("CPU", 2, ("network",))
    assert set(found.dense_flops_per_s) == {"32", "64"} and set(found.expert_flops_per_s) == {"32"}
    assert found.all_to_all != constants_of("h200").all_to_all
    (tmp_path / "mine.json").write_text(json.dumps(asdict(found)))
    assert read_constants(tmp_path / "mine.json") == found


def test_one_process_assumes_the_shipped_links() -> None:
    alone = calibrate(torch.device("cpu"), 1, TINY)
    assert set(alone.assumed) == {"network", "all_to_all", "all_gather", "reduce_scatter", "contention"}
    assert alone.all_gather == constants_of("h200").all_gather


@pytest.mark.quick
def test_the_command_writes_what_it_prints(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*words: str) -> tuple[object, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["plan", "--calibrate", *words])
        return ended.value.code, *capsys.readouterr()

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    code, _, error = run()
    assert code == 2 and "torch sees no GPU" in error
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    shipped = constants_of("h200")
    monkeypatch.setattr("foundry_moe.commands.plan.calibrate.calibrate", lambda *_: shipped)
    code, _, error = run("--gpus", "3")
    assert code == 2 and "--gpus (3): this machine has 2" in error
    code, text, error = run()
    out = default_path("h200")
    assert code == 0 and error == f"wrote {out}\n" and text == out.read_text() and read_constants(out) == shipped


def test_it_needs_no_trainer() -> None:
    code = (
        "import sys, foundry_moe.commands.plan.calibrate, foundry_moe.ops\n"
        "print({'omegaconf', 'composer', 'llmfoundry', 'transformers', 'yaml'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr
