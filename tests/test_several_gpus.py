"""The script for machines of several GPUs: its commands are runs that can start and fit, and nothing is lost."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest

from benchmarks import several_gpus
from benchmarks.several_gpus import Part, figures_of, meshes_of, parts_of, verdict
from foundry_moe.cli import parse
from foundry_moe.commands.plan.constants import shipped_constants
from foundry_moe.commands.plan.planner import Machine, plan_run
from foundry_moe.commands.plan.step import GIB
from foundry_moe.launch.run_config import check_whole_run, load_run, plain

H200_BYTES = 139 * GIB
STEP = {
    "step_ms": 400.0,
    "tokens_per_s_per_gpu": 43_000,
    "mfu": 0.4,
    "allocated_gib": 50.0,
    "slowest_over_median": 1.2,
}


def test_meshes_divide_experts_and_have_all_gpus():
    assert meshes_of(4) == [(1, 1, 4), (2, 1, 2), (1, 2, 2)]
    assert {(2, 2, 2), (1, 2, 4), (2, 1, 4), (1, 1, 8)} < set(meshes_of(8))


@pytest.mark.quick
@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_every_step_is_a_run_that_can_start_and_fits_an_h200(gpus):
    steps = [part for part in parts_of(gpus) if "benchmarks/train_step.py" in part.command]
    assert len(steps) >= 8
    for part in steps:
        at = part.command.index("benchmarks/train_step.py")
        count, yaml, *overrides = int(part.command[at - 1]), *part.command[at + 1 :]
        run = plain(load_run(str(several_gpus.ROOT / yaml), list(overrides)))
        check_whole_run(run)
        constants = shipped_constants("h200")
        planned = plan_run(run, Machine(gpus=count, gpus_per_node=8, gpu_bytes=H200_BYTES, constants=constants))
        assert planned.memory_bytes < H200_BYTES, (part.name, planned.memory_bytes / GIB)
        assert planned.mesh.world_size == count


@pytest.mark.parametrize("gpus", [2, 8])
def test_other_parts_are_commands_that_are_there(gpus):
    names = [part.name for part in parts_of(gpus)]
    assert len(set(names)) == len(names)
    for part in parts_of(gpus):
        script = next(word for word in part.command[1:] if word.endswith(".py") or word == "foundry_moe.cli")
        if script == "foundry_moe.cli":
            parse(part.command[part.command.index(script) + 1 :])
        else:
            assert (several_gpus.ROOT / script).is_file()


def python(name: str, code: str, limit_s: float = 60) -> Part:
    return Part(name=name, command=(sys.executable, "-c", code), limit_s=limit_s)


def run(monkeypatch, capsys, parts, *arguments):
    """(exit code, what was printed)."""
    monkeypatch.setattr(several_gpus, "parts_of", lambda gpus: parts)
    monkeypatch.setattr(several_gpus.torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(sys, "argv", ["several_gpus.py", *map(str, arguments)])
    return several_gpus.main(), capsys.readouterr().out


def test_a_second_call_runs_what_has_not_ended_well(monkeypatch, capsys, tmp_path):
    step = json.dumps(STEP)
    parts = [
        python("olmoe-1-1-4", f"print('words'); print('{step}')"),
        python("fails", f"import os, sys; print('why'); sys.exit(not os.path.exists('{tmp_path}/mended'))"),
        python("hangs", "import time; time.sleep(600)", limit_s=1),
    ]
    code, printed = run(monkeypatch, capsys, parts, tmp_path / "out")
    assert code == 1 and "hangs: exit code 124" in printed
    report = (tmp_path / "out" / "report.md").read_text()
    assert (
        "| olmoe-1-1-4 | 400.0 | 43000 | 0.4 | 396 | 50.0 | 1.2 | tokens/s per GPU 42000, 45600: floor; slowest"
        in report
    )
    assert "## fails: exit code 1" in report and "why" in report and "## hangs: exit code 124" in report
    (tmp_path / "mended").touch()
    code, printed = run(monkeypatch, capsys, parts[:2], tmp_path / "out")
    assert code == 0 and "olmoe" not in printed and "fails: exit code 0" in printed
    changed = python("olmoe-1-1-4", f"print('{step}')")
    _, printed = run(monkeypatch, capsys, [changed], tmp_path / "out")
    assert "olmoe-1-1-4: exit code 0" in printed


def test_no_part_begins_after_the_minutes_are_over(monkeypatch, capsys, tmp_path):
    parts = [python("first", "import time; time.sleep(0.3)"), python("second", "1")]
    code, printed = run(monkeypatch, capsys, parts, tmp_path, "--minutes", 0.1 / 60)
    assert code == 0 and "not begun, for lack of time: second" in printed


def test_what_a_part_started_ends_with_it(tmp_path):
    child = f"import time; time.sleep(5); open('{tmp_path}/late', 'w')"
    part = python("x", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])", limit_s=1)
    assert several_gpus.run_part(part, tmp_path).exit_code == 124
    time.sleep(5)
    assert not (tmp_path / "late").exists()


def test_goals_are_those_of_four_gpus():
    found = figures_of("noise\n{not json\n" + json.dumps(STEP))
    assert verdict("dbrx", 4, found)[0] == "MFU 0.52, 0.58: missed" and len(verdict("dbrx", 8, found)) == 1
    assert verdict("qwen3", 4, {**found, "TFLOP/s": 401})[0].endswith("aim")
    assert figures_of("words\n{}") is None


def test_bad_arguments_are_one_line():
    for arguments, sentence in (
        (["x", "--gpus", "3"], "--gpus (3) must be"),
        (["x", "--only", "nothing"], "names none of"),
        (["x", "--gpus", "4096"], "this host has"),
    ):
        command = [sys.executable, "benchmarks/several_gpus.py", *arguments]
        done = subprocess.run(command, cwd=several_gpus.ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode == 2 and sentence in done.stderr
