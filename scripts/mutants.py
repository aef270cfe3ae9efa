"""Makes single edits in modules, runs the tests of each module on each edit, and lists the edits that no test noticed.

    python scripts/mutants.py foundry_moe/layers/losses.py --sample 20
    python scripts/mutants.py --edits edits.json    # [{"file": ..., "old": ..., "new": ..., "tests": [...]}, ...]

A module's tests are the files named after it, else those that import it. mutmut 3 and cosmic-ray 8 were considered, not
run: mutmut selects a mutant inside rewritten functions, whose source Triton and torch.compile read; cosmic-ray edits
the working tree and starts a Python process per mutant, whose imports (10 s) take longer than most of these tests.
Here the edit is in a copy of the tree with both import roots, which processes that tests start import too, and tests
run in a fork that has imported torch and Composer already.
"""

import argparse
import ast
import contextlib
import copy
import importlib.util
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.Add: ast.Sub, ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip
TEXT = ("log", "logger", "warnings")  # calls of these write messages


def is_text(node: ast.AST) -> bool:
    """Whether a node is a message, a docstring or an assertion, whose changes no test should notice."""
    if isinstance(node, ast.Assert | ast.JoinedStr):
        return True
    if not isinstance(node, ast.Expr):
        return False
    call = node.value.func if isinstance(node.value, ast.Call) else None
    is_message = isinstance(call, ast.Attribute) and isinstance(call.value, ast.Name) and call.value.id in TEXT
    return isinstance(node.value, ast.Constant) or is_message


