"""Copies licences and tokenizers that lie beside the weights in the folder that a run's model was loaded from."""

from __future__ import annotations

import fnmatch
import shutil
from collections.abc import Sequence
from pathlib import Path

_MOST_BYTES = 2**20
_LICENCES = ("licen[cs]e*", "notice*", "copying*", "use_policy*")
_TOKENIZER = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template*"),
    *("vocab.*", "merges.txt", "*.model", "spiece*"),
)
_REPLACED = (  # by the export's own
    *("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json"),
    *("config.json", "generation_config.json", "certificate.*", *_TOKENIZER),
)


def _matches(path: Path, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(path.name.lower(), pattern) for pattern in patterns)


def copy_licences(source: str, out: Path) -> list[str]:
    """Copies licences and notices to `out`; returns the names of files of the folder that the export does not have.

    Args:
        source: recorded in a checkpoint, which is not trusted: links and large files are not copied. Empty, or not a
            folder of this machine: nothing is done.
    """
    folder = Path(source)
    if not source or not (folder / "config.json").is_file():
        return []
    left = []
    for path in sorted(folder.iterdir()):
        if path.is_dir() or path.name.startswith("."):
            continue
        small = not path.is_symlink() and path.stat().st_size <= _MOST_BYTES
        if _matches(path, _LICENCES) and small and not (out / path.name).exists():
            shutil.copyfile(path, out / path.name)
        elif not _matches(path, _REPLACED):
            left.append(path.name)
    return left


def copy_tokenizer(folder: Path, out: Path) -> None:
    """Copies the files of a folder's tokenizer."""
    for path in folder.iterdir():
        if path.is_file() and _matches(path, _TOKENIZER):
            shutil.copyfile(path, out / path.name)
