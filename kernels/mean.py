"""The mean over a few ranks of what each has sent, summed in fp32.

Beside a backward pass on an H200 it takes half the time of `torch.mean` (two ranks, bf16).
Shapes: P ranks, N numbers of each.
"""

from __future__ import annotations

import triton
import triton.language as tl
from foundry_moe_kernels.launch import cdiv, divisor, launch, multiple
from torch import Tensor

BLOCK = 2048


@triton.jit(do_not_specialize=["rest"])
def _mean_kernel(first_ptr, rest_ptr, out_ptr, numel, rest, factor, ALIGN: tl.constexpr, BLOCK: tl.constexpr):
    numel = multiple(numel, ALIGN)
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < numel
    total = tl.load(first_ptr + i, mask=inside).to(tl.float32)
    for p in range(rest):
        row = (tl.zeros((), tl.int64) + p) * numel
        total += tl.load(rest_ptr + row + i, mask=inside).to(tl.float32)
    tl.store(out_ptr + i, total * factor, mask=inside)


def mean(first_N: Tensor, rest_PN: Tensor, out_N: Tensor) -> None:
    """Writes the mean of `first_N` and of the other ranks' numbers, one rank's after another's."""
    numel, rest = out_N.numel(), rest_PN.numel() // max(out_N.numel(), 1)
    launch(
        _mean_kernel, (cdiv(numel, BLOCK),),
        first_N, rest_PN, out_N, numel, rest, 1 / (1 + rest), ALIGN=divisor(numel), BLOCK=BLOCK,
    )  # fmt: skip
