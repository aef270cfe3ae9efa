"""The generated pages of the reference name every key, command and public name."""

from __future__ import annotations

import pytest

import foundry_moe
from scripts.reference_pages import SECTIONS, commands_page, keys_of, keys_page, python_page, texts_of

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("title", SECTIONS)
def test_every_key_has_a_default_and_an_explanation(title):
    section = keys_page().split(f"## `{title}`")[1].split("\n## ")[0]
    keys, texts = keys_of(SECTIONS[title]), texts_of(SECTIONS[title])
    assert [row.split("`")[1] for row in section.splitlines() if row.startswith("| `")] == list(keys)
    assert [key for key in keys if not texts.get(key)] == []


def test_every_command_and_public_name_is_there():
    commands = commands_page()
    for command in ("check", "train", "verify", "plan", "loads", "export", "checkpoints ls", "checkpoints import"):
        assert f"\n## foundry-moe {command}\n" in commands
    assert all(f".{name}\n" in python_page() for name in foundry_moe._PUBLIC)
