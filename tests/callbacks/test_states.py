"""Every callback, algorithm and scheduler with a state is saved as data, and the rest is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import composer.algorithms
import composer.callbacks
import pytest
import torch
from composer import Callback, Trainer
from composer.algorithms import EMA, SWA, LayerFreezing
from composer.algorithms.ema.ema import EMAParameters
from composer.callbacks import CheckpointSaver, SpeedMonitor
from composer.core import Algorithm, State, Time, Timestamp
from composer.loggers import Logger
from composer.optim.scheduler import compile_composer_scheduler
from llmfoundry import registry
from llmfoundry.callbacks.async_eval_callback import AsyncEval
from llmfoundry.callbacks.curriculum_learning_callback import CurriculumLearning
from llmfoundry.callbacks.dataset_swap_callback import DatasetSwap
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

from foundry_moe.callbacks.elastic_checkpoint import ElasticCheckpoint
from foundry_moe.callbacks.elastic_state import _handed_on, _named, check_storable, describe_mesh
from foundry_moe.checkpoint.codec import decode, encode
from foundry_moe.checkpoint.errors import DamagedError
from tests.callbacks.test_untrusted_state import make_state
from tests.helpers.fake_ranks import fake_ranks
from tests.helpers.line import Line


def curriculum() -> CurriculumLearning:
    config = {"train_loader": {"dataset": {"local": "a"}}, "device_train_batch_size": 1}
    return CurriculumLearning(config, [{"duration": "3tok", "dataset": {"local": "b"}}], "2tok")


def swap() -> DatasetSwap:
    found = DatasetSwap({"train_loader": {"dataset": {"local": "a"}}}, 1)
    found.all_dataset_configs = [{"local": "a", "streams": [{"proportion": 0.5}]}]
    found.saved_dataset_index = 1
    return found


def saver() -> CheckpointSaver:
    found = CheckpointSaver("unused")
    found.all_saved_checkpoints_to_timestamp["a"] = Timestamp(batch=3)
    return found


def async_eval() -> AsyncEval:
    found = object.__new__(AsyncEval)
    found.checkpoints_evaled = {Time.from_batch(3): ("a", "run")}
    return found


def speed() -> SpeedMonitor:
    found = SpeedMonitor()
    found.total_eval_wct = 1.5
    return found


def ema() -> EMA:
    found = EMA(half_life="10ba")
    found.ema_model = EMAParameters(Line())
    found.ema_started = True
    return found


def swa() -> SWA:
    found = SWA()  # without a schedule: that of torch 2.11 has no `anneal_func`, which Composer 0.32 wants to save
    found.swa_model = AveragedModel(Line())
    found.step_counter = 2
    return found


WITH_STATE: dict[type, Callable[[], Any]] = {
    CurriculumLearning: curriculum,
    DatasetSwap: swap,
    CheckpointSaver: saver,
    AsyncEval: async_eval,
    SpeedMonitor: speed,
    EMA: ema,
    SWA: swa,
    LayerFreezing: LayerFreezing,
}


def text(value: Any) -> str:
    return json.dumps(encode(value), sort_keys=True)


def test_no_class_with_a_state_is_missing_below() -> None:
    modules = [getattr(module, name) for module in (composer.callbacks, composer.algorithms) for name in module.__all__]
    found = {cls for cls in modules if isinstance(cls, type) and issubclass(cls, Callback | Algorithm)}
    for entries in (registry.callbacks, registry.callbacks_with_config, registry.algorithms):
        found |= {entries.get(name) for name in entries.get_all()}
    plain = (Callback.state_dict, Algorithm.state_dict)
    with_state = {
        cls
        for cls in found
        if cls.state_dict not in plain and not cls.__module__.startswith(("foundry_moe", "composer.loggers"))
    }
    assert with_state == set(WITH_STATE)


@pytest.mark.parametrize("kind", WITH_STATE)
def test_its_state_is_saved_as_data_and_comes_back(kind) -> None:
    saved = WITH_STATE[kind]()
    (name, data), *_ = _named(saved).items()
    read = decode(json.loads(text(data)))
    fresh = WITH_STATE[kind]()
    fresh.load_state_dict(_handed_on(fresh, _named(fresh)[name], read))
    assert text(_named(fresh)[name]) == text(data)


@pytest.mark.parametrize("name", registry.schedulers.get_all())
def test_schedules_are_saved_as_data(name) -> None:
    state, _ = make_state()
    build = registry.schedulers.get(name)
    keys = {"t_warmup": "1ba"} if "warmup" in name else {}
    keys |= {"t_scale": "1ba", "t_cooldown": "1ba"} if name.startswith("inv_sqrt") else {}
    keys |= {"milestones": "2ba"} if "step" in name and "multi" in name else {}
    state.schedulers = [compile_composer_scheduler(build(**keys), state)]
    check_storable(state)


def test_a_forged_dataclass_or_time_is_damage() -> None:
    own = curriculum()
    data = _named(own)["CurriculumLearning"]
    for forged in (
        {"dataclass.Trainer": {"schedule": [], "schedule_index": 0}},
        {"dataclass.CurriculumLearningState": {"schedule": []}},
        {"dataclass.CurriculumLearningState": 3},
        {"composer.Time": "soon"},
        {"composer.Time": 3},
    ):
        with pytest.raises(DamagedError, match=r"CurriculumLearning\.state holds"):
            _handed_on(own, data, {"state": forged})


class Odd(Callback):
    def state_dict(self) -> dict[str, Any]:
        return {"inner": [object()]}


class Failing(Callback):
    def state_dict(self) -> dict[str, Any]:
        raise KeyError("anneal_func")


@pytest.mark.parametrize(
    ("callback", "cause"),
    [(Odd, r"inner\.0 is a builtins\.object, which a checkpoint cannot hold"), (Failing, "KeyError: 'anneal_func'")],
)
def test_a_state_that_cannot_be_saved_is_refused_before_training(callback, cause, tmp_path: Path) -> None:
    seen: list[int] = []

    class Counts(Callback):
        def batch_start(self, state: State, logger: Logger) -> None:
            seen.append(1)

    model = Line()
    with pytest.raises(ValueError, match=f"callbacks: the state of {callback.__name__} cannot be saved .*{cause}"):
        Trainer(
            model=model,
            train_dataloader=DataLoader([{"x": torch.ones(3)}] * 4, batch_size=2),
            optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
            max_duration="2ba",
            device="cpu",
            callbacks=[callback(), Counts(), ElasticCheckpoint(folder=str(tmp_path / "run"))],
            progress_bar=False,
        ).fit()
    assert not seen


@pytest.mark.quick
def test_the_mesh_of_a_checkpoint_is_that_with_the_most_dimensions() -> None:
    plain = torch.nn.Linear(4, 4)
    assert describe_mesh(plain) == {"world": 1}
    with fake_ranks(8):
        whole = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
        model = torch.nn.ModuleDict(
            {
                "a": torch.nn.Linear(4, 4),
                "b": parallelize_module(torch.nn.Linear(4, 4), whole["shard"], ColwiseParallel()),
            }
        )
        assert describe_mesh(model) == {"shard": 4}
        weight = DTensor.from_local(torch.ones(1, 4), whole, [Replicate(), Shard(0)], run_check=False)
        model["b"].register_parameter("both", torch.nn.Parameter(weight))
        assert describe_mesh(model) == {"replicate": 2, "shard": 4}
        unnamed = DTensor.from_local(torch.ones(1), DeviceMesh("cpu", torch.arange(8)), [Shard(0)], run_check=False)
        plain.register_parameter("scale", torch.nn.Parameter(unnamed))
        assert describe_mesh(plain) == {"dim0": 8}
