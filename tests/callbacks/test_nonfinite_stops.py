"""`elastic_checkpoint` in a trainer: it stops a run whose values are not finite, and no other run."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from composer import Callback, State, Timestamp, Trainer
from torch.utils.data import DataLoader

from foundry_moe.callbacks.elastic_checkpoint import ElasticCheckpoint
from foundry_moe.launch.user_errors import NONFINITE, NonfiniteError
from tests.helpers.line import Line


class Poison(Callback):
    """Makes one weight bad before a batch, and good after another."""

    def __init__(self, bad: int, good: int = 10**6) -> None:
        self.bad, self.good, self.seen = bad, good, 0
        self.kept: dict[str, torch.Tensor] = {}

    def batch_start(self, state: State, logger: Any) -> None:
        batch = state.timestamp.batch.value + 1
        self.seen = batch
        if batch == self.bad:
            self.kept = {name: value.clone() for name, value in state.model.state_dict().items()}
            state.model.last.weight.data[0, 2] = float("nan")
        if batch == self.good:
            state.model.load_state_dict(self.kept)


def fit(poison: Poison, folder: Path, **keys: Any) -> None:
    data = DataLoader([{"x": torch.randn(3)} for _ in range(16)], batch_size=2)
    model = Line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    Trainer(
        model=model,
        train_dataloader=data,
        optimizers=optimizer,
        max_duration="8ba",
        device="cpu",
        callbacks=[poison, ElasticCheckpoint(folder=str(folder), interval="1ep", **keys)],
        progress_bar=False,
    ).fit()


@pytest.mark.parametrize("limit", [1, 3])
def test_the_run_stops_after_so_many_batches_and_says_where_it_began(limit, tmp_path) -> None:
    poison = Poison(bad=3)
    with pytest.raises(NonfiniteError, match=r"from batch 3 on|batch 3 was not finite") as raised:
        fit(poison, tmp_path, max_nonfinite=limit)
    assert "first in last.weight" in str(raised.value) and "lower the learning rate" in str(raised.value)
    assert poison.seen == 2 + limit, "seen before the next batch begins"


def test_fewer_bad_batches_than_the_limit_stop_nothing(tmp_path) -> None:
    poison = Poison(bad=3, good=5)
    fit(poison, tmp_path, max_nonfinite=3)
    assert poison.seen == 8


def test_a_run_that_ends_with_bad_numbers_says_so(tmp_path) -> None:
    with pytest.raises(NonfiniteError, match="batch 8 was not finite: the weights were not finite before it"):
        fit(Poison(bad=8), tmp_path)


def test_the_training_command_ends_with_exit_code_3_and_one_sentence(tmp_path) -> None:
    """In a process of its own: the command sets the environment of a rank, and makes a process group."""
    words = [sys.executable, "foundry_moe/train.py", "tests/distributed/tiny.yaml", "optimizer.lr=1.0e+30"]
    words += [f"callbacks.elastic_checkpoint={{folder: {tmp_path}, max_nonfinite: 2}}", "max_duration=9ba"]
    environment = {**os.environ, "FSDP_VERSION": "2"}
    done = subprocess.run(
        words, cwd=Path(__file__).parents[2], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == NONFINITE == 3, done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(said) == 1 and "the last 2 batches were not finite, from batch 2 on" in said[0], done.stderr
    assert "Traceback" not in done.stderr


def test_three_rewinds_to_one_checkpoint_and_no_fourth(tmp_path) -> None:
    callback = ElasticCheckpoint(folder=str(tmp_path), on_nonfinite="rewind")
    loaded = SimpleNamespace(step=4, state={})
    callback._checkpoints = SimpleNamespace(wait=lambda _: None, load=lambda *_: loaded)
    callback._watch = SimpleNamespace(describe=lambda: "batch 7 was not finite", forget_bad_batches=lambda: None)
    state = SimpleNamespace(timestamp=Timestamp(batch=7))
    rewind = partial(callback._rewind, state, SimpleNamespace(log_metrics=lambda _: None))
    for _ in range(3):
        rewind()
    loaded.step = 6  # another checkpoint: a new count
    rewind()
    loaded.step = 4
    with pytest.raises(NonfiniteError, match=r"batch 7 was not finite\. 3 rewinds to batch 4 did not help"):
        rewind()
