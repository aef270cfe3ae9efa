"""Replicas are averaged, and weights freed, in the last microbatch alone; another number of these is an error."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from composer.algorithms import SAM, GradientClipping
from composer.callbacks import OptimizerMonitor
from composer.core import Event
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from foundry_moe.algorithms import dmoe_mesh as mesh_callback
from foundry_moe.algorithms.dmoe_mesh import (
    MeshGradients,
    _check_norms,
    _replace_clipping,
    add_mesh_algorithm,
    count_samples,
)
from foundry_moe.config import MeshConfig
from foundry_moe.launch.run_config import launched_machine, own_mistakes, read_moe
from foundry_moe.optim.adamw import FusedAdamW
from foundry_moe.parallel import transformer_blocks
from foundry_moe.parallel.mesh import plan_mesh
from foundry_moe.schema import raise_mistakes
from tests.helpers.fake_ranks import fake_ranks


class _Recorder(torch.nn.Module):
    """Stands for an FSDP2 module: notes when gradients would be summed over replicas, and when weights be freed."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[bool] = []
        self.freed: list[bool] = []
        self.reduced: list[bool] = []
        self.resharded = 0

    def reshard(self) -> None:
        self.resharded += 1

    def set_requires_gradient_sync(self, flag: bool, *, recurse: bool) -> None:
        self.reduced.append(flag)

    def set_requires_all_reduce(self, flag: bool, *, recurse: bool) -> None:
        self.seen.append(flag)

    def set_reshard_after_backward(self, flag: bool, *, recurse: bool) -> None:
        self.freed.append(flag)


def _run(
    monkeypatch: pytest.MonkeyPatch, batch: Any, size: Any, microbatches: int, **settings: bool
) -> tuple[list[bool], list[bool]]:
    monkeypatch.setattr(transformer_blocks, "FSDPModule", _Recorder)
    model = _Recorder()
    state: Any = SimpleNamespace(batch=batch, device_train_microbatch_size=size, model=model)
    algorithm = MeshGradients(**{"replicated": True, **settings})  # type: ignore[arg-type]
    algorithm.apply(Event.BEFORE_TRAIN_BATCH, state, None)  # type: ignore[arg-type]
    for _ in range(microbatches):
        algorithm.apply(Event.BEFORE_BACKWARD, state, None)  # type: ignore[arg-type]
    algorithm.apply(Event.AFTER_TRAIN_BATCH, state, None)  # type: ignore[arg-type]
    return model.seen, model.freed


def test_only_the_last_microbatch_is_reduced_over_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = {"input_ids": torch.zeros(7, 3)}
    assert _run(monkeypatch, batch, 3, 3) == ([False, False, True], [])
    assert _run(monkeypatch, batch, 7, 1) == ([True], [])


