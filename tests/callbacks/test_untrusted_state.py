"""What a forged checkpoint may do through Composer's loader: spoil a run, and never run code."""

from __future__ import annotations

import copy
import io
from pathlib import Path

import pytest
import torch
from composer.algorithms import LabelSmoothing
from composer.callbacks import SpeedMonitor
from composer.core import Algorithm, State
from composer.devices import DeviceCPU
from composer.loggers import Logger, ProgressBarLogger
from composer.models import ComposerClassifier
from composer.optim import ConstantWithWarmupScheduler
from composer.optim.scheduler import compile_composer_scheduler
from torch import nn

from foundry_moe.callbacks.elastic_checkpoint import ElasticCheckpoint
from foundry_moe.callbacks.elastic_state import _check_data, _check_groups, _check_timestamp, collect, restore
from foundry_moe.checkpoint import open_store
from foundry_moe.checkpoint.engine import CheckpointEngine
from foundry_moe.checkpoint.errors import DamagedError, MismatchError
from foundry_moe.checkpoint.ledger import Ledger
from tests.helpers.forging import forge_manifest, manifest_of

# every key that `State.load_state_dict` looks at, with and without the underscore that it strips
LOADED = (
    *("model", "optimizers", "schedulers", "algorithms", "callbacks", "scaler", "timestamp", "rank_zero_seed"),
    *("train_metrics", "eval_metrics", "run_name", "dataset_state"),
)
INTERPRETED = (*LOADED, "is_model_ddp", "is_model_ddp_wrapped", "integrations", "metadata")


class Setting(Algorithm):
    """Sets each key of its state as an attribute, as Composer's EMA does."""

    def __init__(self) -> None:
        self.started = False

    def state_dict(self) -> dict:
        return {**super().state_dict(), "started": self.started}

    def load_state_dict(self, state) -> None:
        for key, value in state.items():
            if key != "repr":
                setattr(self, key, value)

    def match(self, event, state) -> bool:
        return False

    def apply(self, event, state, logger) -> None: ...


def make_state(seed: int = 0) -> tuple[State, Logger]:
    torch.manual_seed(seed)
    model = ComposerClassifier(nn.Linear(4, 2), num_classes=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    callback = ElasticCheckpoint(folder="unused", interval="1ba")
    state = State(
        rank_zero_seed=7,
        run_name="mine",
        model=model,
        device=DeviceCPU(),
        optimizers=optimizer,
        algorithms=[LabelSmoothing(0.1), Setting()],
        callbacks=[SpeedMonitor(window_size=3), callback],
        device_train_microbatch_size=1,
        max_duration="10ba",
    )
    state.schedulers = [compile_composer_scheduler(ConstantWithWarmupScheduler(t_warmup="2ba"), state)]
    return state, Logger(state)


def resume(folder: Path) -> State:
    """A run that finds its newest good checkpoint, as the trainer calls the callback."""
    state, logger = make_state(1)
    callback = ElasticCheckpoint(folder=str(folder), interval="1ba")
    callback.after_load(state, logger)
    return state


@pytest.fixture
def folder(tmp_path) -> Path:
    """Two checkpoints, of batches 1 and 2."""
    path = tmp_path / "run"
    engine = CheckpointEngine(open_store(str(path)))
    state, _ = make_state()
    for step in (1, 2):
        state.timestamp = state.timestamp.to_next_batch(samples=8)
        engine.save(collect(state), step)
        assert engine.wait().error is None
    return path


def evil(mark: Path) -> str:
    """Python that Composer's loader would evaluate behind the word `algorithms.`."""
    return f"__name__ or {{}} if not open({str(mark)!r}, 'w').close() else 0"


def payloads(mark: Path):
    """Values that a loader which interprets its data might run, or choke on."""
    python = evil(mark)
    pairs = [["Alibi", {"repr": python}], ["Setting", {"repr": python}], ["LabelSmoothing", {"repr": python}]]
    by_name = {name: {"repr": python, "load_state_dict": python, "__class__": python} for name, _ in pairs}
    return [
        pairs,
        by_name,
        python,
        5,
        [python],
        {"Setting": python},
        {"Setting": [python]},
        {"LambdaLR": {"step": python}},
    ]


def test_a_forged_algorithm_runs_nothing(folder, tmp_path) -> None:
    mark = tmp_path / "mark"

    def change(body) -> None:
        body["values"]["composer"]["_algorithms"] = [["Alibi", {"repr": evil(mark)}]]
        body["values"]["composer"]["model"] = {}

    forge_manifest(open_store(str(folder)), 2, change)
    state = resume(folder)
    assert not mark.exists(), "Python out of the checkpoint was run"
    assert state.timestamp.batch.value == 1, "the checkpoint before"


def test_composers_loader_knows_no_key_that_this_test_does_not() -> None:
    state, _ = make_state()
    assert set(state.serialized_attributes) == set(LOADED)


@pytest.mark.parametrize("key", INTERPRETED)
def test_no_key_of_composers_loader_runs_code(folder, tmp_path, key) -> None:
    """Whatever stands under the key, under `model` beside it, or within an object of that name."""
    mark = tmp_path / "mark"
    store = open_store(str(folder))
    whole = manifest_of(store, 2)
    for name in (key, f"_{key}"):
        for payload in payloads(mark):

            def change(body, name=name, payload=payload) -> dict:
                body = copy.deepcopy(whole)
                body["values"]["composer"] |= {"model": {}, name: payload} if key != "model" else {name: payload}
                return body

            forge_manifest(store, 2, change)
            state = resume(folder)
            assert not mark.exists(), (name, payload)
            assert state.timestamp.batch.value == 1, (name, payload)
            assert isinstance(state.callbacks[0], SpeedMonitor) and state.run_name == "mine"


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("composer", "schedulers", "LambdaLR", "base_lrs"), "0.1"),
        (("composer", "schedulers", "LambdaLR", "last_epoch"), [1]),
        (("composer", "schedulers", "LambdaLR"), [1]),
        (("composer", "timestamp", "Timestamp", "batch"), "2"),
        (("composer", "timestamp", "Timestamp", "batch"), -2),
        (("composer", "timestamp", "Timestamp", "total_wct"), 5),
        (("composer", "timestamp", "Timestamp"), {}),
        (("composer", "algorithms", "Setting"), "Setting"),
        (("composer", "algorithms", "Setting", "started"), "x"),
        (("composer", "callbacks", "SpeedMonitor"), 3),
        (("composer", "rank_zero_seed"), "seven"),
        (("composer", "dataset_state"), "all"),
        (("optim", "param_groups"), {"lr": 1}),
        (("optim", "param_groups"), ["x"]),
        (("optim", "param_groups", 0, "lr"), "0.1"),
        (("optim", "param_groups", 0, "betas"), 0.9),
        (("optim", "param_groups", 0, "params"), 3),
        (("optim", "more"), 1),
        (("composer",), [1]),
        (("rng",), [1]),
    ],
)
def test_a_value_of_another_kind_is_damage(folder, place, value) -> None:
    def change(body) -> None:
        inner = body["values"]
        for key in place[:-1]:
            inner = inner[key]
        inner[place[-1]] = value

    forge_manifest(open_store(str(folder)), 2, change)
    assert resume(folder).timestamp.batch.value == 1


