"""`foundry-moe loads`: a page of what `callbacks.expert_load` wrote, at any time. Imports no torch."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_loads_parser(subparsers: Any) -> argparse.ArgumentParser:
    """`foundry-moe loads`: sets `run` to a function of the parsed arguments that returns an exit code."""
    parser = subparsers.add_parser(
        "loads",
        help="a page of experts' loads over a run: heat maps and charts",
        description="Reads the JSON lines of callbacks.expert_load.file, also while the run writes them, and makes one "
        "HTML file that opens in any browser without a server or a network.",
    )
    parser.add_argument("file", type=Path, help="as in callbacks.expert_load.file")
    parser.add_argument("--html", type=Path, metavar="OUT", help="the page (default: beside the file)")
    parser.set_defaults(run=loads_command)
    return parser


def loads_command(arguments: argparse.Namespace) -> int:
    """0 once the page is written.

    Raises:
        ValueError: what is wrong with the file, in one sentence.
    """
    from foundry_moe.loads.page import write_page

    target = arguments.html or arguments.file.with_suffix(".html")
    if target.resolve() == arguments.file.resolve():
        raise ValueError(f"--html ({target}) is the file that is read; name another")
    lines = write_page(arguments.file, target)
    print(f"{target}: {lines} lines")
    return 0
