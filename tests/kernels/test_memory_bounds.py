"""Nothing past an operand's end is read: behind it lies memory that no process may touch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = """
import ctypes, mmap, torch
from foundry_moe_kernels import products
from foundry_moe_kernels.sparse_tiles import SparseTile
from tests.helpers.kernel_twins import build_topology

def at_the_end_of_memory(*shape):
    size, numel = 4 * mmap.PAGESIZE, torch.Size(shape).numel()
    memory = mmap.mmap(-1, size + mmap.PAGESIZE)
    behind = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + size
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(behind), mmap.PAGESIZE, 0) == 0
    return torch.frombuffer(memory, dtype=torch.float32, offset=size - 4 * numel, count=numel).view(shape).normal_()

for widths in ([48, 48], [16, 48]):
    topology = build_topology(torch.tensor([5, 3]), 8, widths, 32)
    a, b = torch.randn(8, 16), at_the_end_of_memory(sum(widths), 16)
    products.sdd(a, b, topology, trans_b=True, tile=SparseTile(bn=16, bk=16))
"""


@pytest.mark.quick
def test_a_tile_of_sdd_past_the_last_expert_reads_nothing():
    """Of a block of 32 columns that a width of 48 fills by half, a tile of 16 columns has nothing to compute."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, env=environment, check=True)
