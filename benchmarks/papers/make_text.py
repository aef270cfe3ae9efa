"""Makes a file of tokens from real text, for training where no hub can be reached.

    python -m benchmarks.papers.make_text OUT [--tokens 60000000] [--folder TEXTS | --mds FOLDER]

Without a source: Debian's kernel source package, some 1.3 GB of text, by `apt-get download` (139 MB). A byte-level BPE
is trained on a part of the training text; files are drawn in an order of their own, and those held out are no part of
training. An MDS folder (`train` and `val`, as LLM Foundry's `data_prep` writes them, with a column `tokens`) is taken
as it is. Ten minutes for 60 million tokens on two cores.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.papers.tokens import Tokens, write_tokens

PACKAGE = "linux-source-6.1"
SUFFIXES = frozenset({".c", ".h", ".rst", ".txt", ".S", ".py", ".sh", ".md"})
LARGEST_FILE_BYTES = 200_000  # larger ones are tables of registers
HELD_OUT = 60  # one token of so many
VOCABULARY = 32_768
BPE_BYTES = 40_000_000  # to train the tokenizer on
END = "<|endoftext|>"
# as GPT-2's, but that an underscore is a letter: one in seven tokens of source code would be one by itself
WORDS = r" ?[\p{L}_]+| ?\p{N}+| ?[^\s\p{L}\p{N}_]+|\s+(?!\S)|\s+"


def fetch_kernel_source(folder: Path) -> Path:
    """Downloads and unpacks the package; the folder of the source."""
    subprocess.run(["apt-get", "download", PACKAGE], cwd=folder, check=True)
    package = next(folder.glob("*.deb"))
    subprocess.run(["dpkg-deb", "-x", package.name, "package"], cwd=folder, check=True)
    archive = next((folder / "package").rglob("*.tar.xz"))
    subprocess.run(["tar", "-xf", str(archive)], cwd=folder, check=True)
    return folder / archive.name.removesuffix(".tar.xz")


def texts_of(folder: Path) -> Iterator[str]:
    """The texts of a folder's files, in an order that depends on their paths alone."""
    paths = [path for path in folder.rglob("*") if path.suffix in SUFFIXES and path.is_file() and not path.is_symlink()]
    for path in sorted(paths, key=lambda path: hashlib.sha256(str(path.relative_to(folder)).encode()).digest()):
        if 0 < path.stat().st_size <= LARGEST_FILE_BYTES:
            yield path.read_text(encoding="utf-8", errors="replace")


def take_bytes(texts: Iterable[str], most: int) -> Iterator[str]:
    """The first texts, until there are so many characters."""
    for text in texts:
        yield text
        most -= len(text)
        if most <= 0:
            return


def train_bpe(texts: Iterable[str], vocabulary: int) -> Any:
    """A byte-level BPE with END as its id 0."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(WORDS), behavior="isolated")
    bpe.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        min_frequency=2,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return bpe


def tokenize(texts: Iterator[str], bpe: Any, wanted: int) -> NDArray[np.uint16]:
    """At most `wanted` ids of the next texts, END behind each; no text that is not needed is read."""
    parts, found = [], 0
    while found < wanted and (batch := list(islice(texts, 256))):
        for encoded in bpe.encode_batch(batch):
            parts.append(np.array([*encoded.ids, 0], dtype=np.uint16))
            found += len(parts[-1])
    return np.concatenate(parts)[:wanted] if parts else np.zeros(0, dtype=np.uint16)


def tokens_of_folder(folder: Path, wanted: int, vocabulary: int = VOCABULARY, bpe_bytes: int = BPE_BYTES) -> Tokens:
    """At most `wanted` tokens of the texts in a folder: its first files are held out, the next are trained on.

    Raises:
        ValueError: the folder has too little text to hold out some of it.
    """
    held_out = wanted // HELD_OUT
    unseen = take_bytes(texts_of(folder), 6 * held_out)  # the tokenizer sees none of them: a token has fewer letters
    skipped = sum(1 for _ in unseen)
    bpe = train_bpe(take_bytes(islice(texts_of(folder), skipped, None), bpe_bytes), vocabulary)
    texts = texts_of(folder)
    validation = tokenize(islice(texts, skipped), bpe, held_out)
    train = tokenize(texts, bpe, wanted - len(validation))
    if not len(train):
        raise ValueError(f"{folder} has too little text for {wanted} tokens: name more, or give a smaller --tokens")
    return Tokens(vocabulary=bpe.get_vocab_size(), train=train, validation=validation, source=folder.name)


def tokens_of_mds(folder: Path, wanted: int) -> Tokens:
    """At most `wanted` tokens of an MDS folder's `train`, and so much of its `val` as is held out of other texts."""
    from streaming import StreamingDataset

    def read(split: str, most: int) -> NDArray[np.int64]:
        dataset = StreamingDataset(local=str(folder), split=split, shuffle=False, batch_size=1)
        parts: list[NDArray[np.int64]] = []
        for index in range(len(dataset)):
            ids = dataset[index]["tokens"]
            parts.append(np.frombuffer(ids, dtype=np.int64) if isinstance(ids, bytes) else np.asarray(ids, np.int64))
            most -= len(parts[-1])
            if most <= 0:
                break
        return np.concatenate(parts)

    train, validation = read("train", wanted), read("val", wanted // HELD_OUT)
    vocabulary = int(max(train.max(), validation.max())) + 1
    if vocabulary > 1 << 16:
        raise ValueError(f"{folder} has token ids up to {vocabulary - 1}; a file of tokens keeps uint16")
    parts = {"train": train.astype(np.uint16), "validation": validation.astype(np.uint16)}
    return Tokens(vocabulary=vocabulary, source=folder.name, **parts)


def main() -> None:
    """Runs from the command line; see the text at the top."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokens", type=int, default=60_000_000, help="at most so many, held out ones included")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--folder", type=Path, help="of text files, instead of Debian's kernel source")
    source.add_argument("--mds", type=Path, help="a folder of MDS with tokens, instead of text")
    arguments = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "true"  # this process forks nothing, and most of its time is tokenizing
    if arguments.mds:
        tokens = tokens_of_mds(arguments.mds, arguments.tokens)
    elif arguments.folder:
        tokens = tokens_of_folder(arguments.folder, arguments.tokens)
    else:
        with tempfile.TemporaryDirectory() as folder:
            tokens = tokens_of_folder(fetch_kernel_source(Path(folder)), arguments.tokens)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    write_tokens(tokens, arguments.out)
    print(
        f"{arguments.out}: {len(tokens.train):,} tokens to train on, {len(tokens.validation):,} held out, vocabulary "
        f"{tokens.vocabulary:,}, {arguments.out.stat().st_size / 1e6:.1f} MB, from {tokens.source}"
    )


if __name__ == "__main__":
    main()
