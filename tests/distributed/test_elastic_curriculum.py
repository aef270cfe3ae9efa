"""LLM Foundry's `curriculum_learning` with `elastic_checkpoint`, resumed on another number of processes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from streaming import MDSWriter
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from tests.helpers.tiny_runs import launch, run

LENGTH, BATCH, MIX = 16, 8, 4  # tokens of a sample, samples of a batch, batches of a datamix


def dataset(root: Path, number: int) -> dict[str, Any]:
    """Three batches of tokens, so that a datamix ends within its second epoch."""
    folder = root / f"mix{number}"
    if not folder.exists():
        generator = np.random.default_rng(number)
        with MDSWriter(out=str(folder / "train"), columns={"tokens": "bytes"}) as writer:
            for _ in range(3 * BATCH):
                writer.write({"tokens": generator.integers(0, 64, LENGTH).tobytes()})
    keys = {"local": str(folder), "split": "train", "shuffle": True, "num_canonical_nodes": 8}
    return {**keys, "max_seq_len": LENGTH, "eos_token_id": 1}


def tokenizer(root: Path) -> dict[str, Any]:
    words = Tokenizer(WordLevel({str(number): number for number in range(64)}, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="1", pad_token="0").save_pretrained(root / "tokenizer")
    return {"name": str(root / "tokenizer"), "kwargs": {"model_max_length": LENGTH}}


def test_a_curriculum_resumes_on_two_processes_in_both_datamixes_and_between_them(tmp_path: Path) -> None:
    first, second = dataset(tmp_path, 1), dataset(tmp_path, 2)
    duration = f"{MIX * BATCH * LENGTH}tok"
    workers = {"num_workers": 0, "prefetch_factor": None, "persistent_workers": False}
    keys: dict[str, Any] = {
        "tokenizer": tokenizer(tmp_path),
        "train_loader": {"name": "text", "dataset": first, "drop_last": True, **workers},
        "callbacks.curriculum_learning": {
            "duration": duration,
            "schedule": [{"duration": duration, "dataset": second}],
        },
        "max_duration": f"{2 * MIX * BATCH * LENGTH}tok",
        "scheduler.t_warmup": "0tok",
    }
    every = {"interval": "1ba"}
    names = {"first": 2, "boundary": MIX, "second": MIX + 2}
    whole, *_ = launch(
        1,
        run(tmp_path / "whole", (1, 1, 1), keys=every, **keys),
        *(run(tmp_path / name, (1, 1, 1), keys=every, **keys, break_at=at) for name, at in names.items()),
    )
    for name, at in names.items():
        steps = sorted((tmp_path / name / "commits").iterdir())
        assert steps[-1].name.endswith(f"{at}.json")
        shutil.copytree(tmp_path / name, tmp_path / f"{name}-two")
    resumed = launch(2, *(run(tmp_path / f"{name}-two", (1, 2, 1), keys=every, **keys) for name in names))
    for at, result in zip(names.values(), resumed, strict=True):
        assert result["began_at"] == at
        assert sorted(result["samples"]) == list(range(at, 2 * MIX))
        for batch, samples in result["samples"].items():
            assert sorted(samples) == sorted(whole["samples"][batch])
        for batch, loss in result["losses"].items():
            assert loss == pytest.approx(whole["losses"][batch], rel=1e-5)
