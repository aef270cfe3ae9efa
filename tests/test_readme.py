"""The README is true: its tables name every key there is, and no other."""

import re
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from foundry_moe.config import ACTIVATIONS, MeshConfig, MoEConfig, from_mapping

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def keys_of_table(header: str) -> list[str]:
    """First column of the table that begins with this header."""
    lines = README[README.index(header) :].splitlines()[2:]
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append(re.findall(r"`([a-z0-9_]+)`", line.split("|")[1])[0])
    return rows


@pytest.mark.parametrize(
    ("header", "config"), [("| key | default | |", MoEConfig), ("| key of `mesh` | default | |", MeshConfig)]
)
def test_the_tables_name_every_key(header, config):
    assert keys_of_table(header) == [field.name for field in fields(config)]


def test_every_activation_is_named():
    row = next(line for line in README.splitlines() if line.startswith("| `activation`"))
    assert set(row.split("`")[3].split()) == set(ACTIVATIONS)


def test_the_yaml_to_copy_is_accepted():
    blocks = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", README, re.S)]
    assert from_mapping(MoEConfig, blocks[0]["model"]["moe"], "model.moe").num_experts == 64
    assert from_mapping(MoEConfig, blocks[1]["algorithms"]["dmoe"], "algorithms.dmoe").init == "upcycle"


def test_the_tree_names_files_that_exist():
    tree = README[README.index("## The tree") : README.index("## Status")]
    folder = ROOT
    for line in tree.splitlines():
        head = line.split("  ")[0] if not line.startswith("  ") else line.strip().split(" ")[0]
        if head.endswith("/") and "  " not in head.strip():
            folder = ROOT / head if not line.startswith("  ") else ROOT / "foundry_moe" / head
            assert folder.is_dir(), head
        for name in re.findall(r"\b([a-z0-9_]+\.py)\b", line):
            places = (folder / name, ROOT / "foundry_moe" / name)
            assert any(place.exists() for place in places), f"{name} in {folder}"


def test_the_python_versions_are_those_of_the_package_and_its_environment():
    low, above = re.search(r'python_requires=">=3\.(\d+),<3\.(\d+)"', (ROOT / "setup.py").read_text()).groups()
    words = f"3.{low} to 3.{int(above) - 1}"
    assert README.count(f"Python {words}") == 1 and README.count(f"| {words} |") == 2
    tried = re.search(r"for minor in ([\d ]+);", (ROOT / "scripts/make_env.sh").read_text()).group(1)
    assert tried.split() == [str(minor) for minor in reversed(range(int(low), int(above)))], "the newest first"
