"""`foundry-moe plan --restart`: what the standstill after a lost node consists of, and what would be too slow."""

from __future__ import annotations

from typing import Any

import pytest

from foundry_moe.cli import parse
from foundry_moe.commands.plan.memory import GIB
from foundry_moe.commands.plan.planner import Machine, plan_run
from foundry_moe.commands.plan.restart_time import Rates, RestartTime, format_restart, restart_time
from tests.commands.test_plan import ROOT, load

pytestmark = pytest.mark.quick

CLUSTER = "yamls/cluster/64x8gpu.yaml"


def predict(rates: Rates | None = None, gpus: int = 512, **overrides: Any) -> RestartTime:
    run = load(CLUSTER, **overrides)
    machine = Machine(gpus=gpus, gpus_per_node=8, gpu_bytes=80 * GIB)
    return restart_time(run, plan_run(run, machine), machine, rates or Rates())


def test_64_nodes_go_on_with_56_within_five_minutes() -> None:
    restart = predict()
    assert restart.plan.mesh.world_size == 448 and not restart.replaced and restart.repeated == "10m"
    # 12 bytes a parameter, fetched once by 56 nodes at 2 GB/s
    assert restart.seconds["fetching it"] == pytest.approx(12 * 131.6e9 / 56 / 2e9, rel=0.01)
    # a GPU holds 1/64 of it and fetches 1/448
    assert restart.seconds["between ranks"] == pytest.approx(12 * 131.6e9 * (1 / 64 - 1 / 448) / 1e9, rel=0.01)
    assert restart.total_s < 300
    assert "warning" not in format_restart(restart)


def test_a_slow_store_is_named() -> None:
    text = format_restart(predict(Rates(store=0.1e9)))
    assert "more than 5 minutes, most of them fetching it" in text


def test_without_spares_or_room_another_node_is_waited_for() -> None:
    for restart in (predict(model__moe__mesh__spares=False), predict(gpus=64)):
        assert restart.replaced
        assert "once another has taken its place (not counted)" in format_restart(restart)


def test_silence_is_what_the_environment_says_and_a_step_what_is_given(monkeypatch) -> None:
    monkeypatch.setenv("NODE_SILENCE_S", "120")
    restart = predict(Rates(step_s=7.0))
    assert restart.seconds["detection"] == 125 and restart.seconds["first batch"] == 7.0


def test_a_run_without_checkpoints_is_warned() -> None:
    assert "begins from the start" in format_restart(predict(callbacks__elastic_checkpoint=None))


def test_the_command_prints_it_behind_the_plan(capsys) -> None:
    arguments = parse(["plan", str(ROOT / CLUSTER), "--gpus", "512", "--restart", "--store-gb-s", "4"])
    assert arguments.run(arguments) == 0
    printed = capsys.readouterr().out
    assert "at 4 GB/s each" in printed and printed.index("messages of a GPU") < printed.index("restart after a node")
    with pytest.raises(SystemExit):
        parse(["plan", "x.yaml", "--gpus", "8", "--store-gb-s", "0"])
