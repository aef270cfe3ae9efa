"""`foundry-moe plan --search` and `--json`: every mesh, best first, with reasons."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from foundry_moe.cli import parse
from foundry_moe.commands.plan import command as module
from foundry_moe.commands.plan.command import format_search, search_rows
from foundry_moe.commands.plan.planner import Machine, RunPlan, search_meshes, why_not
from foundry_moe.commands.plan.step import GIB
from tests.helpers.plans import ROOT, load

pytestmark = pytest.mark.quick

BENCH = "yamls/bench/olmoe_1b_7b.yaml"


def four(gib: float = 141, **keys: Any) -> Machine:
    return Machine(gpus=4, gpus_per_node=4, gpu_bytes=gib * GIB, **keys)


def mesh_of(plan: RunPlan) -> tuple[int, int, int]:
    return plan.mesh.replicate, plan.mesh.shard, plan.mesh.expert


def test_every_mesh_is_found_once_and_the_fastest_that_fits_comes_first() -> None:
    plans, invalid = search_meshes(load(BENCH), four(gib=80))
    assert not invalid and sorted(mesh_of(plan) for plan in plans) == [
        *((1, 1, 4), (1, 2, 2), (1, 4, 1)),
        *((2, 1, 2), (2, 2, 1), (4, 1, 1)),
    ]
    fit = [plan for plan in plans if plan.fits]
    assert fit == plans[: len(fit)] and 1 < len(fit) < len(plans)
    speeds = [plan.tokens_per_s for plan in fit if not plan.tight]
    assert speeds == sorted(speeds, reverse=True)
    assert why_not(plans[0], plans[0]) == "" and all(why_not(plan, plans[0]) for plan in plans[1:])
    (large,) = (plan for plan in plans if mesh_of(plan) == (4, 1, 1))
    assert why_not(large, plans[0]) == f"does not fit by {large.memory_bytes / GIB - 80:.1f} GiB"


def test_experts_over_two_nodes_lose_by_their_all_to_all() -> None:
    run = load(BENCH, global_train_batch_size=64)
    plans, _ = search_meshes(run, Machine(gpus=16, gpus_per_node=8, gpu_bytes=141 * GIB))
    (across,) = (plan for plan in plans if mesh_of(plan) == (1, 1, 16))
    assert "all-to-all between nodes" in why_not(across, plans[0])
    assert plans[0].mesh.expert <= 8


def test_an_invalid_mesh_is_listed_with_its_reason() -> None:
    run = load(BENCH, model__moe__expert_hidden_size=1026)
    assert (1, 4, 1) in [mesh_of(plan) for plan in search_meshes(run, four())[0]], "whole experts are sharded"
    plans, invalid = search_meshes(load(BENCH, model__moe__expert_hidden_size=1023), four())
    assert "must divide expert_hidden_size (1023)" in invalid[1, 2, 2]
    text = format_search(search_rows(plans, invalid), {}, four())
    assert "          1     2      2        -  invalid: mesh.shard (2) must divide" in text


def command(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    arguments = parse(["plan", str(ROOT / BENCH), "--gpus", "4", "--gpus-per-node", "4", "--chip", "h200", *words])
    code = arguments.run(arguments)
    return code, capsys.readouterr().out


def test_json_has_the_plan_and_with_search_every_mesh(capsys: pytest.CaptureFixture[str]) -> None:
    memory = ["--gpu-memory-gib", "141"]
    code, text = command(capsys, *memory, "--json")
    plan = json.loads(text)
    assert code == 0 and "search" not in plan
    assert sum(plan["memory_bytes"].values()) == pytest.approx(plan["memory_total_bytes"])
    assert sum(plan["time_s"].values()) == pytest.approx(plan["step_s"])
    assert plan["mesh"] == {"replicate": 1, "shard": 1, "expert": 4} and plan["fits"] is True
    assert plan["tokens_per_s_per_gpu"] == pytest.approx(4 * 4096 / plan["step_s"])
    code, text = command(capsys, *memory, "--json", "--search")
    more = json.loads(text)
    assert more["step_s"] == plan["step_s"]
    assert len(more["search"]) == 6 and more["search"][0]["fits"] and more["search"][0]["tokens_per_s_per_gpu"] > 0


def test_code_says_whether_the_run_fits_in_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = command(capsys, "--gpu-memory-gib", "24", "--json", "--search")
    found = json.loads(text)
    assert code == 1 and not found["fits"] and not any(entry["fits"] for entry in found["search"])
    assert "none fits" in command(capsys, "--gpu-memory-gib", "24", "--search")[1]


def test_the_table_marks_the_runs_own_mesh_and_says_what_is_assumed(capsys: pytest.CaptureFixture[str]) -> None:
    text = command(capsys, "--search", "--gpu-memory-gib", "141")[1]
    (own,) = (line for line in text.splitlines() if line.startswith("*"))
    assert own.split()[1:4] == ["1", "1", "4"]
    assert "NVIDIA H200" in text and "GB/s per GPU" in text and "assumed, not measured: launch_s" in text


def test_a_run_is_read_and_planned_once_with_a_search(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = {"load_run": 0, "plan_run": 0}

    def counted(name: str) -> Any:
        function = getattr(module, name)

        def call(*arguments: Any) -> Any:
            calls[name] += 1
            return function(*arguments)

        return call

    for name in calls:
        monkeypatch.setattr(module, name, counted(name))
    command(capsys, "--search")
    assert calls == {"load_run": 1, "plan_run": 1}


def test_constants_of_a_file_make_the_estimate(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    values = json.loads((ROOT / "foundry_moe/commands/plan/constants_h200.json").read_text())
    values["expert_flops_per_s"] = {"1024": 5.68e13}
    (tmp_path / "slow.json").write_text(json.dumps(values))
    as_shipped, slow = (
        json.loads(command(capsys, "--json", *words)[1])["time_s"]["experts"]
        for words in ([], ["--constants", str(tmp_path / "slow.json")])
    )
    assert slow == pytest.approx(10 * as_shipped, rel=0.05)
