"""Which files a folder of safetensors has. Opens none of them."""

from __future__ import annotations

import json
from pathlib import Path

from foundry_moe.checkpoint.strict import shown


def safetensors_in(folder: Path) -> list[Path]:
    """The folder's safetensors files, those that its index names if it has one; none where it has no such files.

    Raises:
        ValueError: the index cannot be read, or names something else than safetensors files beside it.
    """
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return _inside(folder, sorted(folder.glob("*.safetensors")))
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        strange = [name for name in names if Path(name).name != name or not name.endswith(".safetensors")]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"{index} cannot be read as an index of safetensors: {error!r}") from None
    strange = strange or [name for name in names if not (folder / name).is_file()]
    if strange or not names:
        raise ValueError(f"{index} names {shown(strange)}, not safetensors files beside it")
    return _inside(folder, [folder / name for name in names])


def _inside(folder: Path, files: list[Path]) -> list[Path]:
    """The files, if each lies in the folder; links to `blobs` are followed where the hub's cache has made them.

    Raises:
        ValueError: a symbolic link leads elsewhere.
    """
    real = folder.resolve()
    allowed = [real, *([real.parent.parent / "blobs"] if real.parent.name == "snapshots" else [])]
    for file in files:
        if file.resolve().parent not in allowed:
            raise ValueError(f"{file} is a symbolic link out of the folder: copy the file there")
    return files
