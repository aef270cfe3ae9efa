"""Token ids of a folder that `make_text` wrote: parts of compressed text, tokenized here by all cores.

Ids are kept beside the compressed parts, so that a part is tokenized once.
"""

from __future__ import annotations

import lzma
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

TOKENIZER, HELD_OUT = "tokenizer.json", "held_out.xz"
END = b"\0"  # between texts; behind each of them stands id 0
BATCH_BYTES = 1 << 20  # of text that a process tokenizes at once

_bpe: Any = None  # of a process of the pool


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Token ids below `vocabulary`, of parts of text to train on and of text held out."""

    vocabulary: int
    train: list[NDArray[np.uint16]]
    validation: NDArray[np.uint16]


def part_path(folder: Path, number: int) -> Path:
    return folder / f"part{number}.xz"


def _load(path: Path) -> None:
    from tokenizers import Tokenizer

    global _bpe
    _bpe = Tokenizer.from_file(str(path))


def _ids_of(texts: list[bytes]) -> NDArray[np.uint16]:
    return np.concatenate([np.array([*_bpe.encode(text.decode()).ids, 0], dtype=np.uint16) for text in texts])


def _batches(path: Path) -> Iterator[list[bytes]]:
    batch: list[bytes] = []
    size = 0
    for text in lzma.decompress(path.read_bytes()).split(END):
        batch.append(text)
        size += len(text)
        if size > BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def tokenize(folder: Path, path: Path) -> NDArray[np.uint16]:
    """Ids of a part; id 0 stands behind each text."""
    kept = path.with_suffix(".npy")
    if not kept.exists():
        workers = len(os.sched_getaffinity(0))
        # spawned: this process may have a GPU
        with ProcessPoolExecutor(
            workers, get_context("spawn"), initializer=_load, initargs=(folder / TOKENIZER,)
        ) as pool:
            ids = np.concatenate(list(pool.map(_ids_of, _batches(path))))
        unfinished = kept.with_suffix(".unfinished.npy")
        np.save(unfinished, ids)
        unfinished.rename(kept)
    loaded: NDArray[np.uint16] = np.load(kept, mmap_mode="r")
    return loaded


def read_tokens(folder: Path) -> Tokens:
    """Tokens of the parts that are there: 1, 2, ... without a gap.

    Raises:
        ValueError: the folder has no tokenizer, held-out text or first part.
    """
    from tokenizers import Tokenizer

    needed = folder / TOKENIZER, folder / HELD_OUT, part_path(folder, 1)
    if missing := [path.name for path in needed if not path.exists()]:
        raise ValueError(f"{folder} has no {', '.join(missing)}: run `python -m benchmarks.papers.make_text {folder}`")
    parts = []
    while (path := part_path(folder, len(parts) + 1)).exists():
        parts.append(tokenize(folder, path))
    vocabulary = Tokenizer.from_file(str(folder / TOKENIZER)).get_vocab_size()
    return Tokens(vocabulary=vocabulary, train=parts, validation=tokenize(folder, folder / HELD_OUT))
