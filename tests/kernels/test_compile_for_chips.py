"""Every kernel compiles for the chips that users have, without one, and fits their limits."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import triton
from foundry_moe_kernels.sparse_tiles import SHARED_BYTES

from tests.kernels.compiling import Compiled, compile_for, misfits
from tests.kernels.every_kernel import kernel_names

VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
# Triton before 3.4 ends in a pass of its own (an assertion of LLVM) on any product for sm_120
CHIPS = [chip for chip in sorted(SHARED_BYTES) if chip != 120 or VERSION >= (3, 4)]


def spilled(kernel: Compiled) -> int:
    """Bytes a thread that may leave the registers: in a product's epilogue with an activation, once a tile."""
    return 512 if kernel.name == "sparse_rows.rows_kernel" and kernel.activation else 0


def spilled_of_tf32(kernel: Compiled) -> int:
    rows = kernel.name == "sparse_rows.rows_kernel"
    return 128 if VERSION != (3, 6) and rows else spilled(kernel)  # on sm_80


def compile_all(script: str, chips: list[int]) -> dict[int, list[Compiled]]:
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        compiled = pool.map(lambda chip: compile_for(chip, script.replace("{chip}", str(chip))), chips)
        return dict(zip(chips, compiled, strict=True))


def test_every_kernel_compiles_and_fits_every_chip():
    compiled = compile_all("from tests.kernels import every_kernel; every_kernel.launch_all({chip})", CHIPS)
    for chip, kernels in compiled.items():
        assert {kernel.name for kernel in kernels} == kernel_names(chip)
    assert not [line for chip, kernels in compiled.items() for line in misfits(kernels, chip, spilled)]


def test_products_of_tf32_compile_and_fit():
    script = "from tests.kernels import every_kernel as e; import torch\ne.pretend({chip})\n"
    compiled = compile_all(script + "e.launch_products(torch.float32, tf32=True)", [80, 90])
    assert {len(kernels) for kernels in compiled.values()} == {len(compiled[80])}
    assert not [line for chip, kernels in compiled.items() for line in misfits(kernels, chip, spilled_of_tf32)]


@pytest.mark.quick
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"shared": 99 * 1024 + 16}, "101392 bytes of shared memory, of 101376"),
        ({"registers": 200, "threads": 512}, "200 registers in each of 512 threads"),
        ({"stack": 8}, "8 bytes of stack"),
        ({"activation": True, "stack": 520}, "520 bytes of stack"),
    ],
)
def test_a_kernel_beyond_a_limit_is_told(change, words):
    fits = Compiled(
        name="sparse_rows.rows_kernel", activation=False, shared=99 * 1024, registers=255, threads=256, stack=0,
        hopper_products=0,
    )  # fmt: skip
    assert not misfits([fits, replace(fits, activation=True, stack=512)], 89, spilled)
    (line,) = misfits([replace(fits, **change)], 89, spilled)
    assert words in line
