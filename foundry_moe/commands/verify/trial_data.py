"""Random tokens for a trial: a step's sequences are the same whatever the number of processes and microbatches.

Imports Composer; a trial's child processes do so alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from composer.core import DataSpec
from composer.utils import dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Sequences(Dataset):
    """`samples` sequences of tokens, uniform below `vocabulary` and never 0, which some models take for padding."""

    def __init__(self, *, samples: int, length: int, vocabulary: int) -> None:
        self.samples, self.length, self.vocabulary = samples, length, vocabulary

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Tensor:
        return torch.randint(1, self.vocabulary, (self.length,), generator=torch.Generator().manual_seed(index))


class Slots(DistributedSampler):
    """A rank's sequences: of each microbatch of the job, which is consecutive sequences, its own consecutive part."""

    def __init__(self, data: Sequences, *, batch: int, microbatch: int) -> None:
        self.rank, self.ranks = dist.get_global_rank(), dist.get_world_size()
        super().__init__(data, num_replicas=self.ranks, rank=self.rank, shuffle=False)
        self.batch, self.microbatch, self.length = batch, microbatch, len(data)

    def __iter__(self) -> Iterator[int]:
        everyone = self.ranks * self.microbatch
        for first in range(0, self.length, everyone):
            yield from range(first + self.rank * self.microbatch, first + (self.rank + 1) * self.microbatch)


def _collate(samples: list[Tensor]) -> dict[str, Tensor]:
    input_ids = torch.stack(samples)
    return {"input_ids": input_ids, "labels": input_ids.clone(), "attention_mask": torch.ones_like(input_ids)}


def _count_tokens(batch: dict[str, Any]) -> int:
    return batch["input_ids"].numel()


def build_loader(
    device_batch_size: int, length: int, vocabulary: int, steps: int, microbatch: int, tokenizer: Any = None
) -> DataSpec:
    """LLM Foundry's constructor of the loader."""
    batch = device_batch_size * dist.get_world_size()
    data = Sequences(samples=steps * batch, length=length, vocabulary=vocabulary)
    sampler = Slots(data, batch=batch, microbatch=microbatch)
    loader = DataLoader(data, batch_size=device_batch_size, sampler=sampler, collate_fn=_collate, drop_last=True)
    return DataSpec(loader, get_num_tokens_in_batch=_count_tokens)
