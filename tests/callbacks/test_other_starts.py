"""Runs that start from another run's folder, with its weights or all its state, or with another learning rate."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from composer import Callback, Trainer
from composer.core import Algorithm, Event, State
from composer.loggers import Logger
from composer.optim import ConstantWithWarmupScheduler
from torch.utils.data import DataLoader

from foundry_moe.callbacks.elastic_checkpoint import ElasticCheckpoint
from foundry_moe.callbacks.run_checkpoints import has_commits
from foundry_moe.checkpoint import open_store
from foundry_moe.checkpoint.ledger import Ledger
from foundry_moe.checkpoint.store import StoreOptions
from foundry_moe.launch.run_config import _load_mistakes
from tests.helpers.line import Line


class Began(Callback):
    """Writes down where a run begins."""

    def fit_start(self, state: State, logger: Logger) -> None:
        (optimizer,) = state.optimizers
        self.batch = state.timestamp.batch.value
        self.weight = state.model.first.weight.detach().clone()
        self.moments = {key: value.clone() for key, value in optimizer.state[state.model.first.weight].items()}
        self.settings = {key: optimizer.param_groups[0][key] for key in ("lr", "betas", "weight_decay")}


def fit(
    folder: Path,
    batches: int,
    *,
    lr: float = 0.01,
    decay: float = 0.0,
    keys: dict[str, Any] | None = None,
    others: Sequence[Callback] = (),
    **more,
):
    torch.manual_seed(len(str(folder)))
    model, began = Line(), Began()
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader([{"x": torch.randn(3)} for _ in range(32)], batch_size=2),
        optimizers=torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=decay),
        schedulers=ConstantWithWarmupScheduler(t_warmup="4ba"),
        max_duration=f"{batches}ba",
        device="cpu",
        run_name=folder.name,
        callbacks=[
            *(ElasticCheckpoint(folder=str(folder), interval="1ba", **{"async": False}, **(keys or {})), began),
            *others,
        ],
        progress_bar=False,
        **more,
    )
    trainer.fit()
    trainer.close()
    (optimizer,) = trainer.state.optimizers
    began.ended = model.first.weight.detach().clone()
    began.last_lr, began.last_moments = optimizer.param_groups[0]["lr"], optimizer.state[model.first.weight]
    return began


def test_weights_of_another_folder_begin_a_new_run_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = fit(tmp_path / "first", 3)
    start = {"load_path": str(tmp_path / "first"), "load_weights_only": True}
    with caplog.at_level(logging.INFO):
        second = fit(tmp_path / "second", 2, lr=0.5, **start)
    assert f"The weights are those of batch 3 in {tmp_path / 'first'}" in caplog.text
    assert second.batch == 0 and torch.equal(second.weight, first.ended)
    assert second.moments == {} and second.settings["lr"] == 0.0, "a new schedule"
    again = fit(tmp_path / "second", 3, lr=0.5, **start)
    assert again.batch == 2 and torch.equal(again.weight, second.ended), "a restart resumes its own run"
    assert sorted(path.name[-7:] for path in (tmp_path / "first" / "commits").iterdir()) == [
        f"{step}.json".rjust(7, "0") for step in (1, 2, 3)
    ]


def test_the_whole_state_of_another_folder_goes_on(tmp_path: Path) -> None:
    first = fit(tmp_path / "first", 3)
    second = fit(tmp_path / "second", 5, load_path=f"file://{tmp_path / 'first'}")
    assert second.batch == 3 and torch.equal(second.weight, first.ended)
    assert all(torch.equal(second.moments[key], value) for key, value in first.last_moments.items())
    with pytest.raises(ValueError, match=r"load_ignore_keys does not apply to load_path"):
        fit(tmp_path / "third", 5, load_path=str(tmp_path / "first"), load_ignore_keys=["optim"])


def test_folders_below_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    first = fit(Path("~/first"), 3)
    assert has_commits("~/first", StoreOptions())
    (mistake,) = _load_mistakes({"load_path": "~/first"}, elastic=False)
    assert "load_path (~/first) is a folder of elastic_checkpoint" in mistake
    start = {"load_path": "~/first", "load_weights_only": True}
    second = fit(Path("~/second"), 2, **start)
    assert second.batch == 0 and torch.equal(second.weight, first.ended)
    shutil.rmtree(tmp_path / "first")
    assert fit(Path("~/second"), 3, **start).batch == 2


@pytest.mark.parametrize("where", ["the same folder", "another folder"])
def test_a_new_learning_rate_with_the_moments_of_the_checkpoint(where: str, tmp_path: Path, caplog) -> None:
    first = fit(tmp_path / "first", 3)
    keys = {"optimizer_settings": "run"}
    folder, start = tmp_path / "first", {}
    if where == "another folder":
        folder, start = tmp_path / "second", {"load_path": str(tmp_path / "first")}
    with caplog.at_level(logging.WARNING):
        second = fit(folder, 8, lr=0.03, decay=0.1, keys=keys, **start)
    assert second.batch == 3
    assert all(torch.equal(second.moments[key], value) for key, value in first.last_moments.items())
    assert second.settings == {"lr": pytest.approx(0.03 * 3 / 4), "betas": (0.9, 0.999), "weight_decay": 0.1}
    assert second.last_lr == pytest.approx(0.03), "after the warmup"
    line = "optimizer.lr: this run sets 0.03, the checkpoint was trained with 0.01, and 0.03 is used"
    assert line in caplog.text
    third = fit(folder, 9, lr=0.03, decay=0.1, keys=keys, **start)
    assert third.batch == 8 and third.settings["lr"] == pytest.approx(0.03), "a restart keeps it"


class Refuses(Algorithm):
    """As `dmoe_steps` refuses experts that compute another function."""

    def match(self, event: Event, state: State) -> bool:
        return event == Event.FIT_START

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        raise ValueError("refused")


class Intruder(Callback):
    """Starts the run a second time while it trains."""

    def __init__(self, start: Callable[[], object]) -> None:
        self.start = start

    def batch_end(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch.value == 4:
            self.start()


@pytest.mark.parametrize(
    ("batches", "algorithms", "error"), [(2, (), SystemExit), (9, [Refuses()], ValueError)], ids=["complete", "refused"]
)
def test_a_second_start_that_never_trains_leaves_a_running_one_alone(batches, algorithms, error, tmp_path) -> None:
    def start_again() -> None:
        with pytest.raises(error):
            fit(tmp_path / "run", batches, keys={"keep": 1}, algorithms=algorithms)

    keys = {"keep": 5}
    assert fit(tmp_path / "run", 6, keys=keys, others=[Intruder(start_again)]).batch == 0
    commits = Ledger(open_store(str(tmp_path / "run"))).newest_first()
    assert [(key.generation, key.step) for key in commits] == [(0, step) for step in (6, 5, 4, 3, 2)]
