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
