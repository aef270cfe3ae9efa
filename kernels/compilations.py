"""Which Triton kernels are compiled or loaded in this process, for whoever must know that none is any more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton.runtime.jit


def on_compilation(call: Callable[[str], None]) -> None:
    """Calls `call` with a kernel's name whenever one is compiled, or loaded from Triton's cache, for new arguments.

    What it raises reaches whoever launched the kernel. The last call given counts.
    """

    def hook(*, fn: Any, **_: Any) -> None:
        call(fn.name)

    knobs = getattr(triton, "knobs", None)
    if knobs is not None:
        knobs.runtime.jit_post_compile_hook = hook
    else:  # Triton 3.3
        triton.runtime.jit.JITFunction.compiled_hook = staticmethod(hook)
