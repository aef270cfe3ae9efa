"""Who may import whom. The tree's order is part of its design: a lower layer that imports a higher one is a defect."""

import ast
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "foundry_moe"
TRAINER = {"composer", "llmfoundry"}
# files and folders that may import Composer or LLM Foundry
KNOWS_TRAINER = ("algorithms/", "callbacks/", "commands/", "launch/", "models/", "demo", "optim", "registry", "train")
# a part of the package (a folder, or a file at its top) -> the parts that it may import, beside itself
LIBRARY = {"config", "schema", "ops", "layers", "models", "parallel", "checkpoint"}
ALLOWED = {
    "__init__": LIBRARY | {"algorithms", "callbacks"},
    "schema": set(),
    "config": {"schema"},
    "ops": {"config"},
    "layers": {"config", "schema", "ops"},
    "models": {"config", "schema", "ops", "layers", "checkpoint"},
    "parallel": {"config", "ops", "layers"},
    "checkpoint": {"config", "schema"},
    "loads": set(),
    "callbacks": LIBRARY | {"loads", "__init__"},
    "algorithms": LIBRARY,
    "launch": LIBRARY,
    "commands": LIBRARY | {"launch", "loads", "__init__"},
    "optim": set(),
    "demo": set(),
    "registry": LIBRARY | {"algorithms", "callbacks", "optim"},
    "cli": {"__init__", "commands", "launch"},
    "train": LIBRARY | {"callbacks", "launch"},
}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    """`layers.moe` for foundry_moe/layers/moe.py, `layers` for its __init__.py."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def imports_of(path: Path) -> set[str]:
    """Dotted names of what a file imports, at its top or inside functions, but not for types alone."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = []
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def own_imports(path: Path) -> set[str]:
    """The modules of this package that a file imports, as `name_of` names them."""
    known = {name_of(other) for other in modules()}
    ours = {full.removeprefix("foundry_moe.") for full in imports_of(path) if full.startswith("foundry_moe.")}
    # of `from foundry_moe.ops import plan_permute` the package's `__init__` is what is imported
    return {name if name in known else name.rpartition(".")[0] or "__init__" for name in ours} - {name_of(path)}


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_only_named_files_know_the_trainer(path):
    if not str(path.relative_to(PACKAGE)).startswith(KNOWS_TRAINER):
        assert not {full.split(".")[0] for full in imports_of(path)} & TRAINER


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_parts_import_downwards_only(path):
    part = name_of(path).split(".")[0]
    used = {full.split(".")[0] for full in own_imports(path)}
    assert used - {part} <= ALLOWED[part]


def test_no_module_imports_itself_through_others():
    imports = {name_of(path): own_imports(path) for path in modules()}
    done: set[str] = set()

    def visit(name: str, trail: list[str]) -> None:
        assert name not in trail, " -> ".join([*trail[trail.index(name) :], name])
        if name not in done:
            for other in sorted(imports[name]):
                visit(other, [*trail, name])
            done.add(name)

    for name in imports:
        visit(name, [])


@pytest.mark.parametrize("path", sorted((ROOT / "kernels").rglob("*.py")), ids=lambda path: path.name)
def test_kernels_import_torch_and_triton_alone(path):
    used = {full.split(".")[0] for full in imports_of(path)}
    assert not used & {"foundry_moe", "composer", "llmfoundry", "transformers", "omegaconf"}
