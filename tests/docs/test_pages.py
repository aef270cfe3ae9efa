"""The YAML of every page is what its reader accepts, and every `foundry-moe` command on a page parses."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any

import pytest
import yaml

from foundry_moe.checkpoint.settings import checkpoint_config
from foundry_moe.cli import parse
from foundry_moe.config import MeshConfig, MoEConfig
from foundry_moe.schema import from_mapping
from tests.helpers.demo import ROOT
from tests.helpers.pages import blocks

pytestmark = pytest.mark.quick

PAGES = sorted(str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md"))


def mappings(value: Any, place: str = "") -> list[tuple[str, Mapping[str, Any]]]:
    """All mappings inside a YAML, with their last key."""
    if not isinstance(value, Mapping):
        return []
    return [(place, value), *(found for key, inner in value.items() for found in mappings(inner, str(key)))]


@pytest.mark.parametrize("page", PAGES)
def test_yaml_of_a_page_is_accepted(page: str) -> None:
    for block in blocks(page, "yaml"):
        for place, keys in mappings(yaml.safe_load(block)):
            if place in ("moe", "dmoe"):
                from_mapping(MoEConfig, {"num_experts": 64, **keys}, place)
            elif place == "mesh":
                from_mapping(MeshConfig, keys, place)
            elif place == "elastic_checkpoint":
                checkpoint_config({"folder": "runs/x", **keys})


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_a_page_parse(page: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    for block in re.findall(r"^```(?:bash)?\n(.*?)^```", text, re.M | re.S):
        for line in block.replace("\\\n", " ").splitlines():
            command = line.partition("   #")[0].strip()
            if command.startswith("foundry-moe ") and "[" not in command:
                words = shlex.split(command, comments=True)[1:]
                if "--help" not in words:
                    assert parse(words).run
