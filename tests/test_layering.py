"""Who may import whom. The tree's order is part of its design: a lower layer that imports a higher one is a defect."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "foundry_moe"
TRAINER = {"composer", "llmfoundry"}
# files and folders that may import Composer or LLM Foundry
KNOWS_TRAINER = (
    "algorithm.py",
    "optim.py",
    "models/mpt.py",
    "registry.py",
    "callbacks/",
    "checkpoint/elastic",
    "checkpoint/composer",
    "train.py",
    "cli.py",
    "demo.py",
)
# a part of the package -> the parts of it that it may import, beside itself
ALLOWED = {
    "ops": {"config"},
    "layers": {"config", "ops", "errors"},
    # `plan` reads a run as the training command does
    "parallel": {"config", "ops", "layers", "errors", "conversion", "run"},
    "checkpoint": {"config", "ops", "layers", "parallel", "errors", "conversion"},
}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def imports_of(path: Path) -> set[str]:
    """Dotted names of what a file imports, at its top or inside functions."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_named_files_know_the_trainer(path):
    name = str(path.relative_to(PACKAGE))
    if not name.startswith(KNOWS_TRAINER):
        assert not {full.split(".")[0] for full in imports_of(path)} & TRAINER


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_parts_import_downwards_only(path):
    part = path.relative_to(PACKAGE).parts[0]
    if part in ALLOWED and not str(path.relative_to(PACKAGE)).startswith(KNOWS_TRAINER):
        used = {full.split(".")[1] for full in imports_of(path) if full.startswith("foundry_moe.")}
        assert used - {part} <= ALLOWED[part]


@pytest.mark.parametrize("path", sorted((ROOT / "kernels").rglob("*.py")), ids=lambda path: path.name)
def test_kernels_import_torch_and_triton_alone(path):
    used = {full.split(".")[0] for full in imports_of(path)}
    assert not used & {"foundry_moe", "composer", "llmfoundry", "transformers", "omegaconf"}
