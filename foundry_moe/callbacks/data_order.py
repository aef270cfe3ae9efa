"""Makes the order of the training data independent of interruptions of a run."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
import xxhash
from composer.core import State
from composer.loggers import Logger
from composer.utils import dist
from streaming import StreamingDataset
from torch.utils.data import BatchSampler, DataLoader, Sampler


def seed_of(seed: int, number: int, rank: int) -> int:
    """A seed of 32 bits, as NumPy takes it."""
    return xxhash.xxh3_64_intdigest(f"{seed} {number} {rank}".encode()) % 2**32


class EpochSampler(Sampler[Any]):
    """A sampler's indices in an order that depends on (seed, epoch, rank) only.

    PyTorch's samplers draw an epoch's order from the global generator at its first index, so the order would depend on
    all numbers drawn before it. The caller's later draws do not change.
    """

    def __init__(self, sampler: Iterable[Any], state: State) -> None:
        self.sampler, self._state = sampler, state

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        seed = seed_of(self._state.rank_zero_seed, self._state.timestamp.epoch.value, dist.get_global_rank())
        states = random.getstate(), np.random.get_state()
        with torch.random.fork_rng(devices=[]):
            random.seed(seed)
            np.random.seed(seed)
            torch.default_generator.manual_seed(seed)  # indices are drawn on the CPU
            indices = iter(self.sampler)
            first = list(itertools.islice(indices, 1))
        random.setstate(states[0])
        np.random.set_state(states[1])
        yield from itertools.chain(first, indices)


def fix_order(state: State) -> None:
    """Makes the order of each epoch independent of the random numbers drawn before it.

    Streaming datasets and distributed samplers need no help. A `batch_sampler` of the user's own is not changed.
    """
    loader = state.train_dataloader
    batches = loader.batch_sampler if isinstance(loader, DataLoader) else None
    if isinstance(batches, BatchSampler) and not isinstance(batches.sampler, EpochSampler):
        batches.sampler = EpochSampler(batches.sampler, state)


class DataPosition:
    """The position in a streaming dataset, as Composer saves it, and right between two epochs.

    There Composer saves sample 0 of the epoch that has ended, which a resumed run would repeat.
    """

    def __init__(self) -> None:
        self._ended: tuple[StreamingDataset, int] | None = None  # the epoch that was read last

    def end_epoch(self, state: State) -> None:
        dataset = state._dataset_of(state.train_dataloader)
        if isinstance(dataset, StreamingDataset):
            self._ended = dataset, dataset.state_dict(0, from_beginning=True)["epoch"]

    def of(self, state: State) -> dict[str, Any] | None:
        """Composer's state of the datasets; None without training data."""
        if state.train_dataloader is None:
            return None
        found = state._dataset_state_dict()
        if self._ended is not None and self._ended[0] is state._dataset_of(state.train_dataloader):
            found["train"]["epoch"] += found["train"]["epoch"] == self._ended[1]
        return found


def is_curriculum(callback: object) -> bool:
    """Whether this is LLM Foundry's `curriculum_learning`, without importing LLM Foundry."""
    return any(cls.__name__ == "CurriculumLearning" for cls in type(callback).__mro__)


def swaps_dataset(callback: object) -> bool:
    """Whether this is a callback of LLM Foundry that resumes in another data set than that of `train_loader`."""
    return is_curriculum(callback) or any(cls.__name__ == "DatasetSwap" for cls in type(callback).__mro__)


def allow_next_datamix(callback: Any, saved: Any) -> None:
    """Changes a saved state of `curriculum_learning` from after the last datamix, so that the callback accepts it.

    A run with one more datamix continues with that, and a finished run that is started again ends at once.
    """
    if saved.schedule_index >= len(saved.schedule):
        saved.schedule = [*saved.schedule, *callback._schedule[len(saved.schedule) :]]
        saved.schedule_index = min(saved.schedule_index, len(saved.schedule) - 1)


def enter_datamix(state: State, logger: Logger) -> None:
    """Resumes within a datamix of LLM Foundry's `curriculum_learning`.

    That callback builds the loader of a datamix and sets its length at the start only, so that a run which resumes
    later would continue with the first datamix.
    """
    now = state.timestamp
    dataset = state._dataset_of(state.train_dataloader)
    if not isinstance(dataset, StreamingDataset) or (now.epoch_in_iteration == 0 and now.batch_in_epoch == 0):
        return
    for callback in state.callbacks:
        if is_curriculum(callback):
            # the position that was loaded, into the dataset of the first datamix
            position = dataset.state_dict(now.sample_in_epoch.value, from_beginning=True)
            callback.iteration_start(state, logger)
            dataset = state._dataset_of(state.train_dataloader)
            assert isinstance(dataset, StreamingDataset), "curriculum_learning checks it"
            dataset.load_state_dict(position)
