"""A layer's topology and its products against dense matrices: ragged loads, partial blocks, unequal widths.

Shapes: R rows, C columns of all experts, E experts, K inner width, N dense width.
"""

import itertools

import pytest
import torch
from foundry_moe_kernels import products

from foundry_moe.sparse import Matrix, dsd, sdd
from tests.helpers import kernel_twins as reference

pytestmark = pytest.mark.quick

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
ROWS = 45
LOADS = {"ragged": [5, 0, 19, 1, 16], "one takes all": [0, 0, 45, 0, 0], "empty": [0, 0, 0, 0, 0]}
WIDTHS = {"equal": [24] * 5, "unequal": [16, 40, 24, 8, 33]}
K, N = 20, 35
# sums of at most 200 fp32 products: 200 * 2^-24; fp16 and bf16 round the result once
TOLERANCE = {torch.float32: 2e-5, torch.float16: 1e-3, torch.bfloat16: 5e-3}
BOTH_WAYS = list(itertools.product([False, True], repeat=2))
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if CUDA else [])


def error(actual, truth):
    assert torch.isfinite(actual).all()
    return float((actual.double() - truth).norm() / truth.norm().clamp(min=1e-30))


def new(*shape, dtype=torch.float32):
    return torch.randn(*shape, device=DEVICE).to(dtype)


def poisoned(values, loads, widths):
    """Values with NaN where the format holds nothing."""
    used = sum(load * width for load, width in zip(loads, widths, strict=True))
    values = values.contiguous()
    values.view(-1)[used:] = float("nan")
    return values


@pytest.fixture(params=[f"{a}, {b}" for a in LOADS for b in WIDTHS])
def case(request):
    a, b = request.param.split(", ")
    loads = torch.tensor(LOADS[a], device=DEVICE)
    return loads, WIDTHS[b], reference.build_topology(loads, ROWS, WIDTHS[b], 16)


def test_topology_lists_the_row_of_every_block_and_the_first_row_of_every_column(case):
    loads, widths, t = case
    blocks = int(t.row_offsets_M1[-1])
    assert blocks == sum(-(-load // 16) * -(-width // 16) for load, width in zip(loads.tolist(), widths, strict=True))
    tall, wide = ([-(-size // 16) for size in sizes] for sizes in (loads.tolist(), widths))
    rows = [m for m, e in enumerate(e for e, height in enumerate(tall) for _ in range(height)) for _ in range(wide[e])]
    assert t.rows_Z[:blocks].tolist() == rows
    columns = [e for e, width in enumerate(wide) for _ in range(width)]
    assert t.column_heights_N.tolist() == [tall[e] for e in columns]
    assert t.column_rows_N.tolist() == [sum(tall[:e]) for e in columns]
    assert int(t.sizes_M.sum()) == int(loads.sum())


@pytest.mark.parametrize("trans_b", [False, True])
def test_sdd_is_the_dense_product_at_the_blocks(case, trans_b):
    loads, widths, t = case
    a, b = new(ROWS, K), new(K, sum(widths))
    a[int(loads.sum()) :] = float("nan")
    s = products.sdd(a, b.mT.contiguous() if trans_b else b, t, trans_b=trans_b)
    truth = (a.nan_to_num().double() @ b.double()) * reference.sparsity(loads, ROWS, widths)
    assert error(reference.expand(s, loads, ROWS, widths), truth) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("trans_s, trans_b", BOTH_WAYS)
def test_dsd_is_the_dense_product(case, trans_s, trans_b):
    loads, widths, t = case
    s = poisoned(new(t.num_values), loads.tolist(), widths)
    dense = reference.expand(s, loads, ROWS, widths).double()
    op = dense.mT if trans_s else dense
    b = new(op.shape[1], N)
    out = products.dsd(s, b.mT.contiguous() if trans_b else b, t, trans_s=trans_s, trans_b=trans_b)
    assert error(out, op @ b.double()) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
def test_stacked_weights_are_read_where_they_lie(dtype):
    loads = torch.tensor(LOADS["ragged"], device=DEVICE)
    widths = WIDTHS["equal"]
    t = reference.build_topology(loads, ROWS, widths, 16)
    x, w1_EFD, w2_EDF = new(ROWS, K, dtype=dtype), new(5, 24, K, dtype=dtype), new(5, K, 24, dtype=dtype)
    offsets = loads.cumsum(0)
    z = products.sdd(x, w1_EFD, t, trans_b=True)
    truth, _ = reference.up(x.double(), w1_EFD.double(), None, offsets, "identity")
    assert error(z, truth[0]) < TOLERANCE[dtype]
    y = products.dsd(z, w2_EDF, t, trans_b=True)
    truth = reference.rows_product(z.double()[None], (w2_EDF.double(),), offsets, transposed=True)
    assert error(y, truth) < TOLERANCE[dtype]
    dw = products.dsd(z, x, t, trans_s=True, stacked=True)
    truth = reference.weight_gradient(z.double()[None], x.double(), offsets)[0]
    assert error(dw, truth) < TOLERANCE[dtype]


def test_the_shortcut_gives_the_products_of_the_matrix_of_any_topology():
    """Loads and widths are whole blocks: the two formats then hold the same matrix."""
    loads, width = torch.tensor([32, 0, 16], device=DEVICE), 32
    t = reference.build_topology(loads, 48, [width] * 3, 16)
    mask = torch.block_diag(*(torch.ones(load // 16, 2) for load in loads.tolist()))
    h, x, w = new(48, width), new(48, K), new(3 * width, K)
    s = Matrix.from_dense(reference.expand(h, loads, 48, [width] * 3), block=16, mask_MN=mask.to(DEVICE))
    for found, expected in (
        (products.dsd(h, w, t), dsd(s, w)),
        (products.dsd(h, x, t, trans_s=True), dsd(s.mT, x)),
        (reference.expand(products.sdd(x, w, t, trans_b=True), loads, 48, [width] * 3), sdd(x, w.mT, s).to_dense()),
    ):
        assert error(found, expected.double()) < TOLERANCE[torch.float32]


def test_one_matrix_over_all_columns_gives_the_bits_of_a_stack():
    loads, experts, width = torch.tensor(LOADS["ragged"], device=DEVICE), 5, 24
    t = reference.build_topology(loads, ROWS, WIDTHS["equal"], 16)
    x, w_EFD = new(ROWS, K), new(experts, width, K)
    w_CD = w_EFD.view(-1, K)
    w_DC = w_CD.mT.contiguous()
    s = products.sdd(x, w_EFD, t, trans_b=True)
    assert torch.equal(products.sdd(x, w_CD, t, trans_b=True), s)
    assert torch.equal(products.sdd(x, w_DC, t), s)
    y = products.dsd(s, w_EFD, t)
    assert torch.equal(products.dsd(s, w_CD, t), y)
    assert torch.equal(products.dsd(s, w_DC, t, trans_b=True), y)


@pytest.mark.parametrize("block", [16, 32, 64])
def test_any_power_of_two_block_gives_the_same_product(block):
    loads, widths = torch.tensor(LOADS["ragged"], device=DEVICE), WIDTHS["unequal"]
    t = reference.build_topology(loads, ROWS, widths, block)
    a, b = new(ROWS, K), new(K, sum(widths))
    s = products.sdd(a, b, t)
    truth = (a.double() @ b.double()) * reference.sparsity(loads, ROWS, widths)
    assert error(reference.expand(s, loads, ROWS, widths), truth) < TOLERANCE[torch.float32]
