"""The command `foundry-moe`: check, verify, plan, checkpoints. The last three bring their own arguments."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from foundry_moe import __version__
from foundry_moe.commands import checkpoints
from foundry_moe.commands.parsers import add_plan_parser, add_verify_parser
from foundry_moe.launch.errors import run_cleanly


def build_parser() -> argparse.ArgumentParser:
    """All commands; each sets `run`, a function from the parsed arguments to an exit code."""
    parser = argparse.ArgumentParser(
        prog="foundry-moe", description="Dropless Mixture-of-Experts for Composer and LLM Foundry."
    )
    parser.add_argument("--version", action="version", version=f"foundry_moe {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_check_parser(commands)
    add_verify_parser(commands)
    add_plan_parser(commands)
    checkpoints.add_parser(commands)
    return parser


def _add_check_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "check",
        help="say what is wrong with a run's YAML",
        description="Reads a run's YAML as the training command does, and says in one line what is wrong with it, exit "
        "code 2. Starts nothing. Whether a mesh fits is checked where WORLD_SIZE is set.",
    )
    parser.add_argument("yaml", help="the run, as given to train.py")
    parser.add_argument("overrides", nargs="*", metavar="key=value")

    def run(arguments: argparse.Namespace) -> int:
        from foundry_moe.launch.run_config import check_files, check_run, load_run, plain

        run = plain(load_run(arguments.yaml, arguments.overrides))
        check_run(run)
        check_files(run)
        return 0

    parser.set_defaults(run=run)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parsed arguments; `key=value` may stand after options too, which argparse alone does not take."""
    parser = build_parser()
    parsed, rest = parser.parse_known_args(arguments)
    if rest and (not hasattr(parsed, "overrides") or any(word.startswith("-") for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        parsed.overrides = [*parsed.overrides, *rest]
    return parsed


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the command."""
    parsed = parse(arguments)
    sys.exit(run_cleanly(lambda: int(parsed.run(parsed))))


if __name__ == "__main__":
    main()