def nodes(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that are computed at run time: no annotations, decorators or messages."""
    if is_text(node):
        return
    yield node
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list") or (isinstance(node, ast.Raise) and field == "exc"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from nodes(child)


def changed(node: ast.AST, **fields: object) -> ast.AST:
    other = copy.copy(node)
    for name, value in fields.items():
        setattr(other, name, value)
    return other


def variants(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Parts of a node, each with the text that replaces it."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in SWAPS:
        yield node, ast.unparse(changed(node, ops=[SWAPS[type(node.ops[0])]()]))
    elif isinstance(node, ast.BinOp) and type(node.op) in SWAPS and not isinstance(node.left, ast.Constant):
        yield node, ast.unparse(changed(node, op=SWAPS[type(node.op)]()))
    elif isinstance(node, ast.Constant) and type(node.value) in (bool, int, float):
        other = {bool: not node.value, int: node.value + 1, float: 2 * node.value + 1}[type(node.value)]
        yield node, repr(other)
        if type(node.value) is int:
            yield node, f"({node.value - 1})"
    elif isinstance(node, ast.BoolOp):
        for index in range(len(node.values)):
            kept = node.values[:index] + node.values[index + 1 :]
            yield node, ast.unparse(changed(node, values=kept) if len(kept) > 1 else kept[0])
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield node, f"({ast.unparse(node.operand)})"
    elif isinstance(node, ast.If | ast.IfExp | ast.While):
        yield node.test, f"(not ({ast.unparse(node.test)}))"
    elif isinstance(node, ast.Call):
        for keyword in node.keywords:
            if keyword.arg is not None:
                yield node, ast.unparse(changed(node, keywords=[k for k in node.keywords if k is not keyword]))
    elif isinstance(node, ast.Expr | ast.AugAssign | ast.Raise | ast.Delete | ast.Continue | ast.Break):
        yield node, "pass"


def edits_of(path: Path) -> list[dict]:
    source = path.read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = {}
    for node in nodes(ast.parse(source)):
        for part, text in variants(node):
            begin = starts[part.lineno - 1] + part.col_offset
            end = starts[part.end_lineno - 1] + part.end_col_offset
            found[begin, end, text] = {"at": (begin, end), "new": text, "line": part.lineno}
    return [found[key] for key in sorted(found)]


def tests_of(module: str) -> list[str]:
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    name, dotted = Path(module).stem, module.removesuffix(".py").replace("/", ".")
    chosen = [file for file in files if file.stem.startswith(f"test_{name}")]
    chosen = chosen or [file for file in files if f"{dotted} import" in file.read_text()]
    if not chosen:
        raise SystemExit(f"no test is named after {module} or imports it: give --tests")
    return [str(file.relative_to(ROOT)) for file in chosen]


def copy_tree(to: Path) -> None:
    listed = subprocess.check_output(["git", "ls-files", "-zco", "--exclude-standard"], cwd=ROOT, text=True)
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)
    (to / "foundry_moe_kernels").symlink_to("kernels")  # the second import root, before that of the installed package


def run_tests(tree: Path, tests: list[str], timeout_s: float) -> int | None:
    """Exit code of pytest in a fork, or None after `timeout_s`; its processes are ended with it."""
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.chdir(tree)
        with open("mutants.log", "wb") as out:
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
        sys.path[0] = os.environ["PYTHONPATH"] = str(tree)
        code = 99
        try:
            code = int(__import__("pytest").main(["-x", "-q", "--tb=line", "-p", "no:cacheprovider", *tests]))
        finally:
            os._exit(code)
    deadline = time.monotonic() + timeout_s
    status = None
    while status is None and time.monotonic() < deadline:
        done, raw = os.waitpid(pid, os.WNOHANG)
        status = os.waitstatus_to_exitcode(raw) if done else time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    if status is None:
        os.waitpid(pid, 0)
    return status


def run_edits(args: argparse.Namespace, tree: Path) -> tuple[list[str], int]:
    """Runs the tests of each edit in the copied tree: rows of the table, and how many edits no test noticed."""
    work: dict[tuple[str, str], list[dict]] = {}  # edits by module and tests
    for module in args.modules:
        edits = edits_of(tree / module)
        if args.sample and args.sample < len(edits):
            edits = random.Random(args.seed).sample(edits, args.sample)
        work[module, args.tests or " ".join(tests_of(module))] = sorted(edits, key=lambda edit: edit["line"])
    for edit in json.loads(args.edits.read_text()) if args.edits else []:
        source, old = (tree / edit["file"]).read_bytes(), edit["old"].encode()
        if source.count(old) != 1:
            raise SystemExit(f"{edit['file']} holds {edit['old']!r} {source.count(old)} times, not once")
        begin = source.index(old)
        edit |= {"at": (begin, begin + len(old)), "line": source[:begin].count(b"\n") + 1}
        tests = " ".join(edit.get("tests") or [args.tests or " ".join(tests_of(edit["file"]))])
        work.setdefault((edit["file"], tests), []).append(edit)

    import torch

    if not torch.cuda.is_available():  # as in tests/conftest.py, and before Composer imports Triton
        os.environ.setdefault("TRITON_INTERPRET", "1")
    import composer  # noqa: F401
    import llmfoundry  # noqa: F401  # forks share these imports

    assert not any(name.startswith("foundry_moe") for name in sys.modules), "forks would not import the edit"
    rows, survivors = [], 0
    for (module, tests), edits in work.items():
        code = run_tests(tree, tests.split(), 10 * args.timeout)
        if code != 0:
            print((tree / "mutants.log").read_text())
            raise SystemExit(f"{tests}: exit code {code} without an edit")
        path, passed = tree / module, 0
        source = path.read_bytes()
        compiled = Path(importlib.util.cache_from_source(str(path)))
        for edit in edits:
            begin, end = edit["at"]
            path.write_bytes(source[:begin] + edit["new"].encode() + source[end:])
            compiled.unlink(missing_ok=True)  # valid for any file of this size and second
            if run_tests(tree, tests.split(), args.timeout) == 0:
                passed += 1
                print(f"{module}:{edit['line']}: {source[begin:end].decode()} -> {edit['new']}", flush=True)
        path.write_bytes(source)
        compiled.unlink(missing_ok=True)
        rows.append(f"| {module} | {len(edits)} | {passed} |")
        print(rows[-1], flush=True)
        survivors += passed
    return rows, survivors


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", help="files, relative to the repository")
    parser.add_argument("--edits", type=Path, help="a JSON list of edits, instead of generated ones")
    parser.add_argument("--tests", help='arguments of pytest, as "tests/layers -m quick"')
    parser.add_argument("--sample", type=int, help="edits per module, drawn evenly; default: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=300, help="seconds per edit; longer counts as noticed")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy_tree(Path(folder))  # first: the working tree may change while imports and tests run
        rows, survivors = run_edits(args, Path(folder))
    print("| module | faults | survivors |", "|---|---|---|", *rows, sep="\n")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
