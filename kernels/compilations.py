"""Which Triton kernels are compiled or loaded in this process, for whoever must know that none is any more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton.runtime.jit


def on_compilation(call: Callable[[str], None]) -> None:
    """Calls `call` whenever a kernel is compiled, or loaded from Triton's cache, with its name and constants.

    What it raises reaches whoever launched the kernel. The last call given counts.
    """

    def hook(*, fn: Any, compile: dict[str, Any], **_: Any) -> None:
        names = fn.jit_function.arg_names
        constants = {names[place[0]]: value for place, value in compile["constants"].items() if len(place) == 1}
        call(f"{fn.name}({', '.join(f'{name}={value}' for name, value in constants.items())})")

    knobs = getattr(triton, "knobs", None)
    if knobs is not None:
        knobs.runtime.jit_post_compile_hook = hook
    else:  # Triton 3.3
        triton.runtime.jit.JITFunction.compiled_hook = staticmethod(hook)
