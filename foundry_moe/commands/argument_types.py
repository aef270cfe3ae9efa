"""Types of command-line arguments, for argparse, and the arguments that several commands share."""

from __future__ import annotations

import argparse
from pathlib import Path

_SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def positive(text: str) -> float:
    """A finite number above 0, as an argument's type."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} must be a finite number above 0")
    return value


def positive_int(text: str) -> int:
    """A whole number of 1 or more, as an argument's type."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} must be 1 or more")
    return value


def file_size_gb(text: str) -> float:
    """The size of one output file in GB, as an argument's type: from a kilobyte to a petabyte."""
    value = float(text)
    if not 1e-6 <= value <= 1e6:
        raise argparse.ArgumentTypeError(f"{text} must be a size in GB between 0.000001 and 1000000")
    return value


def dtype_named(name: str | None) -> str | None:
    """A floating-point dtype as torch names it.

    Raises:
        ValueError: there is no such dtype.
    """
    dtype = _SHORT_DTYPES.get(name, name) if name is not None else None
    if dtype not in (None, *_SHORT_DTYPES.values(), "float64"):
        raise ValueError(f"--dtype ({name}) must be bf16, fp16 or fp32")
    return dtype


def add_store_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the store that holds a run's checkpoints."""
    parser.add_argument("--endpoint-url", help="address of the S3 server (default: AWS)")
    parser.add_argument("--profile", help="profile of the AWS configuration files (default: the environment's)")
    parser.add_argument("--region", help="region of the bucket (default: that of the profile or the environment)")


def local_path(text: str) -> Path:
    """A path of this host, as an argument's type. An address would create folders named `s3:`."""
    if "://" in text:
        raise argparse.ArgumentTypeError(
            f"{text} must be a path of this host: write to a local path and copy the result"
        )
    return Path(text)
