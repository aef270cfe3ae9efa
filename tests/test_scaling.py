"""The script for weak scaling: its launches are runs that can start, and a trace's times are those of its kernels."""

from __future__ import annotations

import argparse

import pytest

from benchmarks.scaling import LAYERS, command_of, device_times, launches_of, meshes_of, middle_of, row_of
from foundry_moe.launch.run_config import check_whole_run, load_run, plain

pytestmark = pytest.mark.quick


def test_meshes_use_every_gpu():
    assert [meshes_of(gpus) for gpus in (1, 2)] == [[(1, 1, 1)], [(1, 1, 2), (1, 2, 1), (2, 1, 1)]]
    assert meshes_of(8) == [(1, 1, 8), (1, 8, 1), (2, 1, 4)]


def test_choices_are_even_where_experts_are_divided():
    one, experts, shards = (1, 1, 1), (1, 1, 2), (1, 2, 1)
    assert launches_of([one, experts, shards], False) == [(one, False), (experts, False), (shards, False)]
    assert launches_of([one, experts, shards], True) == [(one, False), (one, True), (experts, True), (shards, False)]
    assert launches_of([one, shards], True) == [(one, False), (shards, False)]


KEYS = ["model.moe.mesh.buffer=1.5"]


@pytest.mark.parametrize("run", LAYERS)
@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 1, 2)])
def test_every_launch_is_a_run_that_can_start(run, mesh):
    arguments = argparse.Namespace(run=run, layers=None, microbatches=2, keys=KEYS)
    command = command_of((mesh, False), arguments)
    at = command.index("benchmarks/train_step.py")
    assert command.pop() == "--first-microbatch"
    config = plain(load_run(command[at + 1], command[at + 2 :]))
    check_whole_run(config)
    gpus = mesh[0] * mesh[1] * mesh[2]
    assert command[at - 1] == str(gpus)
    assert config["global_train_batch_size"] == 2 * gpus * config["device_train_microbatch_size"]
    assert config["model"]["moe"]["mesh"] == {
        **dict(zip(("replicate", "shard", "expert"), mesh, strict=True)), "compile": "blocks", "buffer": 1.5,
    }  # fmt: skip


def test_a_line_is_the_median_run_over_that_of_one_gpu():
    def run(step_ms: float, first: float | None) -> dict[str, object]:
        def speed(ms: float) -> dict[str, object]:
            return {"step_ms": ms, "tokens_per_s_per_gpu": round(1e6 / ms), "mfu": 0.4}

        later = {} if first is None else {"first_microbatch": speed(first)}
        return {**speed(step_ms), **later, "slowest_over_median": 1 + step_ms / 1000, "reserved_gib": 5.5}

    middle = middle_of([run(400, 100), run(500, 125), run(1000, 250)])
    one_gpu = middle_of([run(400, 100), run(400, 100)])
    assert row_of(((1, 1, 1), False), one_gpu, one_gpu)[2::4] == ["1.000", "1.000", "5.5"]
    cells = ["(1, 1, 2), even", "2,000", "0.800", "40.0%", "500", "8,000", "0.800", "40.0%", "125", "1.50", "5.5"]
    assert row_of(((1, 1, 2), True), middle, one_gpu) == cells
    assert row_of(((1, 1, 2), False), run(500, None), None) == ["(1, 1, 2)", "2,000", "", "40.0%", "500", "1.50", "5.5"]


def test_a_trace_is_divided_into_kernels_nccl_alone_and_nothing():
    def event(name: str, begin: float, end: float, cat: str = "kernel") -> dict[str, object]:
        return {"name": name, "cat": cat, "ts": begin, "dur": end - begin}

    events = [
        event("matmul", 1000, 3000),
        event("copy", 2000, 4000, "gpu_memcpy"),
        event("ncclDevKernel_SendRecv", 3500, 6000),
        event("matmul", 8000, 9000),
        event("aten::mm", 0, 20000, "cpu_op"),
        {"name": "ProfilerStep", "ph": "M"},
    ]
    assert device_times({"traceEvents": events}) == (6.0, 2.0)
