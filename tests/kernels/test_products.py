"""The block-sparse format and its products against dense matrices: ragged loads, partial blocks, unequal widths.

Shapes: R rows, C columns of all experts, E experts, K inner width, N dense width.
"""

import itertools

import pytest
import torch
from foundry_moe_kernels import products

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


def test_topology_lists_every_block_once_in_row_order_and_in_column_order(case):
    loads, widths, t = case
    blocks = int(t.row_offsets_M1[-1])
    assert blocks == sum(-(-load // 16) * -(-width // 16) for load, width in zip(loads.tolist(), widths, strict=True))
    pairs = list(zip(t.rows_Z[:blocks].tolist(), t.columns_Z[:blocks].tolist(), strict=True))
    assert pairs == sorted(set(pairs))
    order = t.transposed_Z[:blocks].tolist()
    assert sorted(order) == list(range(blocks))
    assert [pairs[z][::-1] for z in order] == sorted(pair[::-1] for pair in pairs)
    assert int(t.sizes_M.sum()) == int(loads.sum())


@pytest.mark.parametrize("trans_a, trans_b", BOTH_WAYS)
def test_sdd_is_the_dense_product_at_the_blocks(case, trans_a, trans_b):
    loads, widths, t = case
    a, b = new(ROWS, K), new(K, sum(widths))
    a[int(loads.sum()) :] = float("nan")
    s = products.sdd(
        a.mT.contiguous() if trans_a else a, b.mT.contiguous() if trans_b else b, t, trans_a=trans_a, trans_b=trans_b
    )
    truth = (a.nan_to_num().double() @ b.double()) * reference.sparsity(loads, ROWS, widths)
    assert error(reference.expand(s, loads, ROWS, widths), truth) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("trans_s, trans_b", BOTH_WAYS)
def test_dsd_and_dds_are_the_dense_products(case, trans_s, trans_b):
    loads, widths, t = case
    s = poisoned(new(t.num_values), loads.tolist(), widths)
    dense = reference.expand(s, loads, ROWS, widths).double()
    op = dense.mT if trans_s else dense
    b = new(op.shape[1], N)
    out = products.dsd(s, b.mT.contiguous() if trans_b else b, t, trans_s=trans_s, trans_b=trans_b)
    assert error(out, op @ b.double()) < TOLERANCE[torch.float32]
    a = new(N, op.shape[0])
    out = products.dds(a.mT.contiguous() if trans_b else a, s, t, trans_a=trans_b, trans_s=trans_s)
    assert error(out, a.double() @ op) < TOLERANCE[torch.float32]


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


def test_operands_along_an_experts_rows_give_the_bits_of_those_across():
    loads = torch.tensor(LOADS["ragged"], device=DEVICE)
    for widths in WIDTHS.values():
        t = reference.build_topology(loads, ROWS, widths, 16)
        a, b, x = new(ROWS, K), new(K, sum(widths)), new(ROWS, N)
        a_KR, x_NR = a.mT.contiguous(), x.mT.contiguous()
        s = products.sdd(a, b, t)
        assert torch.equal(products.sdd(a_KR, b, t, trans_a=True), s)
        expected = products.dsd(s, x, t, trans_s=True)
        assert torch.equal(products.dsd(s, x_NR, t, trans_s=True, trans_b=True), expected)
        assert torch.equal(products.dds(x_NR, s, t), expected.mT)


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
    assert torch.equal(products.dds(w_DC, s, t, trans_s=True), y.mT)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 5), (64, 64), (65, 130), (7, 200)])
def test_row_major_copies_what_lies_along_its_rows_and_nothing_else(shape, dtype):
    inside = new(shape[1], shape[0] + 3, dtype=dtype)[:, 1:-2]  # rows of a larger matrix
    out = products.row_major(inside.mT)
    assert out.is_contiguous()
    assert torch.equal(out, inside.mT)
    rows = new(*shape, dtype=dtype)
    assert products.row_major(rows) is rows


@pytest.mark.parametrize("block", [16, 32, 64])
def test_any_power_of_two_block_gives_the_same_product(block):
    loads, widths = torch.tensor(LOADS["ragged"], device=DEVICE), WIDTHS["unequal"]
    t = reference.build_topology(loads, ROWS, widths, block)
    a, b = new(ROWS, K), new(K, sum(widths))
    s = products.sdd(a, b, t)
    truth = (a.double() @ b.double()) * reference.sparsity(loads, ROWS, widths)
    assert error(reference.expand(s, loads, ROWS, widths), truth) < TOLERANCE[torch.float32]
