"""A small state, checkpoints of it, and damage to them."""

from __future__ import annotations

import torch

from foundry_moe.checkpoint.engine import CheckpointEngine, Policy
from foundry_moe.checkpoint.ledger import Ledger
from foundry_moe.checkpoint.records import CommitKey


def make_state(step: int) -> dict:
    """Tensors of several dtypes and shapes, an empty one, small ones that live in the manifest, and values."""
    ramp = torch.arange(4096, dtype=torch.float32)
    return {
        "model": {
            "experts": (ramp.reshape(4, 16, 64) + step).to(torch.bfloat16),
            "dense": ramp.reshape(64, 64) * step,
            "view": (ramp + step).reshape(64, 64).t(),  # not contiguous
            "bytes": (ramp % 251 + step).to(torch.uint8),
            "empty": torch.empty(0, 7),
            "scalar": torch.tensor(float(step)),
            "large_scalar_list": torch.arange(100) + step,
        },
        "optim": {"state": {"w": {"step": torch.tensor(step), "exp_avg": ramp - step}}, "groups": [{"lr": 0.1 * step}]},
        "values": {"step": step, "tuple": (1, {"a": None}), "late": torch.full((300,), float(step))},
    }


def blank(info=None) -> dict:
    state = make_state(0)
    for tensor in [*state["model"].values(), *state["optim"]["state"]["w"].values()]:
        tensor.fill_(0)
    del state["values"]["late"]  # a section that may lack what the checkpoint has
    return state


def check(loaded, step: int) -> None:
    expected = make_state(step)
    assert loaded is not None and loaded.step == step
    for section in ("model",):
        for name, tensor in expected[section].items():
            got = loaded.state[section][name]
            assert got.dtype == tensor.dtype and torch.equal(got, tensor), name
    for name, tensor in expected["optim"]["state"]["w"].items():
        assert torch.equal(loaded.state["optim"]["state"]["w"][name], tensor)
    assert loaded.state["optim"]["groups"] == expected["optim"]["groups"]
    assert loaded.state["values"]["tuple"] == (1, {"a": None})
    assert torch.equal(loaded.state["values"]["late"], expected["values"]["late"])


def save(store, *steps: int, **policy) -> CheckpointEngine:
    """A run that goes on from what is there and saves these steps, waiting for each."""
    engine = CheckpointEngine(store, policy=Policy(**{"keep": 10, **policy}))
    engine.load(blank)
    for step in steps:
        engine.save(make_state(step), step)
        report = engine.wait()
        assert report is not None and report.error is None, report
    return engine


def steps_in(store) -> list[int]:
    return [key.step for key in Ledger(store).newest_first()]


def data_object(store, step: int) -> str:
    return next(entry.key for entry in store.scan(f"steps/{step:012d}/") if entry.key.endswith(".bin"))


def damage(store, step: int, kind: str) -> None:
    key = data_object(store, step)
    attempt = key.split("/data/")[0]
    raw = store.get(key)
    if kind == "bit flipped":
        place = len(raw) // 3
        store.put(key, raw[:place] + bytes([raw[place] ^ 1]) + raw[place + 1 :])
    elif kind == "object truncated":
        store.put(key, raw[:-1])
    elif kind == "object too long":
        store.put(key, raw + b"1")
    elif kind == "object missing":
        store.delete([key])
    elif kind == "manifest missing":
        store.delete([f"{attempt}/MANIFEST"])
    elif kind == "manifest of another attempt":
        other = data_object(store, step - 1).split("/data/")[0]
        store.put(f"{attempt}/MANIFEST", store.get(f"{other}/MANIFEST"))
    elif kind == "data of another attempt":
        store.put(key, store.get(data_object(store, step - 1)))
    elif kind == "commit torn":
        record = CommitKey(generation=0, step=step).key
        store.put(record, store.get(record)[:40])
    elif kind == "commit altered":
        record = CommitKey(generation=0, step=step).key
        store.put(record, store.get(record).replace(b'"step": 2', b'"step": 1'))


def check_begins(store, weights) -> None:
    """A run that resumes from the folder begins at step 0 with these weights and an optimizer of its own."""
    asked = []

    def make(info):
        asked.append(info["weights_only"])
        return {"model": {name: torch.zeros_like(tensor) for name, tensor in weights.items()}}

    loaded = CheckpointEngine(store).load(make)
    assert asked == [True] and loaded.step == 0
    for name, tensor in weights.items():
        assert torch.equal(loaded.state["model"][name], tensor), name
