"""Checkpoints that earlier versions wrote still load: `fixtures/format_N` is a folder of one, kept as it was written.

Written by two processes (`write`, called with an empty folder by `run_processes`) with the version that last wrote
format N. A change of the format adds a folder and leaves the older ones alone.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from foundry_moe.checkpoint import open_store
from foundry_moe.checkpoint.engine import CheckpointEngine
from foundry_moe.checkpoint.ledger import Ledger
from foundry_moe.checkpoint.range_reads import verify
from tests.helpers.older_formats import FIXTURES, STEP, make_state


def write(folder: str) -> None:
    """On each of two processes."""
    state = make_state()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model, moments = state["model"], state["optim"]["state"]["dense"]
    for section, name in ((model, "experts"), (model, "dense"), (moments, "exp_avg")):
        section[name] = distribute_tensor(section[name], mesh, [Shard(0)])
    engine = CheckpointEngine(open_store(folder), group=dist.group.WORLD, info={"mesh": {"shard": 2}})
    engine.save(state, STEP, {"samples": 56})
    report = engine.wait()
    assert report is not None and report.error is None, report


@pytest.mark.quick
@pytest.mark.parametrize("name", sorted(path.name for path in FIXTURES.iterdir()))
def test_a_checkpoint_of_an_earlier_format_loads(name: str, tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / name, tmp_path / name)
    store = open_store(str(tmp_path / name))
    (key,) = Ledger(store).newest_first()
    assert not verify(store, Ledger(store).open(key))
    expected, state = make_state(), make_state()
    tensors = [*state["model"].values(), *state["optim"]["state"]["dense"].values()]
    for tensor in tensors:
        tensor.fill_(-1)
    loaded = CheckpointEngine(store).load(state)
    assert loaded is not None and loaded.step == STEP and not loaded.rejected
    for section, wanted in (("model", expected["model"]), ("optim", expected["optim"]["state"]["dense"])):
        got = loaded.state[section] if section == "model" else loaded.state[section]["state"]["dense"]
        for tensor_name, tensor in wanted.items():
            assert got[tensor_name].dtype == tensor.dtype and torch.equal(got[tensor_name], tensor), tensor_name
    assert loaded.state["optim"]["param_groups"] == expected["optim"]["param_groups"]
    values, wanted_values = dict(loaded.state["values"]), expected["values"]
    assert np.array_equal(values.pop("array"), wanted_values.pop("array"))
    assert values == wanted_values and loaded.summary["samples"] == 56
