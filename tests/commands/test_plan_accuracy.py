"""The planner's time of a step beside what H200s took, as benchmarks/figures/plan_time.csv has it."""

from __future__ import annotations

import csv
import math
from typing import Any

import pytest

from foundry_moe.commands.plan.constants import shipped_constants
from foundry_moe.commands.plan.planner import Machine, plan_run
from foundry_moe.commands.plan.step import GIB
from tests.helpers.plans import ROOT, load

pytestmark = pytest.mark.quick

WIDE = {
    "model__d_model": 6144,
    "model__n_heads": 48,
    "model__n_layers": 3,
    "model__attn_config": {"attn_type": "grouped_query_attention", "kv_n_heads": 8},
    "model__moe__num_experts": 16,
    "model__moe__expert_hidden_size": 10752,
    "model__moe__top_k": 4,
}
MODELS: dict[str, dict[str, Any]] = {
    "OLMoE, 4 layers": {"model__n_layers": 4},
    "OLMoE": {},
    "DBRX's width, 3 layers": WIDE,
}
YAMLS = {  # of runs on one GPU
    "OLMoE-1B-7B": "olmoe_1b_7b",
    "Qwen3-30B-A3B's width": "qwen3_30b_a3b",
    "DBRX's width": "dbrx_wide",
}


def figures(name: str) -> list[dict[str, str]]:
    with (ROOT / f"benchmarks/figures/{name}.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


ROWS = figures("plan_time")
MEASURED_WITH = {"model__loss_fn": "torch_crossentropy"}  # the fused loss came later
ONE_GPU = [row for row in figures("train_step_one_gpu") if row["way"] == "eager"]


def planned(row: dict[str, str]) -> float:
    """Tokens/s per GPU, four sequences of 4096 each."""
    replicate, shard, expert = (int(width) for width in row["mesh"].strip("()").split(","))
    gpus = replicate * shard * expert
    mesh = {"replicate": replicate, "shard": shard, "expert": expert}
    keys = {**MODELS[row["model"]], "model__moe__mesh": mesh, "global_train_batch_size": 4 * gpus, **MEASURED_WITH}
    machine = Machine(gpus=gpus, gpus_per_node=gpus, gpu_bytes=141 * GIB, constants=shipped_constants("h200"))
    return plan_run(load("yamls/bench/olmoe_1b_7b.yaml", **keys), machine).tokens_per_s


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['model']} {row['mesh']}")
def test_a_measured_step_is_planned_within_15_percent(row: dict[str, str]) -> None:
    measured = float(row["tokens/s per GPU"])
    assert planned(row) == pytest.approx(measured, rel=0.15)
    # the table on the page is the planner's of today
    assert float(row["planned"]) == pytest.approx(planned(row), rel=0.002)
    assert float(row["error"].rstrip("%")) == pytest.approx(100 * (planned(row) / measured - 1), abs=0.3)
    assert abs(float(row["error if it is left out"].rstrip("%"))) < 15 and row["source"]


@pytest.mark.parametrize("model", MODELS)
def test_meshes_of_one_model_and_size_are_in_the_measured_order(model: str) -> None:
    of_model = [row for row in ROWS if row["model"] == model]
    for first in of_model:
        for second in of_model:
            sizes = [math.prod(int(w) for w in row["mesh"].strip("()").split(",")) for row in (first, second)]
            apart = float(first["tokens/s per GPU"]) / float(second["tokens/s per GPU"])
            # what lies within 2.5% changes places from one measurement to the next (130,168 and 127,390 of one mesh)
            if apart > 1.025 and sizes[0] == sizes[1]:
                assert planned(first) > planned(second), (first["mesh"], second["mesh"])


def test_the_table_has_meshes_of_one_two_and_four_gpus_and_both_models() -> None:
    assert {row["model"] for row in ROWS} == set(MODELS)
    assert {len([row for row in ROWS if row["mesh"] == mesh]) for mesh in ("(1, 1, 4)", "(1, 4, 1)")} == {2}


@pytest.mark.parametrize("row", ONE_GPU, ids=lambda row: row["model"])
def test_runs_on_one_gpu_that_no_number_was_chosen_on_are_planned_within_10_percent(row: dict[str, str]) -> None:
    mesh = {"replicate": 1, "shard": 1, "expert": 1}
    keys = {
        "model__n_layers": int(row["layers"]),
        "model__moe__mesh": mesh,
        "global_train_batch_size": 4,
        **MEASURED_WITH,
    }
    machine = Machine(gpus=1, gpus_per_node=1, gpu_bytes=141 * GIB, constants=shipped_constants("h200"))
    plan = plan_run(load(f"yamls/bench/{YAMLS[row['model']]}.yaml", **keys), machine)
    memory = plan.memory_bytes / GIB - 1  # CUDA's own is not measured
    for ours, measured, written, error in (
        (plan.tokens_per_s, row["tokens/s"], row["planned tokens/s"], row["error of time"]),
        (memory, row["GiB"], row["planned GiB"], row["error of memory"]),
    ):
        assert ours == pytest.approx(float(measured), rel=0.1)
        assert float(written) == pytest.approx(ours, rel=0.002)
        assert float(error.rstrip("%")) == pytest.approx(100 * (ours / float(measured) - 1), abs=0.3)
    assert memory == pytest.approx(float(row["GiB"]), rel=0.05)


def test_every_model_on_one_gpu_is_in_the_table() -> None:
    assert {row["model"] for row in ONE_GPU} == set(YAMLS)
