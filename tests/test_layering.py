"""Who may import whom: the order of the packages is part of the design.

kernels <- ops <- layers <- models <- algorithms, commands. `parallel` works on modules from outside, `checkpoint` knows
no trainer, and `integrations` sits on both, `ops` and `layers`. No import runs back up, and there is no circle.
"""

import ast
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "foundry_moe"

TRAINERS = {"composer", "llmfoundry"}
# Only these folders, and files at the top of the package, may import Composer or LLM Foundry.
MAY_IMPORT_TRAINERS = {
    *("models", "algorithms", "callbacks", "launch", "commands"),
    *("optim", "registry", "train"),
}

CORE = {"config", "schema", "times", "flops", "ops", "layers"}
LIBRARY = CORE | {"models", "parallel", "checkpoint"}
# A folder, or a file at the top of the package -> what it may import beside itself.
MAY_IMPORT = {
    "schema": set(),
    "times": set(),
    "config": {"schema"},
    "flops": set(),
    "ops": {"config", "schema"},
    "sparse": {"ops"},
    "layers": CORE,
    "parallel": {"config", "schema", "ops", "layers"},
    "checkpoint": {"config", "schema"},
    "certify": {"schema"},
    "integrations": CORE | {"parallel", "checkpoint"},
    "models": CORE | {"checkpoint"},
    "algorithms": LIBRARY | {"optim"},
    "loads": {"schema"},
    "launch": LIBRARY | {"optim"},
    "callbacks": LIBRARY | {"launch", "loads", "__init__"},
    "commands": LIBRARY | {"launch", "loads", "train", "certify", "__init__"},
    "counts": {"schema", "flops", "layers", "commands"},
    "optim": {"schema", "layers", "parallel"},
    "registry": LIBRARY | {"algorithms", "callbacks", "optim"},
    "train": LIBRARY | {"callbacks", "launch", "commands"},
    "cli": {"commands", "launch", "schema", "__init__"},
    "__init__": LIBRARY | {"algorithms", "callbacks"},
}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    """`layers.moe` for foundry_moe/layers/moe.py, `layers` for its __init__.py."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def imports_of(path: Path) -> set[str]:
    """Dotted names of all imports of a file, inside functions too, without those under TYPE_CHECKING."""
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
    # `from foundry_moe.ops import plan_permute` imports the package's `__init__`
    return {name if name in known else name.rpartition(".")[0] or "__init__" for name in ours} - {name_of(path)}


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_only_these_parts_import_a_trainer(path):
    if name_of(path).split(".")[0] not in MAY_IMPORT_TRAINERS:
        assert not {full.split(".")[0] for full in imports_of(path)} & TRAINERS


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_parts_import_downwards_only(path):
    part = name_of(path).split(".")[0]
    used = {full.split(".")[0] for full in own_imports(path)}
    assert used - {part} <= MAY_IMPORT[part]


def test_no_imports_form_a_circle():
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
