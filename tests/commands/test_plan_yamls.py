"""The runs in `yamls/` are what the planner would choose: no warning, and next to the best mesh that --search finds."""

from __future__ import annotations

import re
from typing import Any

import pytest

from foundry_moe.commands.plan.planner import Machine, plan_run, search_meshes
from foundry_moe.commands.plan.shape import read_shape
from foundry_moe.commands.plan.step import GIB
from tests.helpers.plans import ROOT, RUNS, load

pytestmark = pytest.mark.quick

SHARD = "model__moe__mesh__shard"
ONE_NODE = {"model__moe__mesh__expert": 8, SHARD: 1, "device_train_microbatch_size": 1}
# a run, its GPUs, GPUs per node, GiB of one, and keys that the YAML's first lines give for so many
SIZES: list[tuple[str, int, int, float, dict[str, Any]]] = [
    *((path, *machine, {}) for path, machine in RUNS.items()),
    ("yamls/cluster/64x8gpu.yaml", 448, 8, 80, {}),
    ("yamls/cluster/olmoe_1b_7b.yaml", 64, 8, 80, {SHARD: 16}),
    ("yamls/cluster/olmoe_1b_7b.yaml", 512, 8, 80, {SHARD: 32}),
    ("yamls/cluster/qwen3_30b_a3b.yaml", 8, 8, 80, ONE_NODE),
    ("yamls/cluster/qwen3_30b_a3b.yaml", 512, 8, 80, {SHARD: 32}),
]


@pytest.mark.parametrize(("path", "gpus", "per_node", "gib", "keys"), SIZES, ids=lambda value: str(value)[:40])
def test_a_run_has_no_warning_and_is_within_3_percent_of_the_best_mesh(
    path: str, gpus: int, per_node: int, gib: float, keys: dict[str, Any]
) -> None:
    run = load(path, **keys)
    machine = Machine(gpus=gpus, gpus_per_node=per_node, gpu_bytes=gib * GIB)
    shape = read_shape(run)
    plan = plan_run(run, machine, shape=shape)
    assert not plan.warnings and not plan.spares
    best = search_meshes(run, machine, shape)[0][0]
    assert plan.step_s <= 1.03 * best.step_s


def test_what_the_first_lines_of_a_run_say_of_other_sizes_is_what_is_planned_here() -> None:
    for path, gpus, per_node, _, keys in SIZES:
        if keys:
            words = [f"{key.replace('__', '.')}={value}" for key, value in keys.items()]
            nodes = {1: "one node", 8: "8 nodes", 64: "64 nodes"}[gpus // per_node]
            assert f"{nodes}: {' '.join(words)}" in (ROOT / path).read_text()


@pytest.mark.parametrize("path", ["yamls/bench/dbrx_wide.yaml", "yamls/bench/qwen3_30b_a3b.yaml"])
@pytest.mark.parametrize("gpus", [4, 2, 1])
def test_a_benchmark_of_a_large_model_has_as_many_layers_as_fit(path: str, gpus: int) -> None:
    keys: dict[str, int | str] = {}
    if gpus < 4:
        (line,) = re.findall(rf"^# {gpus} GPUs?: (.*)$", (ROOT / path).read_text(), re.MULTILINE)
        keys = {key.replace(".", "__"): int(value) for key, value in (word.split("=") for word in line.split())}
    run = load(path, model__loss_fn="torch_crossentropy", **keys)
    assert run["global_train_batch_size"] == 4 * gpus
    machine = Machine(gpus=gpus, gpus_per_node=gpus, gpu_bytes=139 * GIB)
    assert not plan_run(run, machine).warnings
    run["model"]["n_layers"] += 1
    assert plan_run(run, machine).warnings
