"""Pages of the reference that are generated from the code: every YAML key, every command, the Python API."""

from __future__ import annotations

import argparse
import inspect
import os
import re
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

import foundry_moe
from foundry_moe.callbacks.expert_load import ExpertLoad
from foundry_moe.callbacks.run_report import RunReport
from foundry_moe.cli import build_parser
from foundry_moe.config import LoRAConfig, MeshConfig, MoEConfig
from foundry_moe.launch.checkpoint_settings import CheckpointConfig
from foundry_moe.layers.gates.keys import BUILT_IN
from foundry_moe.schema import yaml_value

SECTIONS: dict[str, type] = {
    "model.moe, algorithms.dmoe": MoEConfig,
    "mesh (of these), algorithms.dmoe_mesh": MeshConfig,
    "lora (of the first)": LoRAConfig,
    **{f"gate: {{name: {name}}}": keys for name, (_, keys) in BUILT_IN.items()},
    "callbacks.elastic_checkpoint": CheckpointConfig,
    "callbacks.expert_load": ExpertLoad,
    "callbacks.run_report": RunReport,
}
# methods for a user's own loop; the others are called by Composer, torch or the layers
METHODS = {"BatchContext": ["observe", "set_tokens", "track_scale"], "Reader": ["steps"]}
KEYS: dict[str, type] = {"DMoE": MoEConfig, "ElasticCheckpoint": CheckpointConfig}
_KEY = re.compile(r"^(\w+(?:, \w+)*): ")


def keys_of(cls: type) -> dict[str, Any]:
    """The keys of a config class, or of a callback, and their defaults; MISSING = required."""
    if is_dataclass(cls):
        return {
            item.name: item.default if item.default_factory is MISSING else item.default_factory()
            for item in fields(cls)
            if item.init
        }
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
    return {
        parameter.name: MISSING if parameter.default is parameter.empty else parameter.default
        for parameter in parameters
        if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    }


def texts_of(cls: type) -> dict[str, str]:
    """The explanations of keys in the docstrings of a class and its bases."""
    texts: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        names: list[str] = []
        indent = 0
        for line in inspect.cleandoc(base.__dict__.get("__doc__") or "").splitlines():
            depth = len(line) - len(line.lstrip())
            if found := _KEY.match(line.strip()):
                names, indent = found.group(1).split(", "), depth
                texts.update({name: line.strip()[found.end() :] for name in names})
            elif names and depth > indent:
                texts.update({name: f"{texts[name]} {line.strip()}" for name in names})
            else:
                names = []
    return texts


def keys_page() -> str:
    """Tables of all keys of this package."""
    lines = [
        "# YAML keys",
        "",
        "Generated from the classes that read them. [Configuration](configuration.md) explains their use.",
    ]
    for title, cls in SECTIONS.items():
        keys, texts = keys_of(cls), texts_of(cls)
        lines += ["", f"## `{title}`", ""]
        if not keys:
            lines.append("No keys.")
            continue
        lines += ["| key | default | meaning |", "|---|---|---|"]
        for key, default in keys.items():
            default = list(default) if isinstance(default, tuple) else default
            shown = "required" if default is MISSING else f"`{yaml_value(default)}`"
            lines.append(f"| `{key}` | {shown} | {texts.get(key, '').replace('|', chr(92) + '|')} |")
    return "\n".join(lines) + "\n"


def _parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """The parser's commands, and theirs, in order."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield inner
                yield from _parsers(inner)


def commands_page() -> str:
    """The help of each command."""
    os.environ["COLUMNS"] = "110"
    lines = ["# Commands", "", "Generated from the parsers: `foundry-moe COMMAND --help`."]
    for parser in _parsers(build_parser("checkpoints")):
        lines += ["", f"## {parser.prog}", "", "```", parser.format_help().rstrip(), "```"]
    return "\n".join(lines) + "\n"


def python_page() -> str:
    """Directives of mkdocstrings for the public names of the package."""
    lines = [
        "# Python",
        "",
        "Names that `foundry_moe` exports. [In plain PyTorch](../how-to/plain_pytorch.md) uses them.",
    ]
    for name, module in foundry_moe._PUBLIC.items():
        lines += ["", f"## {name}", "", f"::: {module}.{name}"]
        if isinstance(getattr(foundry_moe, name), type):
            methods = METHODS.get(name, [])
            lines += ["    options:", f"      members: {methods or 'false'}"]
        if keys := KEYS.get(name):
            lines += ["", f"Keyword arguments are the attributes of `{keys.__name__}`:"]
            if keys.__name__ in foundry_moe._PUBLIC:
                lines[-1] = f"Keyword arguments are the attributes of [{keys.__name__}](#{keys.__name__.lower()})."
            else:
                lines += ["", f"::: {keys.__module__}.{keys.__name__}", "    options:", "      members: false"]
    return "\n".join(lines) + "\n"


PAGES = {"reference/keys.md": keys_page, "reference/commands.md": commands_page, "reference/python.md": python_page}
