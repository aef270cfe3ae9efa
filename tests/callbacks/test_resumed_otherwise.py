"""A run that goes on with another learning rate or batch says in a line which one holds."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import torch
from composer import Trainer
from composer.optim import CosineAnnealingWithWarmupScheduler
from streaming import MDSWriter, StreamingDataset
from streaming.base.util import clean_stale_shared_memory
from torch.utils.data import DataLoader

from foundry_moe.callbacks.elastic_checkpoint import ElasticCheckpoint
from foundry_moe.schema import yaml_value
from tests.helpers.line import Line


def fit(folder: Path, lr: float, batch_size: int, batches: int, dataset: Any = None, **keys: Any) -> Trainer:
    model = Line()
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader(dataset or [{"x": torch.randn(3)} for _ in range(16)], batch_size=batch_size),
        **{"seed": 17, **keys},
        optimizers=torch.optim.SGD(model.parameters(), lr=lr),
        max_duration=f"{batches}ba",
        device="cpu",
        run_name="line",
        callbacks=[ElasticCheckpoint(folder=str(folder), interval="1ba", **{"async": False})],
        progress_bar=False,
    )
    trainer.fit()
    trainer.close()
    return trainer


def test_what_a_resumed_run_trains_with_is_said_where_it_differs(tmp_path, caplog) -> None:
    fit(tmp_path, 0.01, 2, 1)
    fit(tmp_path, 0.01, 2, 2)
    assert "this run sets" not in caplog.text
    with caplog.at_level(logging.WARNING):
        other = fit(tmp_path, 0.02, 4, 3)
    assert other.state.timestamp.batch.value == 3 and other.state.optimizers[0].param_groups[0]["lr"] == 0.01
    said = {record.message for record in caplog.records if "this run sets" in record.message}
    assert said >= {
        "optimizer.lr: this run sets 0.02, the checkpoint was trained with 0.01, and 0.01 is used",
        "global_train_batch_size: this run sets 4, the checkpoint was trained with 2, and 4 is used",
    }
    with caplog.at_level(logging.WARNING):
        fit(tmp_path, 0.02, 4, 4, [{"x": torch.randn(3)} for _ in range(20)])
    line = "train_loader.dataset.samples: this run sets 20, the checkpoint was trained with 16, and 20 is used"
    assert line in caplog.messages


def stream(folder: Path, split: str, shuffle_seed: int, samples: int = 16) -> StreamingDataset:
    if not (folder / split).exists():
        with MDSWriter(out=str(folder / split), columns={"x": "ndarray:float32:3"}) as writer:
            for number in range(samples):
                writer.write({"x": np.full(3, number, np.float32)})
    clean_stale_shared_memory()
    return StreamingDataset(local=str(folder), split=split, batch_size=2, shuffle=True, shuffle_seed=shuffle_seed)


def test_another_data_set_is_said(tmp_path, caplog) -> None:
    fit(tmp_path / "run", 0.01, 2, 1, stream(tmp_path / "a", "train", 1))
    with caplog.at_level(logging.WARNING):
        fit(tmp_path / "run", 0.01, 2, 2, stream(tmp_path / "b", "train", 1, samples=20))
    a, b = (yaml_value(str(tmp_path / name)) for name in "ab")
    assert {record.message for record in caplog.records if "this run sets" in record.message} == {
        f"train_loader.dataset.local: this run sets {b}, the checkpoint was trained with {a}, and {b} is used",
        "train_loader.dataset.epoch_size: this run sets 20, the checkpoint was trained with 16, and 20 is used",
    }


def test_another_end_of_a_schedule_is_said(tmp_path, caplog) -> None:
    for batches in (1, 2):
        fit(tmp_path, 0.01, 2, batches, schedulers=CosineAnnealingWithWarmupScheduler(t_warmup="1ba", t_max="1dur"))
    line = "max_duration: this run sets 2ba, the checkpoint was trained with 1ba, and 2ba is used"
    assert [message for message in caplog.messages if "this run sets" in message] == [line]


def test_another_schedule_split_and_seeds_are_said_with_what_holds(tmp_path, caplog) -> None:
    run, data = tmp_path / "run", tmp_path / "data"

    def train(batches: int, split: str, seed: int, t_warmup: str) -> Trainer:
        schedule = CosineAnnealingWithWarmupScheduler(t_warmup=t_warmup, t_max="8ba")
        dataset = stream(data, split, seed)
        return fit(run, 0.01, 2, batches, dataset, schedulers=schedule, seed=seed)

    train(1, "train", 1, "2ba")
    with caplog.at_level(logging.WARNING):
        train(2, "train", 1, "2ba")
    assert "this run sets" not in caplog.text
    with caplog.at_level(logging.WARNING):
        other = train(3, "val", 2, "4ba")
    said = {record.message for record in caplog.records if "this run sets" in record.message}
    assert said >= {
        "scheduler.t_warmup: this run sets 4ba, the checkpoint was trained with 2ba, and 4ba is used",
        "train_loader.dataset.split: this run sets val, the checkpoint was trained with train, and val is used",
        "train_loader.dataset.shuffle_seed: this run sets 2, the checkpoint was trained with 1, and 1 is used",
        "seed: this run sets 2, the checkpoint was trained with 1, and 1 is used",
    }
    assert other.state.rank_zero_seed == 1 and other.state.train_dataloader.dataset.shuffle_seed == 1
