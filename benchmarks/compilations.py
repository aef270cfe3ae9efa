"""Reports each compilation of a kernel or of a graph: benchmarks and tests show with it that no later step compiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton.runtime.jit


def on_compilation(call: Callable[[str], None]) -> None:
    """Calls `call` whenever a kernel is compiled, or loaded from Triton's cache, with its name and constants.

    An exception that it raises reaches the caller of the kernel. A later `on_compilation` replaces an earlier one.
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


def on_graph_compilation(call: Callable[[str], None]) -> None:
    """Calls `call` whenever `torch.compile` compiles a graph, or at its first use a backward pass, with its number."""
    from torch._dynamo.callback import callback_handler

    callback_handler.register_start_callback(lambda *args: call(str(args[0].compile_id) if args else "a graph"))
