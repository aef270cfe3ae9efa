"""Two ranks under plain DDP; in batch 3 rank 1 has fewer samples. Usage: uneven_worker.py FOLDER."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
from composer import Trainer
from composer.core import DataSpec
from composer.models import ComposerModel
from composer.utils import dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from foundry_moe import ElasticCheckpoint
from foundry_moe.launch.user_errors import run_cleanly


class Linear(ComposerModel):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.linear(batch["x"])

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return outputs.square().mean()


class Batches(IterableDataset):
    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for number in range(1, 5):
            yield {"x": torch.ones(1 if number == 3 and dist.get_global_rank() == 1 else 4, 4)}


def train() -> int:
    dist.initialize_dist("cpu")
    model = Linear()
    Trainer(
        model=model,
        train_dataloader=DataSpec(
            DataLoader(Batches(), batch_size=None), get_num_samples_in_batch=lambda batch: len(batch["x"])
        ),
        max_duration="4ba",
        device="cpu",
        device_train_microbatch_size=2,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        callbacks=[ElasticCheckpoint(folder=sys.argv[1], interval="1h")],
        progress_bar=False,
    ).fit()
    return 0


if __name__ == "__main__":
    sys.exit(run_cleanly(train))
