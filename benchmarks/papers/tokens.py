"""A file of token ids: one line of JSON, then uint16 of the training part, then of the held-out one, all in xz.

60 million tokens of source code take 28 MB, so that real text can be carried to a machine without a hub.
"""

from __future__ import annotations

import json
import lzma
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

# 64 MiB of dictionary; literals and matches aligned to two bytes
_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 1 << 26, "lc": 3, "lp": 1, "pb": 1}]


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Token ids below `vocabulary`, of text to train on and of text held out."""

    vocabulary: int
    train: NDArray[np.uint16]
    validation: NDArray[np.uint16]
    source: str


def write_tokens(tokens: Tokens, path: Path) -> None:
    """Writes the file.

    Raises:
        ValueError: the vocabulary is too large for uint16.
    """
    if tokens.vocabulary > 1 << 16:
        raise ValueError(f"vocabulary ({tokens.vocabulary}): token ids are kept as uint16, so 65536 at most")
    parts = {"train": tokens.train, "validation": tokens.validation}
    header = {
        "vocabulary": tokens.vocabulary,
        "source": tokens.source,
        **{name: len(part) for name, part in parts.items()},
    }
    with lzma.open(path, "wb", filters=_FILTERS) as file:
        file.write(json.dumps(header).encode() + b"\n")
        for part in parts.values():
            file.write(part.astype("<u2").tobytes())


def read_tokens(path: Path) -> Tokens:
    """Reads what `write_tokens` wrote.

    Raises:
        ValueError: the file is cut short.
    """
    with lzma.open(path, "rb") as file:
        header: dict[str, Any] = json.loads(file.readline())
        ids = np.frombuffer(file.read(), dtype="<u2")
    if len(ids) != header["train"] + header["validation"]:
        raise ValueError(f"{path} has {len(ids)} tokens, not {header['train']} + {header['validation']}")
    train, validation = ids[: header["train"]], ids[header["train"] :]
    return Tokens(vocabulary=header["vocabulary"], train=train, validation=validation, source=header["source"])
