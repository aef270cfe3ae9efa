"""Subcommands of `foundry-moe`, run in this process."""

from __future__ import annotations

import argparse

import pytest

from foundry_moe.cli import main
from foundry_moe.commands.parsers import add_checkpoints_parser
from foundry_moe.launch.user_errors import run_cleanly


def tool(*words: object) -> int:
    """Exit code of `foundry-moe checkpoints WORDS`; a mistake in the words raises SystemExit."""
    parser = argparse.ArgumentParser()
    add_checkpoints_parser(parser.add_subparsers())
    arguments = parser.parse_args(["checkpoints", *(str(word) for word in words)])
    return run_cleanly(lambda: arguments.run(arguments))


def export(*words: object) -> int:
    """Exit code of `foundry-moe export WORDS`."""
    with pytest.raises(SystemExit) as ended:
        main(["export", *map(str, words)])
    return int(ended.value.code or 0)
