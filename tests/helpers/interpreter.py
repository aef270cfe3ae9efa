"""Triton's interpreter in half its time: what it does again for each operation is done once.

usage: python -m tests.helpers.interpreter PROGRAM.py [ARGUMENT ...]
"""

from __future__ import annotations

import functools
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def hurry() -> None:
    """Makes the interpreter of Triton 3.6 search `triton.language` once per launch, and name types when asked.

    It searches every member for what to patch at each call of a device function, and names the type of each shape: half
    the time of tests/ops/test_mixed_widths.py. No other Triton is changed, nor kernels that are compiled.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    import triton  # which reads the variable when it is imported
    import triton.language as tl
    from triton.runtime import interpreter

    if not triton.__version__.startswith("3.6."):
        return
    launch, patch = interpreter.GridExecutor.__call__, interpreter._patch_lang
    patched: set[bool] = set()  # in this launch

    @functools.cache
    def modules(fn: Any) -> frozenset[bool]:
        """What is patched for a function: True is `tl`, False `tl.core`."""
        return frozenset(value is tl for value in fn.__globals__.values() if value is tl or value is tl.core)

    def new_launch(self: Any, *arguments: Any, **constants: Any) -> None:
        patched.clear()
        launch(self, *arguments, **constants)

    def patch_new(fn: Any) -> Any:
        if modules(fn) and modules(fn) <= patched:
            return None  # a launch's own call, whose result restores what was patched, is its first
        patched.update(modules(fn))
        return patch(fn)

    def tuple_type(self: Any, types: Sequence[Any], fields: Sequence[str] | None = None) -> None:
        self.types, self.fields = types, fields or [""] * len(types)

    def name(self: Any) -> str:
        return "[" + ",".join(f"{k}:{v}" for k, v in zip(self.fields, self.types, strict=False)) + "]"

    interpreter.GridExecutor.__call__ = new_launch
    interpreter._patch_lang = patch_new
    tl.core.tuple_type.__init__ = tuple_type
    tl.core.tuple_type.name = property(name)


if __name__ == "__main__":
    hurry()
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).parent.resolve())
    runpy.run_path(sys.argv[0], run_name="__main__")
