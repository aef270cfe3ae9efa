"""Copies that go on after `save` returned: they hold the step that was saved, or the save fails."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from foundry_moe.checkpoint.engine import CheckpointEngine
from foundry_moe.checkpoint.errors import CheckpointError
from foundry_moe.checkpoint.overlap import Copies
from foundry_moe.checkpoint.snapshot import merge
from foundry_moe.checkpoint.store import open_store


class Event:
    """Stands for a CUDA event on a machine without a GPU."""

    def __init__(self) -> None:
        self._over = threading.Event()

    def synchronize(self) -> None:
        assert self._over.wait(10)

    def record(self) -> None:
        self._over.set()


def test_source_written_before_release_fails_the_save() -> None:
    weight, event = torch.zeros(4), Event()
    copies = Copies({"w": weight}, event)
    weight.view(2, 2).add_(1)  # through a view: it shares the version
    event.record()
    with pytest.raises(CheckpointError, match="1 tensors changed while they were copied, w among them"):
        copies.wait()


def test_source_may_be_written_after_release(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = []

    class Stream:
        def wait_event(self, event: Event) -> None:
            waited.append(event)

    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    weight, event = torch.zeros(4), Event()
    copies = Copies({"w": weight}, event)
    copies.release()
    weight.add_(1)
    copies.release()  # again: nothing happens
    event.record()
    copies.wait()
    assert waited == [event]


def test_merged_copies_bring_the_same_bytes() -> None:
    source = torch.arange(60, dtype=torch.float32)
    target = torch.full((70,), -1.0)
    cuts = [(0, 10, 0), (10, 20, 10), (20, 32, 20), (32, 40, 40), (44, 60, 48)]  # a gap in the target, then in both
    pairs = [(target[at : at + end - start], source[start:end]) for start, end, at in cuts]
    other = torch.arange(6, dtype=torch.float32)[::2]  # not contiguous
    pairs += [(target[64:67], other), (target[67:70], other)]
    merged = merge(pairs)
    assert [pair[0].numel() for pair in merged] == [32, 8, 16, 3, 3]
    for to, of in merged:
        to.copy_(of)
    expected = torch.full((70,), -1.0)
    for start, end, at in cuts:
        expected[at : at + end - start] = source[start:end]
    expected[64:67] = expected[67:70] = other
    assert torch.equal(target, expected)


def training(width: int = 2048, layers: int = 8) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    train(model, optimizer)
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, engine: CheckpointEngine | None = None) -> None:
    model(torch.randn(64, model[0].in_features, device="cuda")).square().mean().backward()
    if engine is not None:
        engine.release()
    optimizer.step()
    optimizer.zero_grad()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    states = {str(i): dict(state) for i, state in enumerate(optimizer.state.values())}
    return {"model": dict(model.named_parameters()), "optim": states}


def copy_of(state: dict) -> dict:
    return {k: copy_of(v) if isinstance(v, dict) else v.detach().clone() for k, v in state.items()}


def steady(model: nn.Module, optimizer: torch.optim.Optimizer) -> list:
    return [*model.parameters(), *(v for state in optimizer.state.values() for v in state.values())]


@pytest.mark.gpu
def test_steps_after_a_save_do_not_reach_it(tmp_path) -> None:
    model, optimizer = training()
    engine = CheckpointEngine(open_store(str(tmp_path)))
    engine.prepare(state_of(model, optimizer))
    for step in range(1, 4):
        expected = copy_of(state_of(model, optimizer))
        engine.save(state_of(model, optimizer), step, steady=steady(model, optimizer))
        for _ in range(3):
            train(model, optimizer, engine)
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


@pytest.mark.gpu
def test_weights_written_outside_the_optimizer_fail_the_save(tmp_path) -> None:
    model, optimizer = training()
    engine = CheckpointEngine(open_store(str(tmp_path)))
    engine.save(state_of(model, optimizer), 1, steady=steady(model, optimizer))
    with torch.no_grad():
        model[0].weight.mul_(2)
    engine.release()
    report = engine.wait()
    assert report is not None and "weight" in str(report.error), report
