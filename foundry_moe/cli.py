"""The command `foundry-moe`: check, train, verify, certify, plan, loads, export, checkpoints."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from foundry_moe import __version__
from foundry_moe.commands import parsers
from foundry_moe.launch.console import quiet_third_parties
from foundry_moe.launch.user_errors import run_cleanly
from foundry_moe.schema import nearest

EXIT_CODES = (
    "exit codes: 0 done; 1 the answer is no (damaged, different, does not fit), or an error that may pass, such as a "
    "store that does not answer; 2 a mistake in the arguments or in the YAML; 3 a run whose values are not finite; "
    "4 a run whose folder another process has taken over; 5 a node that failed its check; 75 a run that was stopped "
    "and saved; 130 a run that a second Ctrl-C ended"
)


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands; each sets `run`, a function from the parsed arguments to an exit code."""
    parser = argparse.ArgumentParser(
        prog="foundry-moe",
        description="Dropless Mixture-of-Experts for Composer and LLM Foundry.",
        epilog=EXIT_CODES,
    )
    parser.add_argument("--version", action="version", version=f"foundry_moe {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    parsers.add_check_parser(commands)
    parsers.add_train_parser(commands)
    parsers.add_verify_parser(commands)
    parsers.add_certify_parser(commands)
    parsers.add_plan_parser(commands)
    parsers.add_loads_parser(commands)
    parsers.add_export_parser(commands)
    parsers.add_checkpoints_parser(commands)
    return parser


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parsed arguments; `key=value` may also follow options, which argparse alone refuses."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    parser = inner = build_parser()
    for word in arguments:
        below = next((a.choices for a in inner._actions if isinstance(a, argparse._SubParsersAction)), None)
        if not below or word.startswith("-"):
            break
        if word not in below:
            inner.error(f"{word!r} is not a command; {nearest(word, below)}")
        inner = below[word]
    parsed, rest = parser.parse_known_args(arguments)
    if rest and (not hasattr(parsed, "overrides") or any(word.startswith("-") for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        parsed.overrides = [*parsed.overrides, *rest]
    return parsed


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the command."""
    parsed = parse(arguments)
    quiet_third_parties()
    sys.exit(run_cleanly(lambda: int(parsed.run(parsed))))


if __name__ == "__main__":
    main()
