"""Copies or drops the files beside the weights in the folder that a run's model was loaded from."""

from __future__ import annotations

import fnmatch
import shutil
from pathlib import Path

COPIED, REPLACED = "copied", "replaced by the export's own"
DONE = (COPIED, REPLACED)
_MOST_BYTES = 2**20
_TOKENIZER = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template*"),
    *("vocab.*", "merges.txt", "*.model", "spiece*"),
)
# the first pattern that matches a file's lower-case name decides
_FILES = {
    "licen[cs]e*": COPIED,
    "notice*": COPIED,
    "copying*": COPIED,
    "use_policy*": COPIED,
    **dict.fromkeys(("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json"), REPLACED),
    **dict.fromkeys(("config.json", "generation_config.json", "certificate.*"), REPLACED),
    **dict.fromkeys(_TOKENIZER, REPLACED),
    "*.py": "dropped: transformers' own classes load the export",
    "readme*": "dropped: it describes the source model",
    **dict.fromkeys(("*.pt", "*.pth", "*.gguf", "*.msgpack", "*.h5", "*.onnx"), "dropped: weights of the source"),
}
_OTHER = "dropped: not a file that an export needs"


def copy_beside_weights(source: str, out: Path) -> dict[str, str]:
    """Copies licences to `out`; returns what became of each file of the folder, empty if it is not on this machine.

    Args:
        source: recorded in a checkpoint, which is not trusted: links and large files are not copied.
    """
    folder = Path(source)
    if not source or not (folder / "config.json").is_file():
        return {}
    found = {}
    for path in sorted(folder.iterdir()):
        name = path.name.lower()
        done = next((done for pattern, done in _FILES.items() if fnmatch.fnmatchcase(name, pattern)), _OTHER)
        if path.is_dir() or name.startswith("."):
            continue
        if done == COPIED and (path.is_symlink() or path.stat().st_size > _MOST_BYTES or (out / path.name).exists()):
            done = f"dropped: a link, or above {_MOST_BYTES:,} bytes"
        if done == COPIED:
            shutil.copyfile(path, out / path.name)
        found[path.name] = done
    return found


def copy_tokenizer(folder: Path, out: Path) -> None:
    """Copies the files of a folder's tokenizer."""
    for path in folder.iterdir():
        if path.is_file() and any(fnmatch.fnmatchcase(path.name, pattern) for pattern in _TOKENIZER):
            shutil.copyfile(path, out / path.name)
