"""The generated pages of the reference name every key, command and public name."""

from __future__ import annotations

import re

import pytest

import foundry_moe
from scripts.reference_pages import CONFIGURATION, TABLES, commands_page, keys_of, python_page, texts_of, with_tables

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
