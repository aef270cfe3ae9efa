"""What a save holds is the step at which it was called, whatever training does meanwhile."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from foundry_moe.checkpoint import open_store
from foundry_moe.checkpoint.engine import CheckpointEngine
from foundry_moe.checkpoint.training_state import Snapshotter, flatten

pytestmark = pytest.mark.quick


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(64, model[0].in_features, device=model[0].weight.device)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    states = {str(i): dict(state) for i, state in enumerate(optimizer.state.values())}
    return {"model": dict(model.named_parameters()), "optim": states}


def copy_of(state: dict) -> dict:
    return {k: copy_of(v) if isinstance(v, dict) else v.detach().clone() for k, v in state.items()}


@pytest.mark.parametrize(("device", "width"), [("cpu", 128), pytest.param("cuda", 2048, marks=pytest.mark.gpu)])
def test_steps_after_a_save_do_not_reach_it(device: str, width: int, tmp_path) -> None:
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(8))).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    train(model, optimizer)
    engine = CheckpointEngine(open_store(str(tmp_path)))
    engine.prepare(state_of(model, optimizer))
    for step in range(1, 4):
        expected = copy_of(state_of(model, optimizer))
        engine.save(state_of(model, optimizer), step)
        for _ in range(3):
            train(model, optimizer)
        report = engine.wait()
        assert report is not None and report.error is None, report
        found = copy_of(state_of(model, optimizer))
        assert CheckpointEngine(open_store(str(tmp_path))).load(found).step == step
        for section in expected:
            for name, value in expected[section].items():
                values = value.items() if isinstance(value, dict) else [("", value)]
                for key, tensor in values:
                    other = found[section][name][key] if key else found[section][name]
                    assert torch.equal(other, tensor), (step, section, name, key)


def test_a_tensor_of_another_dtype_has_another_plan() -> None:
    snapshotter = Snapshotter(0, 1)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        w = torch.arange(600.0).to(dtype)
        snapshot = snapshotter.take({"model": {"w": w}})
        assert bytes(snapshot.staged.raw.numpy()) == w.view(torch.uint8).numpy().tobytes()


def test_a_small_shard_is_stored_as_one_and_not_in_the_manifest() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        shard, replica = (
            DTensor.from_local(torch.ones(2), mesh, [kind], run_check=False) for kind in (Shard(0), Replicate())
        )
        flat = flatten({"model": {"shard": shard, "replica": replica, "plain": torch.ones(2)}}, 2)
        assert list(flat.tensors) == ["model.shard", "model.replica"]
    finally:
        dist.destroy_process_group()
