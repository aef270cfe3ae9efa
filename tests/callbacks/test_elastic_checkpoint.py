"""What the callback decides at each event, with stand-ins for the trainer's state and for the checkpoints."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from composer import Time, Timestamp

from foundry_moe.callbacks import elastic_checkpoint
from foundry_moe.callbacks.elastic_checkpoint import ElasticCheckpoint
from foundry_moe.callbacks.elastic_state import reseed

pytestmark = pytest.mark.quick
LOGGER: Any = SimpleNamespace(log_metrics=lambda _: None)


class Watch(SimpleNamespace):
    """Of `RunWatch`: nothing asks to stop, and all values are finite."""

    def __init__(self, **changes: Any) -> None:
        signals = SimpleNamespace(reason=None, remove=lambda: None)
        super().__init__(**{"signals": signals, "bad_batches": 0, "exchanged": 0, **changes})

    def between_batches(self) -> None:
        self.exchanged += 1

    def describe(self) -> str:
        return "batch 7 was not finite"

    def forget_bad_batches(self) -> None:
        self.bad_batches = 0


class Checkpoints(SimpleNamespace):
    """Of `RunCheckpoints`; the first `fails` saves fail."""

    def __init__(self, fails: int = 0, **changes: Any) -> None:
        super().__init__(**{"saved_step": None, "committed": None, "saves": 0, "fails": fails, **changes})

    def save(self, state: Any, logger: Any) -> bool:
        self.saves += 1
        self.saved_step = None if self.saves <= self.fails else state.timestamp.batch.value
        return self.saved_step is not None

    def wait(self, logger: Any) -> None: ...
    def close(self) -> None: ...


def callback(watch: Watch, checkpoints: Checkpoints, **keys: Any) -> ElasticCheckpoint:
    made = ElasticCheckpoint(folder="unused", **keys)
    made._watch, made._checkpoints = watch, checkpoints  # type: ignore[assignment]
    return made


def state(batch: int = 7, **more: Any) -> Any:
    return SimpleNamespace(timestamp=Timestamp(batch=batch), rank_zero_seed=1, **more)


def draws() -> tuple[float, float, float]:
    import random

    import numpy as np

    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_each_generator_depends_on_seed_batch_and_rank() -> None:
    seen = []
    for arguments in ((1, 2, 3), (9, 2, 3), (1, 9, 3), (1, 2, 9), (1, 2, 3)):
        reseed(*arguments)
        seen.append(draws())
    assert seen[0] == seen[-1]
    assert all(len({each[generator] for each in seen}) == 4 for generator in range(3))


def test_random_numbers_of_a_batch_are_its_own() -> None:
    made, seen = callback(Watch(), Checkpoints()), []
    for batch in (1, 2, 1):
        made.after_dataloader(state(batch), LOGGER)
        seen.append(draws())
    assert seen[0] == seen[2] and not set(seen[0]) & set(seen[1])


def test_an_end_that_could_not_be_saved_is_saved_again_and_none_that_is_not_finite() -> None:
    checkpoints = Checkpoints(fails=2)
    callback(Watch(), checkpoints).fit_end(state(), LOGGER)
    assert (checkpoints.saves, checkpoints.saved_step) == (3, 7)
    saved = Checkpoints(saved_step=7)
    callback(Watch(), saved).fit_end(state(), LOGGER)
    assert saved.saves == 0, "it is there"


@pytest.mark.parametrize(
    ("batch", "bad", "saves", "sentence"),
    [
        (7, 0, 1, "batch 7 is saved"),
        (7, 1, 0, "batch 7 is not saved, because it was not finite"),
        (0, 0, 0, "no batch was trained yet"),
    ],
)
def test_a_stopped_run_saves_its_last_batch_unless_it_is_bad(
    batch: int, bad: int, saves: int, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(elastic_checkpoint, "leave", said.append)
    checkpoints = Checkpoints()
    callback(Watch(bad_batches=bad), checkpoints)._stop("SIGTERM", state(batch), LOGGER)
    assert checkpoints.saves == saves and f"Stopped by SIGTERM: {sentence};" in said[0]


@pytest.mark.parametrize("bad", [0, 1])
def test_a_due_save_is_told_whether_the_newest_batches_are_bad(bad: int) -> None:
    told: list[bool] = []
    checkpoints = Checkpoints(save_if_due=lambda state, logger, *, epoch_ended, bad: told.append(bad))
    made = callback(Watch(bad_batches=bad), checkpoints)
    made.batch_checkpoint(state(), LOGGER)
    made.epoch_checkpoint(state(), LOGGER)
    assert told == [bool(bad)] * 2


def test_a_rewind_restores_the_optimizers_and_forgets_the_bad_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    restored: list[Any] = []
    monkeypatch.setattr(
        elastic_checkpoint, "restore_optimizers", lambda state, optim, *, keep_settings: restored.append(keep_settings)
    )
    for settings, keeps in (("checkpoint", False), ("run", True)):
        watch, loaded = Watch(bad_batches=2), SimpleNamespace(step=4, state={"optim": {}})
        checkpoints = Checkpoints(load=lambda *_, loaded=loaded: loaded)
        made = callback(watch, checkpoints, optimizer_settings=settings)
        made._rewind(state(), LOGGER)
        assert restored.pop() is keeps and watch.bad_batches == 0


def test_an_evaluation_outside_of_fit_exchanges_nothing() -> None:
    watch = Watch()
    made = callback(watch, Checkpoints(saved_step=7))
    made.eval_batch_start(state(), LOGGER)
    assert watch.exchanged == 0
    made._fitting = True
    made.eval_batch_start(state(), LOGGER)
    assert watch.exchanged == 1
    made.fit_end(state(), LOGGER)
    made.eval_batch_start(state(), LOGGER)
    assert watch.exchanged == 2, "the end of fit, and none after it"


@pytest.mark.parametrize(
    ("keys", "expected"), [({}, True), ({"save_frozen": False}, False), ({"resume": "never"}, False)]
)
def test_weights_come_from_a_commit_only_where_it_has_all_of_them(
    keys: Any, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elastic_checkpoint, "has_commits", lambda folder, options: True)
    assert callback(Watch(), Checkpoints(), **keys).has_commits() is expected


@pytest.mark.parametrize(
    ("resumes", "save_frozen", "weights_only", "expected"),
    [
        (False, True, False, [False]),
        (False, True, True, [True]),
        (True, True, False, []),  # the run's own commit has all that it needs
        (True, False, False, [True]),  # only frozen weights are missing in it
        (False, False, False, [False]),
    ],
)
def test_a_resumed_run_takes_no_progress_from_the_folder_that_it_started_from(
    resumes: bool, save_frozen: bool, weights_only: bool, expected: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[bool] = []
    given: dict[str, Any] = {}
    monkeypatch.setattr(elastic_checkpoint, "has_commits", lambda folder, options: resumes or folder == "base")
    monkeypatch.setattr(elastic_checkpoint, "start_from", lambda *_, weights_only: taken.append(weights_only))
    monkeypatch.setattr(elastic_checkpoint, "load_elsewhere", lambda ours, load: given.update(ours=ours, load=load))
    callback(Watch(), Checkpoints(), save_frozen=save_frozen).before_load(state(), LOGGER)
    assert given["ours"]("base")
    given["load"]("base", weights_only, [])
    assert taken == expected


@pytest.mark.parametrize(("batch", "end"), [(6, "7ba"), (7, "8ba"), (9, "10ba")])
def test_the_end_of_a_complete_run_is_moved_for_composer(batch: int, end: str) -> None:
    run = state(batch, max_duration=Time.from_timestring("7ba"))
    callback(Watch(), Checkpoints())._allow_fit(run)
    assert run.max_duration == Time.from_timestring(end)
