"""The generated pages of the reference name every key, command and public name."""

from __future__ import annotations

import re

import pytest

import foundry_moe
from scripts.reference_pages import (
    CONFIGURATION,
    TABLES,
    commands_page,
    keys_of,
    notebook_page,
    python_page,
    texts_of,
    with_tables,
)

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("cls", [cls for table in TABLES.values() for cls in table.values()])
def test_every_key_has_an_explanation(cls):
    texts = texts_of(cls)
    assert [key for key in keys_of(cls) if not texts.get(key)] == []


def test_the_tables_of_keys_are_those_of_the_code():
    page = CONFIGURATION.read_text()
    assert set(re.findall(r"<!-- keys of (\w+)", page)) == set(TABLES)
    assert page == with_tables(page), "run: python -m scripts.reference_pages"


def test_every_command_and_public_name_is_there():
    commands = commands_page()
    for command in ("check", "train", "verify", "plan", "loads", "export", "checkpoints ls", "checkpoints import"):
        assert f"\n## foundry-moe {command}\n" in commands
    assert all(f".{name}\n" in python_page() for name in foundry_moe._PUBLIC)


def test_the_notebook_is_a_page_of_text_and_code():
    page = notebook_page()
    assert page.startswith("# From a dense model to experts\n") and "\n\n## Loss and load\n\n" in page
    assert page.count("```python\n") == page.count("\n```\n") == 6 and "`examples/dense_to_experts.ipynb`" in page


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("DMoE", ["DMoE(config: MoEConfig)", "DMoE(", "    *,", "    num_experts: int,", "    top_k: int = 2,"]),
        ("ElasticCheckpoint", ["ElasticCheckpoint(", "    folder: str,", "    *,", "    interval: str = '30m',"]),
    ],
)
def test_a_class_that_takes_keys_is_shown_with_each_of_them(name, shown):
    part = python_page().split(f"## {name}\n")[1].partition("\n## ")[0]
    assert part.lstrip().startswith("\n".join(["```python", *shown])) and "      show_signature: false" in part
