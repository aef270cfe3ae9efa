"""`foundry-moe loads`: a page of the file that `callbacks.expert_load` writes. Imports no torch."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_loads_parser(subparsers: Any) -> argparse.ArgumentParser:
    """`foundry-moe loads`: sets `run` to a function of the parsed arguments that returns an exit code."""
    parser = subparsers.add_parser(
        "loads",
        help="draw the experts' loads of a run as an HTML page",
        description="Reads the JSON lines of callbacks.expert_load.file, also during the run, and writes one HTML file "
        "that opens in any browser without a server or a network.",
        epilog="example: foundry-moe loads runs/demo/expert_load.jsonl --html loads.html",
    )
    parser.add_argument("file", type=Path, help="the path in callbacks.expert_load.file")
    parser.add_argument("--html", type=Path, metavar="OUT", help="the page (default: beside the file)")
    parser.set_defaults(run=loads_command)
    return parser


def loads_command(arguments: argparse.Namespace) -> int:
    """0 once the page is written; raises ValueError as `write_page` does."""
    from foundry_moe.loads.page import write_page

    target = arguments.html or arguments.file.parent / f"{arguments.file.stem}.html"
    lines = write_page(arguments.file, target)
    print(f"wrote {target}: {lines} lines")
    return 0
