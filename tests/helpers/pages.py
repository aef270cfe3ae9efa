"""Code blocks of a documentation page, and a folder in which its commands run as printed."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from tests.helpers.demo import BIN, ROOT
from tests.helpers.warm import programs


def blocks(page: str, language: str) -> list[str]:
    """The page's code blocks in a language, in order. `page`: below docs/."""
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / "docs" / page).read_text(), re.M | re.S)


def link_tree(folder: Path) -> None:
    """Links what commands name, so that relative paths work and results stay in `folder`."""
    for name in ("foundry_moe", "yamls", "examples", "docker", "benchmarks", "tests", "LICENSE"):
        (folder / name).symlink_to(ROOT / name)


def run_block(block: str, folder: Path, timeout_s: float = 600) -> str:
    """The output of a block in bash, which stops at the first command that fails."""
    path = os.pathsep.join([str(programs()), str(BIN), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block],
        cwd=folder,
        env={**os.environ, "PATH": path, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, f"{block}\n{output[-4000:]}"
    return output