def test_no_method_is_replaced_by_data(folder) -> None:
    """Schedulers and some algorithms set each key of their state as an attribute."""

    def change(body) -> None:
        composer = body["values"]["composer"]
        composer["algorithms"]["Setting"] |= {"step": "x", "apply": "x", "match": "x", "__dict__": {}, "repr": "x"}
        composer["schedulers"]["LambdaLR"] |= {"__dict__": {}, "__class__": 3}

    forge_manifest(open_store(str(folder)), 2, change)
    state = resume(folder)
    assert state.timestamp.batch.value == 2
    setting = next(item for item in state.algorithms if isinstance(item, Setting))
    assert callable(setting.apply) and callable(setting.match) and not hasattr(setting, "repr")
    assert callable(state.schedulers[0].step) and callable(state.schedulers[0].get_lr)


def test_a_progress_bar_is_not_made_of_a_checkpoint(folder) -> None:
    """Composer's bar formats text with its state."""
    state, logger = make_state()
    bar = ProgressBarLogger(stream=io.StringIO())
    state.callbacks = [*state.callbacks, bar]
    loaded = collect(state)
    loaded["composer"]["callbacks"]["ProgressBarLogger"]["train_pbar"] = {
        **{"n": 1, "position": 0, "total": 9, "metrics": {}, "timestamp_key": "batch"},
        "bar_format": "{desc.__class__.__init__.__globals__}",
    }
    restore(state, loaded, logger)
    assert bar.train_pbar is None


def test_a_scheduler_without_what_it_needs_is_damage() -> None:
    state, logger = make_state()
    loaded = collect(state)
    del loaded["composer"]["schedulers"]["LambdaLR"]["lr_lambdas"]
    with pytest.raises(DamagedError, match="scheduler cannot be loaded: KeyError"):
        restore(state, loaded, logger)
    del loaded["composer"]["schedulers"]["LambdaLR"]
    restore(state, loaded, logger)  # it stays as it is where the checkpoint has none


def test_what_was_saved_comes_back(folder) -> None:
    state = resume(folder)
    saved, _ = make_state()
    assert state.timestamp.batch.value == 2 and state.timestamp.sample.value == 16 and state.rank_zero_seed == 7
    assert torch.equal(state.model.module.weight, saved.model.module.weight)
    raw = manifest_of(open_store(str(folder)), 2)["values"]["composer"]
    assert set(raw) == {
        "schedulers",
        "algorithms",
        "callbacks",
        "scaler",
        "timestamp",
        "rank_zero_seed",
        "dataset_state",
    }
    assert "repr" not in raw["algorithms"]["Setting"]


