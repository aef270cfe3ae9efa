"""The script for weak scaling: its launches are runs that can start, and a trace's times are those of its kernels."""

from __future__ import annotations

import argparse

import pytest

from benchmarks.scaling import LAYERS, command_of, device_times, meshes_of
from foundry_moe.launch.run_config import check_whole_run, load_run, plain

pytestmark = pytest.mark.quick


def test_meshes_use_every_gpu():
    assert [meshes_of(gpus) for gpus in (1, 2)] == [[(1, 1, 1)], [(1, 1, 2), (1, 2, 1), (2, 1, 1)]]
    assert meshes_of(8) == [(1, 1, 8), (1, 8, 1), (2, 1, 4)]


KEYS = ["model.moe.mesh.buffer=1.5"]


@pytest.mark.parametrize("run", LAYERS)
@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 1, 2)])
def test_every_launch_is_a_run_that_can_start(run, mesh):
    arguments = argparse.Namespace(run=run, layers=None, microbatches=2, balanced=False, keys=KEYS)
    command = command_of(mesh, arguments)
    at = command.index("benchmarks/train_step.py")
    config = plain(load_run(command[at + 1], command[at + 2 :]))
    check_whole_run(config)
    gpus = mesh[0] * mesh[1] * mesh[2]
    assert command[at - 1] == str(gpus)
    assert config["global_train_batch_size"] == 2 * gpus * config["device_train_microbatch_size"]
    assert config["model"]["moe"]["mesh"] == {
        **dict(zip(("replicate", "shard", "expert"), mesh, strict=True)), "compile": "blocks", "buffer": 1.5,
    }  # fmt: skip


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
