"""Which constants a plan takes: of a file, else measured on this machine, else shipped, else from data sheets."""

from __future__ import annotations

import os
from pathlib import Path

from foundry_moe.commands.plan.constants import Constants, read_constants
from foundry_moe.commands.plan.data_sheets import SHEETS, scaled

SHIPPED = Path(__file__).parent


def default_path(chip: str) -> Path:
    """Where constants of this kind of GPU are kept: beside the tiles that were tuned."""
    named = os.environ.get("FOUNDRY_MOE_TUNING_CACHE")
    folder = Path(named).expanduser().parent if named else Path.home() / ".cache" / "foundry_moe"
    return folder / f"constants-{chip}.json"


def constants_of(chip: str, path: Path | None = None) -> Constants:
    """Those of the file, else those measured on this machine for the chip, else those that are shipped.

    Raises:
        ValueError: a file that is not of this form; a chip that is not known.
    """
    if path is not None:
        return read_constants(path)
    if default_path(chip).is_file():
        return read_constants(default_path(chip))
    return shipped_constants(chip)


def shipped_constants(chip: str) -> Constants:
    """Those that came with this package, or, of a chip of which none did, a guess from its data sheet.

    Raises:
        ValueError: a chip that is not known.
    """
    path = SHIPPED / f"constants_{chip}.json"
    if path.is_file():
        return read_constants(path)
    if chip not in SHEETS:
        raise ValueError(f"--chip ({chip}): nothing is known of it; measure one with foundry-moe plan --calibrate")
    return scaled(shipped_constants("h200"), chip)
