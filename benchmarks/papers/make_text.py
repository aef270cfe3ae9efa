"""Makes compressed parts of real text and a tokenizer, for training where no hub can be reached.

    python -m benchmarks.papers.make_text FOLDER [--texts FOLDER] [--parts 3]

Without `--texts`: Debian's packages of the sources of the kernel, GCC, glibc and binutils by `apt-get download`, some
400 million tokens in parts of at most 45 MB. Files are drawn in an order of their own; `held_out.xz` has the first, a
part the next ones, sorted by path, since neighbours compress well. The byte-level BPE is trained on the first part.
`benchmarks.papers.tokens` makes tokens of the folder, on the machine that trains. Ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import hashlib
import lzma
import os
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.papers.tokens import END, HELD_OUT, TOKENIZER, part_path

PACKAGES = ("linux-source-6.1", "gcc-12-source", "glibc-source", "binutils-source")
SUFFIXES = frozenset(
    f".{name}"
    for name in "C S adb ads c cc cpp d def dts dtsi f90 go h m4 md mod pl py rs rst sh texi txt yaml".split()  # noqa: SIM905
)
LARGEST_FILE_BYTES = 200_000  # larger ones are tables of registers
HELD_OUT_BYTES = 6_000_000
PART_BYTES = 255_000_000  # of text, of which xz makes some 40 MB
LARGEST_PART_BYTES = 45_000_000
VOCABULARY = 32_768
BPE_BYTES = 40_000_000  # to train the tokenizer on
# as GPT-2's, but that an underscore is a letter: one in seven tokens of source code would be one by itself
WORDS = r" ?[\p{L}_]+| ?\p{N}+| ?[^\s\p{L}\p{N}_]+|\s+(?!\S)|\s+"


def fetch_sources(folder: Path) -> None:
    """Downloads and unpacks the packages, whose files are archives of sources."""
    subprocess.run(["apt-get", "download", *PACKAGES], cwd=folder, check=True)
    for package in folder.glob("*.deb"):
        subprocess.run(["dpkg-deb", "-x", package.name, "packages"], cwd=folder, check=True)
    for archive in (folder / "packages").rglob("*.tar.xz"):
        subprocess.run(["tar", "-xf", str(archive)], cwd=folder, check=True)


def texts_of(folder: Path) -> Iterator[tuple[str, bytes]]:
    """(path, text) of a folder's files, in an order that depends on their paths alone; equal texts come once."""
    paths = [path for path in folder.rglob("*") if path.suffix in SUFFIXES and path.is_file() and not path.is_symlink()]
    names = {path: str(path.relative_to(folder)) for path in paths}
    seen = set()
    for path in sorted(paths, key=lambda path: hashlib.sha256(names[path].encode()).digest()):
        if 0 < path.stat().st_size <= LARGEST_FILE_BYTES:
            text = path.read_text(encoding="utf-8", errors="replace").encode()
            digest = hashlib.sha256(text).digest()
            if END not in text and digest not in seen:
                seen.add(digest)
                yield names[path], text


def take_bytes(texts: Iterable[tuple[str, bytes]], most: int) -> list[tuple[str, bytes]]:
    """The next texts, until there are so many bytes."""
    taken = []
    for name, text in texts:
        taken.append((name, text))
        most -= len(text)
        if most <= 0:
            break
    return taken


def train_bpe(texts: Iterable[str], vocabulary: int) -> Any:
    """A byte-level BPE whose id 0 ends a text."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(WORDS), behavior="isolated")
    bpe.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        min_frequency=2,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return bpe


def write_part(path: Path, texts: list[tuple[str, bytes]]) -> int:
    """Writes the texts; bytes of the file.

    Raises:
        ValueError: the file is too large to travel.
    """
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": 1 << 28}]
    with lzma.open(path, "wb", filters=filters) as file:
        file.write(END.join(text for _, text in sorted(texts)))
    size = path.stat().st_size
    if size > LARGEST_PART_BYTES:
        raise ValueError(f"{path} has {size} bytes, more than {LARGEST_PART_BYTES}: give a smaller --part-bytes")
    return size


def make_text(
    texts: Iterator[tuple[str, bytes]], out: Path, *, parts: int, part_bytes: int = PART_BYTES,
    held_out_bytes: int = HELD_OUT_BYTES, vocabulary: int = VOCABULARY,
) -> None:  # fmt: skip
    """Writes the tokenizer, the held-out part, and at most so many parts to train on.

    Raises:
        ValueError: there is too little text to hold out some of it.
    """
    out.mkdir(parents=True, exist_ok=True)
    write_part(out / HELD_OUT, take_bytes(texts, held_out_bytes))
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        written = {}
        for number in range(1, parts + 1):
            if not (part := take_bytes(texts, part_bytes)):
                break
            written[number] = sum(len(text) for _, text in part), pool.submit(write_part, part_path(out, number), part)
            if number == 1:
                some = islice((text.decode() for _, text in part), max(BPE_BYTES * len(part) // written[1][0], 1))
                train_bpe(some, vocabulary).save(str(out / TOKENIZER), pretty=False)
        if not written:
            raise ValueError(f"too little text for {held_out_bytes} bytes that are held out and more to train on")
        for number, (size, future) in written.items():
            path, compressed = part_path(out, number), future.result()
            print(f"{path}: {size / 1e6:.0f} MB of text in {compressed / 1e6:.1f} MB", flush=True)


def main() -> None:
    """Runs from the command line; see the text at the top."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--texts", type=Path, help="a folder of text files, instead of Debian's sources")
    parser.add_argument("--parts", type=int, default=99, help="at most so many")
    parser.add_argument("--part-bytes", type=int, default=PART_BYTES, help="of text in a part")
    arguments = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    with tempfile.TemporaryDirectory() as folder:
        texts = arguments.texts or Path(folder)
        if not arguments.texts:
            fetch_sources(texts)
        make_text(texts_of(texts), arguments.out, parts=arguments.parts, part_bytes=arguments.part_bytes)


if __name__ == "__main__":
    main()
