"""At which batches a run saves, and what counts as saved, with a stand-in for the engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from composer import Timestamp

from foundry_moe.callbacks import run_checkpoints
from foundry_moe.callbacks.run_checkpoints import RunCheckpoints, _identity, _samples_of
from foundry_moe.checkpoint.engine import SaveReport
from foundry_moe.launch.checkpoint_settings import checkpoint_config
from tests.helpers.line import Line

pytestmark = pytest.mark.quick
LOGGER: Any = SimpleNamespace(log_metrics=lambda _: None)


class Engine:
    """Commits at once, except steps of `fails`; `busy` as a test says."""

    def __init__(self, *fails: int) -> None:
        self.fails, self.steps = fails, []
        self.busy, self.progress, self.failures_in_a_row = False, (0, 0), 0
        self.report: SaveReport | None = None

    def save(self, state: Any, step: int, summary: Any) -> float:
        self.steps.append(step)
        error = "the disk is full" if step in self.fails else None
        self.report = SaveReport(step=step, error=error, bytes_staged=0, seconds_blocked=0.0, seconds_total=0.0)
        return 0.0

    def poll(self) -> SaveReport | None:
        report, self.report = self.report, None
        return report

    def prepare(self, state: Any) -> None: ...

    def acquire(self, identity: Any) -> None: ...


def checkpoints(monkeypatch: pytest.MonkeyPatch, interval: str, *fails: int) -> RunCheckpoints:
    monkeypatch.setattr(run_checkpoints, "collect", lambda *_, **__: {})
    made = RunCheckpoints.__new__(RunCheckpoints)
    made.config = checkpoint_config({"folder": "unused", "interval": interval})
    made.saved_step = made.committed_step = made._group = made._identity = None
    made.position = made._frozen = None  # type: ignore[assignment]
    made._counts_at_save, made._prepared, made._began_s, made._warned_s = {}, False, 0.0, float("-inf")
    made._engine = Engine(*fails)  # type: ignore[assignment]
    return made


def state(batch: int, epoch: int = 0) -> Any:
    timestamp = Timestamp(batch=batch, epoch=epoch, sample=8 * batch, token=64 * batch)
    return SimpleNamespace(timestamp=timestamp, total_loss_dict={})


def test_one_save_per_interval_and_none_that_is_bad_busy_or_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    made = checkpoints(monkeypatch, "2ba")
    made.start(state(0))
    for batch in range(1, 12):
        made._engine.busy = batch == 10  # type: ignore[misc]
        made.save_if_due(state(batch), LOGGER, epoch_ended=False, bad=batch == 6)
        made.save_if_due(state(batch), LOGGER, epoch_ended=True, bad=batch == 6)
    assert made._engine.steps == [2, 4, 7, 8, 11]  # type: ignore[attr-defined]
    made.poll(LOGGER)
    assert made.committed_step == made.saved_step == 11


@pytest.mark.parametrize(("interval", "steps"), [("16sp", [2, 4, 6]), ("200tok", [4, 7]), ("1ep", [6])])
def test_other_units_count_from_their_multiples_and_epochs_where_they_end(
    interval: str, steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = checkpoints(monkeypatch, interval)
    made.start(state(0))
    for batch in range(1, 8):
        made.save_if_due(state(batch, epoch=(batch - 1) // 3), LOGGER, epoch_ended=False, bad=False)
        if batch % 3 == 0:
            made._engine.busy = batch == 3  # type: ignore[misc]
            made.save_if_due(state(batch, epoch=batch // 3), LOGGER, epoch_ended=True, bad=False)
            made._engine.busy = False  # type: ignore[misc]
    assert made._engine.steps == steps  # type: ignore[attr-defined]


def test_a_save_that_failed_is_no_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    made = checkpoints(monkeypatch, "2ba", 4)
    made.start(state(0))
    for batch in range(1, 6):
        made.save_if_due(state(batch), LOGGER, epoch_ended=False, bad=False)
    assert made._engine.steps == [2, 4]  # type: ignore[attr-defined]
    assert (made.saved_step, made.committed_step) == (None, 2) and made.committed == "unused (batch 2)"


@pytest.mark.parametrize(
    ("name", "kept"), [("mine", "mine"), ("1700000000-brave-fox", ""), ("17-brave-fox", "17-brave-fox")]
)
def test_a_name_that_composer_generated_is_none(name: str, kept: str) -> None:
    run: Any = SimpleNamespace(run_name=name, model=Line())
    found = _identity(run)
    assert found.run_name == kept and found.model == _identity(run).model


def test_an_epoch_is_padded_to_equally_many_samples_of_each_rank() -> None:
    def samples_of(loader: Any, ranks: object, *callbacks: object) -> int | None:
        return _samples_of(SimpleNamespace(train_dataloader=loader, callbacks=callbacks), ranks)  # type: ignore[arg-type]

    loader = SimpleNamespace(dataset=SimpleNamespace(epoch_size=10), batch_size=4)
    assert [samples_of(loader, ranks) for ranks in (1, 4, 5, 0, "4", None)] == [10, 12, 10, None, None, None]
    assert samples_of(torch.utils.data.DataLoader([1, 2]), 1) is None
    for name in ("CurriculumLearning", "DatasetSwap"):  # the position is in a dataset that is not there yet
        assert samples_of(loader, 1, type(name, (), {})()) is None