def test_weights_that_are_kept_are_freed_by_the_last_microbatch(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = {"input_ids": torch.zeros(7, 3)}
    last = [False, False, True]
    assert _run(monkeypatch, batch, 3, 3, keeps_weights=True) == (last, last)
    assert _run(monkeypatch, batch, 3, 3, keeps_weights=True, replicated=False) == ([], last)


@pytest.mark.parametrize("replicated", [True, False])
def test_gradients_that_add_up_are_reduced_in_the_last_microbatch_alone(
    monkeypatch: pytest.MonkeyPatch, replicated: bool
) -> None:
    """From the first microbatch on, whose forward pass has gathered the weights."""
    monkeypatch.setattr(transformer_blocks, "FSDPModule", _Recorder)
    monkeypatch.setattr(mesh_callback, "_can_add", lambda module, sharded: sharded and module.resharded == 1)
    monkeypatch.setattr(mesh_callback, "_was_gathered", lambda module: True)
    model, algorithm = _Recorder(), MeshGradients(replicated=replicated, keeps_weights=True)
    state: Any = SimpleNamespace(batch=torch.zeros(6, 3), device_train_microbatch_size=2, model=model)
    last = [False, False, True] * 2
    for event in (Event.BEFORE_TRAIN_BATCH, *[Event.BEFORE_BACKWARD] * 3, Event.AFTER_TRAIN_BATCH) * 2:
        algorithm.apply(event, state, None)  # type: ignore[arg-type]
    assert (model.seen, model.reduced, model.freed) == ([], last, last)
    algorithm.apply(Event.BEFORE_TRAIN_BATCH, state, None)  # type: ignore[arg-type]
    algorithm.apply(Event.BEFORE_BACKWARD, state, None)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=r"had 1 microbatches, not 3 as expected.*reshard_after_forward: true"):
        algorithm.apply(Event.AFTER_TRAIN_BATCH, state, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(("adds", "gathered"), [(False, True), (True, False)])
def test_gradients_do_not_add_up_in_less_than_fp32_or_where_no_forward_pass_has_gathered_weights(
    monkeypatch: pytest.MonkeyPatch, adds: bool, gathered: bool
) -> None:
    monkeypatch.setattr(mesh_callback, "_can_add", lambda module, sharded: True)
    monkeypatch.setattr(mesh_callback, "_was_gathered", lambda module: gathered)
    last = [False, False, True]
    assert _run(monkeypatch, torch.zeros(7, 3), 3, 3, keeps_weights=True, adds=adds) == (last, last)


def test_a_module_can_add_gradients_of_trained_weights_that_are_whole_or_kept() -> None:
    module = torch.nn.Linear(2, 2)
    assert mesh_callback._can_add(module, sharded=True) and not mesh_callback._can_add(module, sharded=False)
    module.requires_grad_(False)
    assert not mesh_callback._can_add(module, sharded=True)


@pytest.mark.parametrize("microbatches", [2, 4])
def test_without_gradients_that_add_up_another_number_of_microbatches_only_frees_weights(
    monkeypatch: pytest.MonkeyPatch, microbatches: int
) -> None:
    freed: list[bool] = []
    monkeypatch.setattr(_Recorder, "reshard", lambda self: freed.append(True))
    batch = {"input_ids": torch.zeros(7, 3)}
    _run(monkeypatch, batch, 3, microbatches, replicated=False, keeps_weights=True)
    assert len(freed) == 1 + (microbatches < 3), "and once before the first batch"


def test_batches_that_cannot_be_counted_are_reduced_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _run(monkeypatch, object(), 3, 3, keeps_weights=True) == ([True] * 3, [True] * 3)


def test_fewer_microbatches_are_an_error_and_more_are_reduced_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = {"input_ids": torch.zeros(7, 3)}
    with pytest.raises(RuntimeError, match="had 2 microbatches, not 3 as expected"):
        _run(monkeypatch, batch, 3, 2)
    assert _run(monkeypatch, batch, 3, 4) == ([False, False, True, True], [])


def test_samples_are_counted_in_tensors_mappings_and_sequences() -> None:
    rows = torch.zeros(5, 2)
    assert [count_samples(batch) for batch in (rows, {"x": rows}, (rows, rows), [])] == [5, 5, 5, None]


@pytest.mark.parametrize(("ranks_per_node", "says"), [(1, True), (2, False), (4, True)])
def test_a_hierarchical_exchange_that_is_flat_says_so(
    caplog: pytest.LogCaptureFixture, ranks_per_node: int, says: bool
) -> None:
    config = MeshConfig(expert=4, shard=1, all_to_all="hierarchical")
    plan = plan_mesh(config, world_size=4, ranks_per_node=ranks_per_node, num_experts=8)
    mesh_callback._say_plan(plan, config)
    assert ("hierarchical is flat here" in caplog.text) == says


def test_mesh_of_the_model_entry_becomes_an_algorithm() -> None:
    run = {"model": {"name": "dmoe_causal_lm", "moe": {"num_experts": 4, "mesh": {"expert": 2}}}}
    assert add_mesh_algorithm(dict(run))["algorithms"] == {"dmoe_mesh": {"expert": 2}}
    other = {**run, "algorithms": {"dmoe_mesh": {"expert": 4}}}
    with pytest.raises(ValueError, match="differ: keep one"):
        add_mesh_algorithm(other)
    assert add_mesh_algorithm({"model": {"name": "mpt_causal_lm"}}) == {"model": {"name": "mpt_causal_lm"}}
    unplanned = add_mesh_algorithm({**run, "fsdp_config": {"reshard_after_forward": "auto"}})
    assert unplanned["fsdp_config"] == {"reshard_after_forward": True}


def check_run(run: dict[str, Any]) -> None:
    raise_mistakes(own_mistakes(run, read_moe(run), launched_machine()))


@pytest.mark.parametrize(
    "run",
    [
        {"model": {"name": "dmoe_causal_lm", "moe": {"num_experts": 4, "mesh": {"expert": 2}}}},
        {"model": {"name": "mpt_causal_lm"}, "algorithms": {"dmoe": {"num_experts": 4, "mesh": {"expert": 2}}}},
    ],
)
def test_compiling_the_whole_model_on_a_mesh_is_refused_with_the_way_that_works(
    monkeypatch: pytest.MonkeyPatch, run: dict[str, Any]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for check in (add_mesh_algorithm, check_run):
        with pytest.raises(ValueError, match=r"compile_config compiles the whole model.* set mesh.compile: blocks"):
            check({**run, "compile_config": {}})
        check({**run, "fsdp_config": {}})
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(ValueError, match=r"set mesh\.compile: blocks"):
        check_run({"model": {"name": "dmoe_causal_lm", "moe": {"num_experts": 4}}, "compile_config": {}})
    check_run({"model": {"name": "mpt_causal_lm"}, "compile_config": {}})


@pytest.mark.quick
def test_gradients_are_clipped_once_by_whoever_clips() -> None:
    """In place of Composer's clipping, which goes; a fused AdamW scales while it reads the gradients."""
    other = MeshGradients(replicated=False)
    run: Any = SimpleNamespace(
        algorithms=[GradientClipping("norm", 0.5), other], model=torch.nn.Linear(2, 2, bias=False)
    )
    _replace_clipping(run, replicated=False)
    first, ours = run.algorithms
    assert first is other and (ours.clipping_type, ours.clipping_threshold) == ("norm", 0.5)
    fused = FusedAdamW.__new__(FusedAdamW)
    for optimizer, norm in ((object(), 0.5), (fused, 2.0)):
        run.optimizers, run.model.weight.grad = [optimizer], torch.ones(2, 2)
        ours.apply(Event.AFTER_TRAIN_BATCH, run, SimpleNamespace(log_metrics=lambda _: None))
        assert run.model.weight.grad.norm().item() == pytest.approx(norm, rel=1e-5)
    assert fused.gradient_factor.item() == pytest.approx(0.25, rel=1e-5)


def test_two_clippings_are_refused() -> None:
    twice: Any = SimpleNamespace(algorithms=[GradientClipping("norm", 0.01), GradientClipping("value", 1.0)])
    with pytest.raises(ValueError, match="gradient_clipping: 2 of them, and a mesh takes one"):
        _replace_clipping(twice, replicated=False)


@pytest.mark.parametrize(
    ("part", "sentence"),
    [
        ({"callbacks": [OptimizerMonitor()]}, "callbacks.optimizer_monitor does not support .* mesh/gradient_norm"),
        ({"algorithms": [SAM()]}, "algorithms.sam does not support experts on a mesh of their own"),
    ],
)
def test_what_adds_up_norms_over_several_meshes_is_refused_before_training(part: Any, sentence: str) -> None:
    with fake_ranks(2):
        names = ("shard", "expert")
        weights = [
            DTensor.from_local(torch.zeros(2), init_device_mesh("cpu", (2,), mesh_dim_names=(n,))) for n in names
        ]
        model: Any = SimpleNamespace(parameters=lambda: weights)
        state: Any = SimpleNamespace(model=model, **{"callbacks": [], "algorithms": [], **part})
        with pytest.raises(ValueError, match=sentence):
            _check_norms(state)
        weights.pop()
        _check_norms(state)  # all gradients are on one mesh
