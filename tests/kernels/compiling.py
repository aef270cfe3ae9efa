"""Compiles kernels for a GPU that is not here, in a process of its own: the tests' own process interprets them."""

import os
import subprocess
import sys

DRIVER = """
import triton
from triton.backends.compiler import GPUTarget


class Driver:
    get_current_target = staticmethod(lambda: GPUTarget("cuda", {capability}, 32))
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)


triton.runtime.driver.set_active(Driver())
"""


def run_for(capability: int, script: str) -> list[str]:
    """The lines that a script prints for which Triton's device has this capability (90: Hopper); it can't launch."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["FOUNDRY_MOE_DIRECT_LAUNCH"] = "0"  # asks for no device
    words = [sys.executable, "-c", DRIVER.format(capability=capability) + script]
    result = subprocess.run(words, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout.splitlines()
