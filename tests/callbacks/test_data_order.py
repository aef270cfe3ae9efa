"""A run that resumes around the end of an epoch reads the samples that it would have read, with every data loader."""

from __future__ import annotations

import json
import random
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from composer import Callback, Timestamp, Trainer
from composer.core import State
from composer.loggers import Logger
from llmfoundry.callbacks.curriculum_learning_callback import CurriculumLearning
from llmfoundry.callbacks.dataset_swap_callback import DatasetSwap
from streaming import MDSWriter, StreamingDataLoader, StreamingDataset
from streaming.base.util import clean_stale_shared_memory
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import nn
from torch.utils.data import DataLoader, Sampler, SubsetRandomSampler
from transformers import PreTrainedTokenizerFast

from foundry_moe.callbacks.data_order import EpochSampler
from foundry_moe.callbacks.elastic_checkpoint import ElasticCheckpoint
from foundry_moe.checkpoint import open_store
from foundry_moe.checkpoint.errors import MismatchError
from tests.helpers.forging import forge_manifest
from tests.helpers.line import Line

SAMPLES, BATCH = 12, 3
EPOCH = SAMPLES // BATCH  # batches
LENGTH = 8
WORKERS: dict[str, Any] = {"num_workers": 0, "prefetch_factor": None, "persistent_workers": False}


class KilledError(Exception):
    """Ends a run as a killed process would."""


