"""A start logs its phases, which add up to the age of the process, and a resume continues the progress bar."""

from __future__ import annotations

import logging
import re
import time
from pathlib import Path

import psutil
import torch
from composer import Trainer
from composer.loggers import InMemoryLogger
from torch.utils.data import DataLoader

from foundry_moe.callbacks.elastic_checkpoint import ElasticCheckpoint
from tests.helpers.line import Line

SAID = re.compile(r"First batch, since this process began: ([\d.]+) s \((.*)\)\.")


def test_a_new_run_and_a_resumed_one_log_the_seconds_of_each_phase(tmp_path: Path, caplog) -> None:
    console = (tmp_path / "console").open("w+")

    def fit(batches: int) -> bool:
        """Whether the seconds are a metric as well."""
        Trainer(
            model=Line(),
            train_dataloader=DataLoader([{"x": torch.randn(3)} for _ in range(4)]),
            max_duration=f"{batches}ba",
            device="cpu",
            run_name="line",
            callbacks=[ElasticCheckpoint(folder=str(tmp_path / "run"))],
            loggers=[logger := InMemoryLogger()],
            progress_bar=True,
            console_stream=console,
        ).fit()
        return "checkpoint/resume_seconds" in logger.data

    with caplog.at_level(logging.INFO):
        assert not fit(1)
        (said,) = SAID.findall(caplog.text)
        assert said[1].rpartition(", ")[2].startswith("first batch ") and "reading it" not in said[1]
        console.truncate(0)
        caplog.clear()
        assert fit(3)
    console.seek(0)
    assert re.search(r"train .* 1/3 ", console.read())
    age_s = time.time() - psutil.Process().create_time()
    (said,) = SAID.findall(caplog.text)
    (resumed,) = [one for one in caplog.records if one.getMessage().startswith("Resumed at batch 1 from ")]
    assert resumed.levelno == logging.INFO, "a fact of every resume"
    parts = dict(part.rsplit(" ", 1) for part in said[1].split(", "))
    assert {"imports and process group", "finding the checkpoint", "reading it", "first batch"} < {*parts}
    assert abs(float(said[0]) - sum(map(float, parts.values()))) < 1
    assert age_s - 10 < float(said[0]) <= age_s + 0.1
