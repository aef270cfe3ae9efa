"""The warp-specialised kernels compile for Hopper, without one; `test_expert_products` runs them where there is one."""

import pytest
import torch
from foundry_moe_kernels import expert_products as ep

from tests.helpers.compiling import compile_for, misfits

COMPILE = """
import torch
from foundry_moe_kernels import descriptors, expert_products as ep
from foundry_moe_kernels.tuning import Tile

descriptors.device_supported = lambda device: True
x, h, both = (torch.zeros(*shape, dtype=torch.bfloat16) for shape in ((256, 512), (256, 1024), (2, 2, 1024, 512)))
w, v = both
rows = ep.RaggedRows(
    offsets_E=torch.tensor([128, 256], dtype=torch.int32), order_E=torch.zeros(2, dtype=torch.int32), num_rows=256,
    blocks={height: (torch.zeros(4, 4, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)) for height in (128, 192)},
)
tile = Tile(stages=4)
tokens = ep.Tokens(x_TD=x, source_R=torch.zeros(256, dtype=torch.int32), choices=8)
ep.rows_product(x[None], (w,), rows, transposed=True, tile=tile)
ep.rows_product(tokens, (w,), rows, transposed=True, tile=tile)
ep.up(x, (w, v), rows, "silu", tile=tile)
ep.up(tokens, (w, v), rows, "silu", tile=tile)
ep.up(tokens, (w, v), rows, "gelu", tile=tile)
ep.rows_product(h[None].repeat(2, 1, 1), (w, v), rows, transposed=False, tile=tile, beside=(tokens, x.clone()))
ep.weight_gradient(h[None], x, rows, tile=tile)
ep.weight_gradient(h[None], tokens, rows, tile=tile)
ep.weight_gradient(tokens, h, rows, tile=tile)
up_low = ep.LowRank(a_RL=x[:, :32].contiguous(), b=both[..., :32].contiguous())
ep.up(tokens, (w, v), rows, "silu", tile=tile, low=up_low)
for a, weights, width in ((tokens, (w.mT.contiguous(),), 1024), (h[None].repeat(2, 1, 1), (w, v), 512)):
    low = ep.LowRank(a_RL=up_low.a_RL, b=torch.zeros(1, 2, 32, width, dtype=torch.bfloat16))
    ep.rows_product(a, weights, rows, transposed=False, tile=tile, low=low)
for width in (320, 384):  # and a last tile of 64 or 128 columns
    narrow = torch.zeros(2, width, 512, dtype=torch.bfloat16)
    ep.rows_product(x[None], (narrow,), rows, transposed=True, tile=tile)
    ep.weight_gradient(h[None], x[:, :width].contiguous(), rows, tile=tile)
for width in (512, 320, 384):  # fp32 results, whose parts are as many bytes as those of twice as many columns
    out = torch.empty(1, 2, 1024, width)
    ep.weight_gradient(h[None], x[:, :width].contiguous(), rows, tile=Tile(split=1), out=out)
"""


pytestmark = pytest.mark.skipif(
    not ep.descriptors.GLUON, reason="the Hopper kernels run with Triton 3.6 alone: each version changes Gluon"
)


def test_rows_of_each_width_that_can_be_copied_have_a_tensor_map():
    widths = []
    for width in ep._GATHER_WIDTHS:
        x_TD = torch.zeros(2, width, dtype=torch.bfloat16)
        if ep.copies(ep.Tokens(x_TD=x_TD, source_R=torch.zeros(2, dtype=torch.int32), choices=1)):
            make, *given = ep.descriptors.row_map(x_TD)
            make(*given)  # raises for a box that Triton does not take
            widths.append(width)
    assert widths == [256, 512, 1024, 2048, 4096]


def test_last_tile_is_as_narrow_as_what_is_left():
    from foundry_moe_kernels.hopper_products import last_columns

    left = {2880: 64, 1408: 128, 2048: 256, 320: 64, 449: 256, 8: 64}
    assert {columns: last_columns(columns, 256) for columns in left} == left


def test_specialised_kernels_compile_for_hopper_and_spill_nothing():
    kernels = compile_for(90, COMPILE)
    # four instructions a step of 64 in each of two parts, two for one of 32, and as many for a narrow last tile
    assert [kernel.hopper_products for kernel in kernels] == [8] * 9 + [12] * 3 + [16] * 4 + [8, 16, 16]
    assert not misfits(kernels, 90)
    tall = compile_for(90, COMPILE.replace("Tile(", "Tile(bm=192, "))
    # of three parts and two sides; products of tokens have two consumers still
    up_to_inner, low, narrow = [8, 24, 8, 8, 8, 24, 8, 8], [12, 12, 36], [36, 36, 36, 36, 24, 36, 36]
    assert [kernel.hopper_products for kernel in tall] == [24, *up_to_inner, *low, *narrow]
    assert not misfits(tall, 90)
