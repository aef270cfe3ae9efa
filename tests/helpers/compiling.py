"""Compiles kernels for a GPU that is not here, in a process of its own: the tests' own process interprets them."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from foundry_moe_kernels.sparse_tiles import SHARED_BYTES

ROOT = Path(__file__).parents[2]
# Of every capability here (CUDA programming guide, table of technical specifications)
REGISTERS_OF_THREAD, REGISTERS_OF_BLOCK = 255, 64 * 1024

DRIVER = """
import json, re, subprocess, tempfile
from pathlib import Path
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction


class Driver:
    get_current_target = staticmethod(lambda: GPUTarget("cuda", {capability}, 32))
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)


triton.runtime.driver.set_active(Driver())
run = JITFunction.run


def report(self, *args, grid, warmup, **options):
    kernel = run(self, *args, grid=grid, warmup=True, **options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    registers, stack, local = re.search(
        r"REG:(\\d+) STACK:(\\d+) .*LOCAL:(\\d+)", usage.stdout + usage.stderr
    ).groups()
    # registers at launch, and those that specialised warps may take
    bound = re.search(r"\\.reqntid (\\d+)|\\.maxntid (\\d+)", kernel.asm["ptx"])
    print(json.dumps({
        "binary": kernel.hash,
        "name": f"{self.fn.__module__.rpartition('.')[2]}.{self.fn.__name__}",
        "activation": bool(options.get("ACT")),
        "tf32": options.get("PRECISION") == "tf32",
        "shared": kernel.metadata.shared,
        "registers": int(registers),
        "threads": int(bound[1] or bound[2]),
        "stack": max(int(stack), int(local)),
        "hopper_products": kernel.asm["ptx"].count("wgmma.mma_async"),
        "narrow": len(re.findall(r"\\b(?:ld|st)\\.global(?:\\.(?!v)\\w+)*\\.[bus](?:8|16) ", kernel.asm["ptx"])),
    }))


JITFunction.run = report
"""


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """One compiled kernel: `module.function`, bytes of shared memory, registers and bytes of stack a thread.

    narrow: instructions that move one or two bytes from or to global memory.
    binary: equal for launches that share one compiled kernel.
    """

    name: str
    activation: bool
    tf32: bool
    shared: int
    registers: int
    threads: int
    stack: int
    hopper_products: int
    narrow: int
    binary: str = field(default="", compare=False)


def compile_for(capability: int, script: str) -> list[Compiled]:
    """What a script launches, for a chip of this capability (90: Hopper): it is compiled, and never runs."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["FOUNDRY_MOE_DIRECT_LAUNCH"] = "0"  # which needs a device
    words = [sys.executable, "-c", DRIVER.replace("{capability}", str(capability)) + script]
    result = subprocess.run(words, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert result.returncode == 0, result.stderr[-2000:]
    return [Compiled(**json.loads(line)) for line in result.stdout.splitlines()]


def misfits(kernels: list[Compiled], capability: int, spilled: Callable[[Compiled], int] = lambda _: 0) -> list[str]:
    """A sentence for each kernel that the chip would not launch, or that keeps in memory what registers should hold.

    Args:
        spilled: bytes that a thread of a kernel may have on its stack.
    """
    sentences = []
    for kernel in kernels:
        where, limit = f"sm_{capability}: {kernel.name}", SHARED_BYTES[capability]
        if kernel.shared > limit:
            sentences.append(f"{where} takes {kernel.shared} bytes of shared memory, of {limit}")
        if kernel.registers > REGISTERS_OF_THREAD or kernel.registers * kernel.threads > REGISTERS_OF_BLOCK:
            sentences.append(f"{where} takes {kernel.registers} registers in each of {kernel.threads} threads")
        if kernel.stack > spilled(kernel):
            sentences.append(f"{where}: {kernel.registers} registers, {kernel.stack} bytes of stack")
    return sentences
