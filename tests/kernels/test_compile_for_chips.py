"""Every kernel of the portable path compiles for the chips that users have, without one, and fits their limits."""

import pytest
import triton
from foundry_moe_kernels.sparse_tiles import SHARED_BYTES

from tests.kernels.compiling import run_for

OLD = tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 4)
# Bytes a thread that may leave the registers, 255 at most: in an epilogue with an activation, once a tile, and nowhere
# else
SPILLED = {"act": 512, "plain": 0}
SPILLED_OF_TF32 = {"act": 512, "plain": 64}  # Triton 3.3, rows on sm_80
COMPILE = """
import re, subprocess, tempfile
import torch
from pathlib import Path
from triton.runtime.jit import JITFunction
from foundry_moe_kernels import permute, pointwise, products, sparse_tiles, topology

capability = {capability}
sparse_tiles.shared_bytes = lambda device: sparse_tiles.SHARED_BYTES[capability]
sparse_tiles.capability = lambda device: capability
run = JITFunction.run


def report(self, *args, grid, warmup, **options):
    kernel = run(self, *args, grid=grid, warmup=True, **options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    registers, stack = re.search(r"REG:(\\d+) STACK:(\\d+)", usage.stdout + usage.stderr).groups()
    kind = "act" if options.get("ACT") else "plain"
    print(self.fn.__name__, kind, kernel.metadata.shared, registers, stack)


JITFunction.run = report
rows, d, f, experts, block = 1024, 512, 1024, 2, sparse_tiles.BLOCK
dtype = torch.{dtype}
offsets_E = torch.tensor([512, 1024], dtype=torch.int32)
t = topology.topology_from_offsets(offsets_E, rows, [f] * experts, block)
x, h, w1, v1, w2 = (
    torch.zeros(*shape, dtype=dtype) for shape in ((rows, d), (rows, f), (2, f, d), (2, f, d), (2, d, f))
)
source_R = torch.zeros(rows, dtype=torch.int32)
products.sdd_act(x, (w1, v1), t, "silu", source_R=source_R, choices=2)
products.sdd_act(x, (w1,), t, "gelu", source_R=source_R, choices=2)
products.dsd(h, w2, t, trans_b=True)
products.sdd(x, w2, t)
products.dsd((h, h.clone()), (w1, v1), t)
products.dsd(h, x, t, trans_s=True, stacked=True)
products.dds(x, h, t, trans_a=True, stacked=True)
uneven = topology.topology_from_offsets(offsets_E, rows, [f, f // 2], block)
products.sdd(x, torch.zeros(d, f + f // 2, dtype=dtype), uneven)
row_TK = torch.zeros(rows // 2, 2, dtype=torch.int32)
weights_TK = torch.zeros(rows // 2, 2)
permute.permute(x[:512], row_TK, offsets_E)
permute.unpermute(x, weights_TK, row_TK)
permute.gather_dots(torch.zeros(1, rows), row_TK, torch.float32)
pointwise.activation_backward_(h, torch.stack([h, h]), offsets_E, "silu", weights_TK, source_R)
topology.block_row_table(offsets_E, rows, block)
"""


def chips():
    """A compute capability each. Triton 3.3 fails in a pass of its own on products for sm_120."""
    broken = pytest.mark.skipif(OLD, reason="Triton before 3.4 does not compile products for sm_120")
    return [pytest.param(chip, marks=broken) if chip == 120 else chip for chip in sorted(SHARED_BYTES)]


@pytest.mark.parametrize("capability", chips())
def test_portable_kernels_compile_and_fit(capability):
    script = COMPILE.replace("{capability}", str(capability)).replace("{dtype}", "bfloat16")
    lines = [line.split() for line in run_for(capability, script)]
    names = {name for name, *_ in lines}
    assert {
        "rows_kernel",
        "inner_kernel",
        "_topology_kernel",
        "_permute_kernel",
        "_activation_backward_kernel",
    } <= names
    for name, kind, shared, registers, stack in lines:
        assert int(shared) <= SHARED_BYTES[capability], f"{name} takes {shared} bytes of shared memory"
        assert int(stack) <= SPILLED[kind], f"{name}: {registers} registers, {stack} bytes of stack"


TF32 = """
t = topology.topology_from_offsets(offsets_E, rows, [f] * experts, block)
products.sdd_act(x, (w1, v1), t, "silu", source_R=source_R, choices=2, tf32=True)
products.dsd(h, w2, t, trans_b=True, tf32=True)
products.sdd(x, w2, t, tf32=True)
products.dsd((h, h.clone()), (w1, v1), t, tf32=True)
products.dsd(h, x, t, trans_s=True, stacked=True, tf32=True)
"""


@pytest.mark.parametrize("capability", [80, 90])
def test_products_of_tf32_compile_and_fit(capability):
    operands = COMPILE[: COMPILE.index("products.sdd_act")]
    script = operands.replace("{capability}", str(capability)).replace("{dtype}", "float32") + TF32
    lines = [line.split() for line in run_for(capability, script)]
    spilled = SPILLED_OF_TF32 if OLD else SPILLED
    assert [name for name, *_ in lines].count("inner_kernel") == 1
    for name, kind, shared, registers, stack in lines:
        assert int(shared) <= SHARED_BYTES[capability], f"{name} takes {shared} bytes of shared memory"
        assert int(stack) <= spilled[kind], f"{name}: {registers} registers, {stack} bytes of stack"
