"""A run that goes on with another learning rate or batch says in a line which one holds."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from composer import Trainer
from torch.utils.data import DataLoader

from foundry_moe.callbacks.elastic_checkpoint import ElasticCheckpoint
from tests.helpers.line import Line


def fit(folder: Path, lr: float, batch_size: int, batches: int) -> Trainer:
    model = Line()
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader([{"x": torch.randn(3)} for _ in range(16)], batch_size=batch_size),
        seed=17,
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
    assert "this run says" not in caplog.text
    with caplog.at_level(logging.WARNING):
        other = fit(tmp_path, 0.02, 4, 3)
    assert other.state.timestamp.batch.value == 3 and other.state.optimizers[0].param_groups[0]["lr"] == 0.01
    said = {record.message for record in caplog.records if "this run says" in record.message}
    assert said >= {
        "optimizer.lr: this run says 0.02, the checkpoint was trained with 0.01, and 0.01 holds",
        "global_train_batch_size: this run says 4, the checkpoint was trained with 2, and 4 holds",
    }
