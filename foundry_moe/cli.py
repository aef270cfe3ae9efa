"""The command `foundry-moe`: verify, plan, checkpoints. Each brings its own arguments; this only gathers them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from foundry_moe import __version__
from foundry_moe.checkpoint import commands as checkpoints
from foundry_moe.errors import run_cleanly
from foundry_moe.parallel.commands import add_plan_parser, add_verify_parser


def build_parser() -> argparse.ArgumentParser:
    """All commands; each sets `run`, a function from the parsed arguments to an exit code."""
    parser = argparse.ArgumentParser(
        prog="foundry-moe", description="Dropless Mixture-of-Experts for Composer and LLM Foundry."
    )
    parser.add_argument("--version", action="version", version=f"foundry_moe {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    add_verify_parser(commands)
    add_plan_parser(commands)
    checkpoints.add_parser(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the command."""
    parsed = build_parser().parse_args(arguments)
    sys.exit(run_cleanly(lambda: int(parsed.run(parsed))))


if __name__ == "__main__":
    main()
