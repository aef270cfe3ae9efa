"""The messages that the troubleshooting page quotes are those of the code."""

from __future__ import annotations

import ast
import re

import pytest

from tests.helpers.demo import ROOT

pytestmark = pytest.mark.quick

PAGE = (ROOT / "docs" / "how-to" / "troubleshooting.md").read_text()
QUOTED = re.findall(r"^\| `([^`]+)` \| \S.* \| \S.* \|$", PAGE, re.M)


def texts_of(tree: ast.AST) -> set[str]:
    """The strings of a module, of which a parenthesised sum counts as one; values in them are `{}`."""
    return {text for node in ast.walk(tree) if (text := text_of(node))}


def text_of(node: ast.AST) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) or "{}" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left) + text_of(node.right)
    return ""


@pytest.fixture(scope="module")
def texts() -> str:
    modules = (ROOT / "foundry_moe").rglob("*.py")
    return "\n".join(text for path in modules for text in texts_of(ast.parse(path.read_text())))


def test_every_row_quotes_a_message() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| message")]
    assert len(QUOTED) == len(rows) > 20


@pytest.mark.parametrize("message", QUOTED)
def test_a_quoted_message_is_in_the_code(message: str, texts: str) -> None:
    assert re.search(".*".join(map(re.escape, message.split("..."))), texts), message
