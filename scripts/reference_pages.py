"""Generated pages: tables of YAML keys, every command, the Python API, and the notebook.

`python -m scripts.reference_pages` writes the tables into docs/reference/configuration.md; the site has the others.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import re
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any

import yaml

import foundry_moe
from foundry_moe.callbacks.expert_load import ExpertLoad
from foundry_moe.callbacks.run_report import RunReport
from foundry_moe.cli import build_parser
from foundry_moe.config import LoRAConfig, MeshConfig, MoEConfig
from foundry_moe.launch.checkpoint_settings import CheckpointConfig
from foundry_moe.layers.gates.keys import BUILT_IN

# classes with the keys of a table in docs/reference/configuration.md; `gates` has those of all built-in ones
TABLES: dict[str, dict[str, type]] = {
    "moe": {"": MoEConfig},
    "mesh": {"": MeshConfig},
    "lora": {"": LoRAConfig},
    "gates": {name: keys for name, (_, keys) in BUILT_IN.items()},
    "elastic_checkpoint": {"": CheckpointConfig},
    "expert_load": {"": ExpertLoad},
    "run_report": {"": RunReport},
}
ROOT = Path(__file__).parents[1]
CONFIGURATION = ROOT / "docs" / "reference" / "configuration.md"
NOTEBOOK = ROOT / "examples" / "dense_to_experts.ipynb"
_TABLE = re.compile(r"(<!-- keys of (\w+), by scripts/reference_pages.py -->\n\n)(?:\|.*\n)*")
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


def key_table(name: str) -> str:
    """The table of one entry of `TABLES`."""
    groups = TABLES[name]
    of = "gate | " if len(groups) > 1 else ""
    lines = [f"| {of}key | default | meaning |", f"|{'---|' * (4 if of else 3)}"]
    for group, cls in groups.items():
        texts = texts_of(cls)
        for key, default in keys_of(cls).items():
            cells = [f"`{group}`"] if of else []
            cells += [f"`{'async' if key == 'asynchronous' else key}`", _shown(default), texts.get(key, "")]
            lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines) + "\n"


def _shown(default: Any) -> str:
    if default is MISSING:
        return "required"
    default = list(default) if isinstance(default, tuple) else default
    text = yaml.safe_dump(default, default_flow_style=True, sort_keys=False).removesuffix("...\n").strip()
    return "" if default == "" else f"`{text}`"


def with_tables(page: str) -> str:
    """The page with each table of keys made anew."""
    return _TABLE.sub(lambda found: found[1] + key_table(found[2]), page)


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
    for parser in _parsers(build_parser()):
        lines += ["", f"## {parser.prog}", "", "```", parser.format_help().rstrip(), "```"]
    return "\n".join(lines) + "\n"


def signature(name: str, config: type) -> list[str]:
    """The call of a class that takes the keys of a config class, a line for each."""
    lines, defaults = [f"{name}("], keys_of(config)
    for item in fields(config):
        if item.kw_only and "    *," not in lines:
            lines.append("    *,")
        default = "" if defaults[item.name] is MISSING else f" = {defaults[item.name]!r}"
        lines.append(f"    {item.name}: {item.type}{default},")
    return [*lines, ")"]


def python_page() -> str:
    """Directives of mkdocstrings for the public names of the package."""
    lines = [
        "# Python",
        "",
        "Names that `foundry_moe` exports. [In plain PyTorch](../how-to/plain_pytorch.md) uses them.",
    ]
    for name, module in foundry_moe._PUBLIC.items():
        lines += ["", f"## {name}", ""]
        keys = KEYS.get(name)
        if keys:  # in place of the signature of mkdocstrings, which would show `**keys`
            own = [f"{name}(config: MoEConfig)"] if keys is MoEConfig else []
            lines += ["```python", *own, *signature(name, keys), "```", ""]
        lines += [f"::: {module}.{name}"]
        if isinstance(getattr(foundry_moe, name), type):
            methods = METHODS.get(name, [])
            lines += ["    options:", f"      members: {methods or 'false'}"]
        if keys:
            lines += ["      show_signature: false", "      show_root_heading: false"]
            lines += ["", f"Keyword arguments are the attributes of `{keys.__name__}`:"]
            if keys.__name__ in foundry_moe._PUBLIC:
                lines[-1] = f"Keyword arguments are the attributes of [{keys.__name__}](#{keys.__name__.lower()})."
            else:
                lines += ["", f"::: {keys.__module__}.{keys.__name__}", "    options:", "      members: false"]
    return "\n".join(lines) + "\n"


def notebook_page() -> str:
    """The cells of the notebook; CI runs it, without keeping its outputs."""
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    texts = {"markdown": "{}", "code": "```python\n{}\n```"}
    shown = [texts[cell["cell_type"]].format("".join(cell["source"])) for cell in cells]
    return "\n\n".join([shown[0], f"The notebook is `{NOTEBOOK.relative_to(ROOT)}`.", *shown[1:]]) + "\n"


PAGES = {
    "reference/commands.md": commands_page,
    "reference/python.md": python_page,
    "tutorials/notebook.md": notebook_page,
}


if __name__ == "__main__":
    CONFIGURATION.write_text(with_tables(CONFIGURATION.read_text()))