def test_if_every_checkpoint_is_forged_the_run_says_so(folder) -> None:
    for step in (1, 2):
        forge_manifest(open_store(str(folder)), step, lambda body: body["values"].__setitem__("composer", [1]))
    with pytest.raises(DamagedError, match=r"no checkpoint in .* can be used"):
        resume(folder)
    assert len(Ledger(open_store(str(folder))).newest_first()) == 2


def put(*path: str | int, value: object = None):
    """Changes one value of a forged state; without a `value` it goes."""

    def change(body) -> None:
        place = body["values"]
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value

    return change


TIME = ("composer", "timestamp", "Timestamp")
VALUES = {
    "a batch that no run reaches": put(*TIME, "batch", value=10**30),
    "a batch of another step": put(*TIME, "batch", value=1),
    "a batch after its step": put(*TIME, "batch", value=3),
    "more tokens in the epoch than in all": put(*TIME, "token_in_epoch", value=1),
    "a count that is a fraction": put(*TIME, "sample", value=0.5),
    "more samples in the epoch than in all": put(*TIME, "sample_in_epoch", value=10**6),
    "a time below zero": put(*TIME, "total_wct", value={"$timedelta": [-1, 0, 0]}),
    "data of no run": put("composer", "dataset_state", value={"train": {"sample_in_epoch": 2**60}, "eval": {}}),
    "a seed that NumPy refuses": put("composer", "dataset_state", value={"train": {"shuffle_seed": -1}, "eval": {}}),
    "a rate that is infinite": put("optim", "param_groups", 0, "lr", value={"$float": "inf"}),
    "a rate below zero": put("optim", "param_groups", 0, "lr", value=-0.1),
    "a beta above one": put("optim", "param_groups", 0, "betas", value={"$tuple": [5, 5]}),
    "a beta of one": put("optim", "param_groups", 0, "betas", value={"$tuple": [0.9, 1.0]}),
    "one beta": put("optim", "param_groups", 0, "betas", value={"$tuple": [0.5]}),
    "a scheduler with an optimizer": put("composer", "schedulers", "LambdaLR", "optimizer", value=5),
    "a scheduler with a method": put("composer", "schedulers", "LambdaLR", "get_lr", value=3),
    "a scheduler with no rates": put("composer", "schedulers", "LambdaLR", "base_lrs", value=[]),
    "a scheduler past all batches": put("composer", "schedulers", "LambdaLR", "last_epoch", value=10**30),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_value_that_no_run_writes_is_damage_and_the_one_before_is_taken(folder, name, caplog) -> None:
    forge_manifest(open_store(str(folder)), 2, VALUES[name])
    state = resume(folder)
    assert state.timestamp.batch.value == 1
    assert "Checkpoint of step 2 is damaged" in caplog.text or "Passed over a checkpoint" in caplog.text


def test_groups_positions_and_batches_have_upper_ends() -> None:
    """Each check alone: the functions are reached with nothing else wrong."""
    group = {"lr": 0.1, "params": ["w"]}
    _check_groups([group], [group])
    for other, said in (
        ([group] * 2, "has 2 groups, this run 1: use"),
        ([], "has 0 groups"),
        ([{**group, "params": ["x"]}], "group 0 of the checkpoint has other parameters"),
    ):
        with pytest.raises(MismatchError, match=f"optimizer.param_groups: .*{said}.*load_weights_only: true"):
            _check_groups(other, [group])
    like = {"batch": 0}
    _check_timestamp({"batch": 2}, like, "time", 2)
    with pytest.raises(DamagedError, match="that of step 2"):
        _check_timestamp({"batch": 3}, like, "time", 2)
    _check_data({"train": {"sample_in_epoch": 8}}, 8)
    with pytest.raises(MismatchError, match=r"read 9 samples of its epoch, .*\.dataset has at most 8 per"):
        _check_data({"train": {"sample_in_epoch": 9}}, 8)
    with pytest.raises(DamagedError, match="sample_in_epoch"):
        _check_data({"train": {"sample_in_epoch": 2**51}}, 8)


def test_a_disagreement_with_the_run_is_no_damage_and_no_older_checkpoint_is_taken(folder) -> None:
    state, logger = make_state(1)
    weight, bias = state.model.parameters()
    state.optimizers = torch.optim.AdamW([{"params": [weight]}, {"params": [bias]}], lr=0.1)
    with pytest.raises(MismatchError, match=r"optimizer\.param_groups: the checkpoint has 1 group, this run 2"):
        ElasticCheckpoint(folder=str(folder), interval="1ba", optimizer_settings="run").after_load(state, logger)
    assert resume(folder).timestamp.batch.value == 2


def test_text_from_a_checkpoint_cannot_move_a_terminal(folder) -> None:
    store = open_store(str(folder))

    def change(body) -> None:
        body["info"]["training"] = {"optimizer.lr": "\x1b[2J", "\x9bkey": ["\u202e"]}

    forge_manifest(store, 2, change)
    ledger = Ledger(store)
    training = ledger.open(ledger.newest_first()[0]).manifest.info["training"]
    assert training == {"optimizer.lr": "\\x1b[2J", "\\x9bkey": ["\\u202e"]}
