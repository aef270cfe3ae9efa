"""Every kernel compiles for the chips that users have, without one, and fits their limits."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import triton
from foundry_moe_kernels.descriptors import products_compile
from foundry_moe_kernels.sparse_tiles import SHARED_BYTES

from tests.helpers.compiling import Compiled, compile_for, misfits
from tests.helpers.every_kernel import TF32_CHIPS, kernel_names

VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
CHIPS = [chip for chip in sorted(SHARED_BYTES) if products_compile((chip // 10, chip % 10))]
if VERSION != (3, 6):  # the modern stack compiles for all; here sm_86 stands for sm_89, which has its tiles
    CHIPS.remove(89)


# Bytes a thread that may be on the stack though there are 255 registers: of products with an activation in their
# epilogue, once per tile, and of the gate's logits, which take fp32 weights apart; of others a few values
SPILLED = {("sparse_kernels.rows_kernel", True): 512, ("gate_logits._logits_kernel", False): 160}
FEW = 32

WITHOUT_WIDTHS = {"finite._nonfinite_kernel"}  # reads bytes
# What computes experts of any widths, and moves 16 bytes at a time where 8 divides them
PRODUCTS = {"sparse_kernels.rows_kernel", "sparse_kernels.inner_kernel", "pointwise._values_backward_kernel"}
ANY_TOPOLOGY = {"block_products.sdd_kernel", "block_products.dsd_kernel"}


def spilled(kernel: Compiled) -> int:
    if kernel.tf32 and kernel.name == "sparse_kernels.rows_kernel" and not kernel.activation:
        return 128  # on sm_120; on sm_80 with other Tritons than 3.6
    if kernel.name == "gate_logits._logits_kernel" and VERSION < (3, 4):
        return 176  # fp32 weights on sm_86 and sm_89: 168
    if kernel.name == "gate_logits._input_gradient_kernel" and VERSION != (3, 6):
        return 64  # fp32 weights on sm_90 and sm_120
    return SPILLED.get((kernel.name, kernel.activation), FEW)


def compile_all(script: str, chips: list[int]) -> dict[int, list[Compiled]]:
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        compiled = pool.map(lambda chip: compile_for(chip, script.replace("{chip}", str(chip))), chips)
        return dict(zip(chips, compiled, strict=True))


@pytest.mark.timeout(1200)
def test_every_kernel_compiles_and_fits_every_chip():
    compiled = compile_all("from tests.helpers import every_kernel; every_kernel.launch_all({chip})", CHIPS)
    for chip, kernels in compiled.items():
        assert {kernel.name for kernel in kernels} == kernel_names(chip)
        assert any(kernel.tf32 for kernel in kernels) == (chip in TF32_CHIPS)
        assert not [kernel for kernel in kernels if kernel.name in PRODUCTS | ANY_TOPOLOGY and kernel.narrow]
    assert not [line for chip, kernels in compiled.items() for line in misfits(kernels, chip, spilled)]


@pytest.mark.timeout(600)
def test_widths_that_8_divides_are_moved_16_bytes_at_a_time():
    """The count that the first test holds to zero, of widths that neither a tile nor 16 divides; of odd ones it is not.

    Element by element a layer of such widths took eight times as long as a dense one (H200).
    """
    script = "import torch\nfrom tests.helpers import every_kernel as k\nk.pretend(80)\n{launch}"
    layer = "k.D, k.F = 520, 1000\nk.launch_products(torch.bfloat16)\nk.launch_experts(torch.bfloat16)"
    kernels = [kernel for kernel in compile_for(80, script.format(launch=layer)) if kernel.name not in WITHOUT_WIDTHS]
    assert {"permute._unpermute_kernel", "pointwise._activation_backward_kernel", "sparse_kernels.inner_kernel"} <= {
        kernel.name for kernel in kernels
    }
    assert not [kernel for kernel in kernels if kernel.narrow]
    mixed = "k.launch_mixed_widths(torch.bfloat16, (k.F, {width}))"
    for width in (504, 501):
        kernels = compile_for(80, script.format(launch=mixed.format(width=width)))
        products = [kernel for kernel in kernels if kernel.name in PRODUCTS]
        assert {kernel.name for kernel in products} == PRODUCTS
        assert all(bool(kernel.narrow) == (width == 501) for kernel in products)


@pytest.mark.timeout(600)
def test_rounds_of_any_tokens_share_their_kernels():
    """Four H200s compiled them anew in later steps, when rounds had other numbers of tokens (OLMoE-1B-7B)."""
    script = """
import torch
from foundry_moe_kernels import dispatch_plan, permute
for tokens in (1, 16, 63, 64, 1000, 4096, 40000):
    for first in (0, 1):
        experts_TK = torch.zeros(first + tokens, 2, dtype=torch.int64)[first:]
        weights_TK = torch.zeros(first + tokens, 2)[first:]
        counts = dispatch_plan.count_rows(experts_TK, 4, 4)
        row_TC, _ = dispatch_plan.assign_rows(experts_TK, weights_TK, 4, *counts)
        x_SD = permute.permute(torch.zeros(first + tokens, 64)[first:], row_TC, None, tokens + 1)
        permute.unpermute(x_SD, None, row_TC)
"""
    kernels = compile_for(90, script)
    assert len(kernels) == 4 * 14 and len({kernel.binary for kernel in kernels}) == 4


@pytest.mark.quick
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"shared": 99 * 1024 + 16}, "101392 bytes of shared memory, of 101376"),
        ({"registers": 200, "threads": 512}, "200 registers in each of 512 threads"),
        ({"stack": 40}, "40 bytes of stack"),
        ({"activation": True, "stack": 520}, "520 bytes of stack"),
        ({"tf32": True, "stack": 136}, "136 bytes of stack"),
    ],
)
def test_a_kernel_beyond_a_limit_is_told(change, words):
    fits = Compiled(
        name="sparse_kernels.rows_kernel", activation=False, shared=99 * 1024, registers=255, threads=256, stack=0,
        hopper_products=0, tf32=False, narrow=0,
    )  # fmt: skip
    assert not misfits([fits, replace(fits, activation=True, stack=512)], 89, spilled)
    (line,) = misfits([replace(fits, **change)], 89, spilled)
    assert words in line
