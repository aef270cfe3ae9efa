"""A data loader of random tokens for LLM Foundry, so that a training step is measured and nothing else.

A run names this file in `code_paths` and the loader in `train_loader.name: random_tokens`. Sample i is the same
for any number of processes.
"""

from __future__ import annotations

from typing import Any

import torch
from composer.core import DataSpec
from composer.utils import dist
from llmfoundry.registry import dataloaders
from torch.utils.data import DataLoader, Dataset


class RandomTokens(Dataset):
    """`samples` sequences of `max_seq_len` tokens, uniform below `vocab_size`."""

    def __init__(self, *, samples: int, max_seq_len: int, vocab_size: int, seed: int) -> None:
        self.samples, self.length, self.vocab_size, self.seed = samples, max_seq_len, vocab_size, seed

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        return torch.randint(self.vocab_size, (self.length,), generator=generator)


def _collate(samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    input_ids = torch.stack(samples)
    return {"input_ids": input_ids, "labels": input_ids.clone()}


def _count_tokens(batch: dict[str, Any]) -> int:
    return batch["input_ids"].numel()


def build_random_tokens(
    device_batch_size: int,
    max_seq_len: int,
    vocab_size: int,
    samples: int = 1_000_000,
    seed: int = 17,
    tokenizer: Any = None,
) -> DataSpec:
    """LLM Foundry's constructor of the loader: `train_loader: {name: random_tokens, max_seq_len, vocab_size}`."""
    data = RandomTokens(samples=samples, max_seq_len=max_seq_len, vocab_size=vocab_size, seed=seed)
    loader = DataLoader(
        data,
        batch_size=device_batch_size,
        sampler=dist.get_sampler(data, shuffle=False, drop_last=True),
        collate_fn=_collate,
        drop_last=True,
    )
    return DataSpec(loader, get_num_tokens_in_batch=_count_tokens)


if "random_tokens" not in dataloaders.get_all():
    dataloaders.register("random_tokens", func=build_random_tokens)
