"""What tests of plots share."""

from pathlib import Path


def is_plot(path: Path) -> bool:
    """Whether a picture was written that is not empty."""
    return path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 1000
