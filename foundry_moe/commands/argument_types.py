"""Types of command-line arguments, for argparse, and the arguments that several commands share."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

TRUST = "if you trust whoever made it, add --trust-pickle, which lets it run code"
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}  # as torch names them


def _number(kind: type, is_valid: Callable[[Any], bool], words: str) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        value = kind(text)
        if not is_valid(value):
            raise argparse.ArgumentTypeError(f"{text} must be {words}")
        return value

    read.__name__ = kind.__name__  # argparse names it if the text is not a number
    return read


positive = _number(float, lambda value: 0 < value < float("inf"), "a finite number above 0")
positive_int = _number(int, lambda value: value >= 1, "1 or more")


def add_command(commands: Any, name: str, help: str, description: str = "", *, example: str) -> argparse.ArgumentParser:
    """Adds a command to those of `foundry-moe` or of `foundry-moe checkpoints`.

    Args:
        description: default: `help` as a sentence.
        example: the arguments of an example.
    """
    parser = commands.add_parser(name, help=help, description=description or f"{help[0].upper()}{help[1:]}.")
    parser.epilog = f"example: {parser.prog} {example}"
    return parser


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