class Noisy(Line):
    """Draws random numbers in each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def forward(self, batch: Any) -> torch.Tensor:
        values = batch["x"] if "x" in batch else batch["input_ids"]
        return super().forward({"x": self.dropout(values[:, :3].float() / 100)})

    def eval_forward(self, batch: Any, outputs: Any = None) -> torch.Tensor:
        return self(batch) + torch.randn(1)


class Witness(Callback):
    """Writes down the samples of each batch; `end` names the event and batch at which the run is killed."""

    def __init__(self, end: tuple[str, int] | None = None) -> None:
        self.end, self.samples = end, {}
        self.losses: dict[int, float] = {}

    def before_forward(self, state: State, logger: Logger) -> None:
        rows = state.batch["x"] if "x" in state.batch else state.batch["input_ids"]
        self.samples[state.timestamp.batch.value] = rows.tolist()

    def after_loss(self, state: State, logger: Logger) -> None:
        self.losses[state.timestamp.batch.value] = float(state.loss.detach())

    def _end(self, event: str, state: State) -> None:
        if self.end == (event, state.timestamp.batch.value):
            raise KilledError

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        self._end("batch_checkpoint", state)

    def eval_start(self, state: State, logger: Logger) -> None:
        self._end("eval_start", state)

    def epoch_checkpoint(self, state: State, logger: Logger) -> None:
        self._end("epoch_checkpoint", state)


def fit(
    folder: Path,
    loader: Callable[[], Any],
    *,
    duration: str,
    interval: str = "1ba",
    end: tuple[str, int] | None = None,
    callbacks: Sequence[Callback] = (),
    later: Sequence[Callback] = (),
) -> Witness:
    clean_stale_shared_memory()
    torch.manual_seed(1)
    model, witness = Noisy(), Witness(end)
    model.tokenizer = tokenizer()
    trainer = Trainer(
        model=model,
        train_dataloader=loader(),
        eval_dataloader=DataLoader([{"x": torch.ones(3)}] * 2, batch_size=2),
        eval_interval="1ep",
        seed=17,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.01),
        max_duration=duration,
        device="cpu",
        run_name="line",
        callbacks=[
            *callbacks,
            ElasticCheckpoint(folder=str(folder), interval=interval, **{"async": False}),
            witness,
            *later,
        ],
        progress_bar=False,
    )
    try:
        trainer.fit()
    except KilledError:
        pass
    finally:
        trainer.close()
    return witness


def rows() -> list[dict[str, torch.Tensor]]:
    return [{"x": torch.full((3,), float(number))} for number in range(SAMPLES)]


def tokenizer() -> PreTrainedTokenizerFast:
    words = {word: number for number, word in enumerate(["<pad>", "<eos>", *map(str, range(SAMPLES))])}
    raw = Tokenizer(WordLevel(words, unk_token="<eos>"))
    raw.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<eos>", pad_token="<pad>")


def write(folder: Path, columns: dict[str, str], sample: Callable[[int], dict[str, Any]], samples: int) -> Path:
    if not folder.exists():
        with MDSWriter(out=str(folder / "train"), columns=columns) as writer:
            for number in range(samples):
                writer.write(sample(number))
    return folder


def streaming(root: Path, samples: int = SAMPLES) -> StreamingDataLoader:
    numbers = {"x": "ndarray:float32:3"}
    data = write(root / f"mds{samples}", numbers, lambda number: {"x": np.full(3, number, np.float32)}, samples)
    dataset = StreamingDataset(local=str(data), split="train", batch_size=BATCH, shuffle=True)
    return StreamingDataLoader(dataset, batch_size=BATCH)


def of_foundry(loader: dict[str, Any]) -> Any:
    from llmfoundry.data.dataloader import build_dataloader

    return build_dataloader({**loader, "drop_last": True, **WORKERS}, tokenizer(), BATCH)


def text_keys(root: Path, first: int = 0, samples: int = SAMPLES) -> dict[str, Any]:
    data = write(
        root / f"text{first}",
        {"tokens": "bytes"},
        lambda number: {"tokens": np.full(LENGTH, first + number, np.int64).tobytes()},
        samples,
    )
    dataset = {"local": str(data), "split": "train", "shuffle": True, "max_seq_len": LENGTH, "eos_token_id": 1}
    return {"name": "text", "dataset": dataset, "drop_last": True, **WORKERS}


def text(root: Path) -> Any:
    return of_foundry(text_keys(root))


def questions(root: Path, **packing: Any) -> Any:
    data = root / "questions"
    data.mkdir(exist_ok=True)
    lines = [json.dumps({"prompt": f"{n} {n}", "response": f"{n}"}) for n in range(SAMPLES)]
    (data / "train.jsonl").write_text("\n".join(lines))
    dataset = {"hf_name": str(data), "split": "train", "max_seq_len": LENGTH, "shuffle": True}
    return of_foundry({"name": "finetuning", "dataset": {**dataset, "decoder_only_format": True, **packing}})


LOADERS: dict[str, Callable[[Path], Any]] = {
    "torch": lambda root: DataLoader(rows(), batch_size=BATCH, shuffle=True),
    "torch with workers": lambda root: DataLoader(rows(), batch_size=BATCH, shuffle=True, num_workers=2),
    "torch with a sampler": lambda root: DataLoader(
        rows(), batch_size=BATCH, sampler=SubsetRandomSampler(range(SAMPLES))
    ),
    "streaming": streaming,
    "text of LLM Foundry": text,
    "finetuning of LLM Foundry": questions,
    # bins that a collator keeps for later batches are not saved
    "packed finetuning": lambda root: questions(root, packing_ratio=1.0, max_leftover_bins_to_keep=0),
}
ENDS = {
    "before the last batch": {"end": ("batch_checkpoint", EPOCH - 1)},
    "after the last batch": {"end": ("batch_checkpoint", EPOCH)},
    "in the evaluation": {"end": ("eval_start", EPOCH)},
    "after the epoch": {"interval": "1ep", "end": ("epoch_checkpoint", EPOCH)},
    "at the end of the run": {"interval": "100ba", "duration": "1ep"},
    "after the first batch of the next": {"end": ("batch_checkpoint", EPOCH + 1)},
    "after the second epoch": {"interval": "1ep", "end": ("epoch_checkpoint", 2 * EPOCH)},
    "in the third epoch": {"end": ("batch_checkpoint", 2 * EPOCH + 2)},
}


def test_a_position_beyond_a_smaller_data_set_is_refused_and_not_taken_from_an_older_checkpoint(tmp_path) -> None:
    folder = tmp_path / "run"
    fit(folder, lambda: streaming(tmp_path), duration="1ep", end=("batch_checkpoint", EPOCH - 1))
    for samples in (SAMPLES // 3, SAMPLES - BATCH - 1):
        with pytest.raises(MismatchError, match=f"read 9 samples of its epoch, .* at most {samples} per epoch: use"):
            fit(folder, lambda samples=samples: streaming(tmp_path, samples), duration="1ep")
    later = fit(folder, lambda: streaming(tmp_path), duration="1ep")
    assert sorted(later.samples) == [EPOCH - 1]


def test_a_padded_epoch_of_more_ranks_ends_on_fewer(tmp_path) -> None:
    folder = tmp_path / "run"
    fit(folder, lambda: streaming(tmp_path), duration="2ep", end=("batch_checkpoint", EPOCH))

    def pad(body: dict[str, Any]) -> None:  # as 5 ranks write it
        body["info"]["world_size"] = 5
        body["values"]["composer"]["dataset_state"]["train"]["sample_in_epoch"] = 15

    forge_manifest(open_store(str(folder)), EPOCH, pad)
    later = fit(folder, lambda: streaming(tmp_path), duration="2ep")
    assert sorted(later.samples) == list(range(EPOCH, 2 * EPOCH))


@pytest.mark.parametrize("loader", ["torch", "finetuning of LLM Foundry"])
@pytest.mark.parametrize("batch", [1, 6])
def test_another_batch_size_goes_on_with_the_next_sample_or_is_refused(loader, batch, tmp_path, monkeypatch) -> None:
    def train(folder: str, end: int = 0) -> list[Any]:
        ended = ("batch_checkpoint", end)
        read = fit(tmp_path / folder, lambda: LOADERS[loader](tmp_path), duration="2ep", end=ended).samples
        return [row for number in sorted(read) for row in read[number]]

    whole = train("whole")
    begun = [(end, train(str(end), end)) for end in (1, 2, EPOCH)]
    monkeypatch.setattr(sys.modules[__name__], "BATCH", batch)
    for end, rows in begun:
        if len(rows) % batch:
            with pytest.raises(MismatchError, match=r"size \(6\): .* read 3 samples of its epoch in batches of 3, and"):
                train(str(end))
            continue
        rows += train(str(end), 5)
        rows += train(str(end))
        assert rows == whole, end


class Draws(Sampler):
    """Draws its first index from all generators."""

    def __iter__(self):
        yield (random.random(), float(np.random.rand()), float(torch.rand(())))


@pytest.mark.quick
def test_the_order_of_an_epoch_is_its_own_and_changes_no_later_draw() -> None:
    def draw(epoch: int | None, seed: int = 1) -> tuple[Any, Any]:
        random.seed(5), np.random.seed(5), torch.manual_seed(5)
        run: Any = SimpleNamespace(rank_zero_seed=seed, timestamp=Timestamp(epoch=epoch or 0))
        order = None if epoch is None else next(iter(EpochSampler(Draws(), run)))
        return order, next(iter(Draws()))

    (_, alone), (first, after), (second, _), (other, _) = draw(None), draw(1), draw(2), draw(1, seed=2)
    assert after == alone and draw(1)[0] == first
    assert all(len(set(of_generator)) == 3 for of_generator in zip(first, second, other, strict=True))


@pytest.mark.parametrize("loader", LOADERS)
def test_a_resume_at_any_boundary_reads_what_the_uninterrupted_run_read(loader, tmp_path) -> None:
    make = lambda: LOADERS[loader](tmp_path)  # noqa: E731
    whole = fit(tmp_path / "whole", make, duration="3ep")
    assert len(whole.samples) == 3 * EPOCH
    epochs = [[whole.samples[batch] for batch in range(n * EPOCH, (n + 1) * EPOCH)] for n in range(3)]
    assert epochs[0] != epochs[1] != epochs[2], "the test needs data in another order for each epoch"
    for name, keys in ENDS.items():
        folder = tmp_path / name.replace(" ", "-")
        begun = fit(folder, make, **{"duration": "3ep", **keys})
        later = fit(folder, make, duration="3ep")
        read = begun.samples | later.samples
        assert later.samples and min(later.samples) == len(begun.samples), name
        assert read == whole.samples, name
        assert begun.losses | later.losses == whole.losses, name


MIX = 6  # batches of a datamix


def curriculum(root: Path, mixes: int = 2) -> CurriculumLearning:
    # a position in a later datamix may lie beyond the samples of the first
    keys = [text_keys(root, 100 * mix, SAMPLES * (1 + mix)) for mix in range(mixes)]
    config = {"train_loader": keys[0], "device_train_batch_size": BATCH}
    duration = f"{MIX * BATCH * LENGTH}tok"
    schedule = [{"duration": duration, "dataset": mix["dataset"]} for mix in keys[1:]]
    return CurriculumLearning(config, duration=duration, schedule=schedule)


@pytest.mark.parametrize("last", [False, True], ids=["before elastic_checkpoint", "after it"])
def test_a_curriculum_of_two_datamixes_resumes_in_each(last, tmp_path) -> None:
    def train(folder: str, end: tuple[str, int] | None = None) -> Witness:
        return fit(
            tmp_path / folder,
            lambda: of_foundry(text_keys(tmp_path)),
            duration=f"{2 * MIX * BATCH * LENGTH}tok",
            end=end,
            **{"later" if last else "callbacks": [curriculum(tmp_path)]},
        )

    whole = train("whole")
    assert {value >= 100 for batch in range(6) for row in whole.samples[batch] for value in row} == {False}
    assert {value >= 100 for batch in range(6, 12) for row in whole.samples[batch] for value in row} == {True}
    for batch in (2, EPOCH, 6, 8, 6 + EPOCH, 11):
        begun = train(f"at-{batch}", ("batch_checkpoint", batch))
        later = train(f"at-{batch}")
        assert min(later.samples) == batch
        assert begun.samples | later.samples == whole.samples, batch
        assert begun.losses | later.losses == whole.losses, batch


def test_a_finished_curriculum_ends_at_once_and_goes_on_with_another_datamix(tmp_path) -> None:
    def train(mixes: int) -> Witness:
        keys = {"duration": f"{mixes * MIX * BATCH * LENGTH}tok", "interval": "100ba"}
        callbacks = [curriculum(tmp_path, mixes)]
        return fit(tmp_path / "run", lambda: of_foundry(text_keys(tmp_path)), callbacks=callbacks, **keys)

    assert len(train(2).samples) == 2 * MIX
    with pytest.raises(SystemExit) as ended:
        train(2)
    assert ended.value.code == 0
    third = train(3)
    assert sorted(third.samples) == list(range(2 * MIX, 3 * MIX))
    assert all(value >= 200 for rows in third.samples.values() for row in rows for value in row)


def test_a_swapped_dataset_resumes_as_if_uninterrupted(tmp_path) -> None:
    def train(folder: str, first: int, index: int, end: tuple[str, int] | None = None) -> Witness:
        keys = text_keys(tmp_path, first)
        swap = DatasetSwap({"train_loader": keys}, index)
        return fit(tmp_path / folder, lambda: of_foundry(keys), duration="5ep", end=end, callbacks=[swap])

    train("whole", 0, 0, ("batch_checkpoint", 6))
    shutil.copytree(tmp_path / "whole", tmp_path / "broken")
    whole = train("whole", 100, 1)
    epoch = [row[0] for batch in range(6, 6 + EPOCH) for row in whole.samples[batch]]
    assert sorted(epoch) == list(range(100, 100 + SAMPLES)), "an epoch of the new dataset, from its beginning"
    begun = train("broken", 100, 1, ("batch_checkpoint", 8))
    later = train("broken", 100, 1, ("batch_checkpoint", 12))
    last = train("broken", 100, 1)
    assert begun.samples | later.samples | last.samples == whole.samples
