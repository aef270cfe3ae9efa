"""Block-sparse products of any topology against dense fp64 products, in every transpose, with all gradients.

Shapes: S [R, C], M x N blocks of B, K inner width (no tile divides it).
"""

import itertools
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from foundry_moe_kernels import block_products

from foundry_moe.ops.operators import on_device
from foundry_moe.sparse import Matrix, dds, dsd, products, sdd
from tests.helpers.demo import ROOT
from tests.helpers.pages import blocks

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
GPU_1 = torch.device("cuda", 1)
K = 37
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if CUDA else [])
# sums of at most 768 products in fp32; fp16 and bf16 round the result once
TOLERANCE = {torch.float32: 2e-5, torch.float16: 1e-3, torch.bfloat16: 5e-3, torch.float64: 1e-14}
TABLES = ("rows_Z", "columns_Z", "row_offsets_M1", "transposed_Z", "transposed_rows_Z", "column_offsets_N1")
BOTH_WAYS = list(itertools.product([False, True], repeat=2))


def masks() -> dict[str, torch.Tensor]:
    """The worst topologies."""
    made = {
        "random": torch.rand(5, 7, generator=torch.Generator().manual_seed(1)) < 0.5,
        "empty rows and columns": torch.zeros(6, 5),
        "one block": torch.ones(1, 1),
        "one block of many": torch.zeros(4, 6),
        "none": torch.zeros(2, 3),
        "full": torch.ones(3, 4),
        "block diagonal of unequal blocks": torch.block_diag(*map(torch.ones, [(2, 1), (1, 3), (3, 2)])),
        "banded": torch.ones(6, 6).tril(1).triu(-1),
        "long rows": torch.rand(3, 12, generator=torch.Generator().manual_seed(2)) < 0.9,
    }
    made["empty rows and columns"][[1, 1, 4], [0, 3, 3]] = 1
    made["one block of many"][2, 5] = 1
    return made


def new(*shape, dtype=torch.float32, transposed=False):
    """Transposed: in memory."""
    made = torch.randn(*(shape[::-1] if transposed else shape), device=DEVICE).to(dtype)
    return made.mT if transposed else made


def matrix(mask, block, dtype=torch.float32, transposed=False):
    """S and the same dense; of a transposed one, S is stored as its transpose."""
    mask = (mask.mT if transposed else mask).to(DEVICE)
    values = new(int(mask.sum()), block, block, dtype=dtype)
    made = Matrix.from_mask(mask, values, block=block).check()
    made = made.mT if transposed else made
    return made, made.to_dense().double()


def changed_index(s, **tables):
    return type(s.index)(s.block, **{name: tables.get(name, getattr(s.index, name)) for name in TABLES})


def checked(s, **tables):
    return Matrix(s.values, changed_index(s, **tables)).check()


def error(actual, truth):
    assert actual.shape == truth.shape
    assert torch.isfinite(actual).all()
    return float((actual.double() - truth).norm() / truth.norm().clamp(min=1e-30))


def check_all(mask, block, dtype, trans_s, trans_dense, k=K):
    """The three products and the gradients of their operands."""
    s, dense = matrix(mask, block, dtype, trans_s)
    (rows, columns), most = dense.shape, TOLERANCE[dtype]

    def leaf(tensor):
        return tensor.detach().requires_grad_()

    def gradients(out, expected, leaves, truths):
        slope = torch.randn_like(expected)
        out.backward(slope.to(dtype))
        expected.backward(slope.to(dtype).double())
        for one, truth in zip(leaves, truths, strict=True):
            assert error(one.grad, truth.grad) < most

    pattern = s.with_values(torch.ones_like(s.values)).to_dense().double()
    a, b = (leaf(new(*shape, dtype=dtype, transposed=trans_dense)) for shape in ((rows, k), (k, columns)))
    a64, b64 = leaf(a.double()), leaf(b.double())
    out, expected = sdd(a, b, s), a64 @ b64 * pattern
    assert error(out.to_dense(), expected) < most
    gradients(out.to_dense(), expected, (a, b), (a64, b64))

    for left in (False, True):
        values, dense64 = leaf(s.values), leaf(dense)
        shape = (k, rows) if left else (columns, k)
        b = leaf(new(*shape, dtype=dtype, transposed=trans_dense))
        b64, sparse = leaf(b.double()), s.with_values(values)
        out, expected = (dds(b, sparse), b64 @ dense64) if left else (dsd(sparse, b), dense64 @ b64)
        assert error(out, expected) < most
        slope = torch.randn_like(expected).to(dtype)
        out.backward(slope)
        expected.backward(slope.double())
        assert error(b.grad, b64.grad) < most
        assert error(s.with_values(values.grad).to_dense(), dense64.grad * pattern) < most


@pytest.mark.parametrize("name", masks())
@pytest.mark.parametrize(
    "trans_s, trans_dense", [pytest.param(*BOTH_WAYS[-1], marks=pytest.mark.quick), *BOTH_WAYS[:-1]]
)
def test_products_of_any_topology_and_their_gradients_are_the_dense_ones(name, trans_s, trans_dense):
    check_all(masks()[name], 16, torch.float32, trans_s, trans_dense)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", [16, 32, 64, 128])
def test_every_block_and_dtype_gives_the_dense_product(block, dtype):
    for ways in BOTH_WAYS if CUDA else [(False, True), (True, False)]:
        check_all(masks()["banded" if block < 64 else "long rows"][:3, :4], block, dtype, *ways)


def test_plain_torch_gives_the_dense_products_in_fp64():
    for ways in BOTH_WAYS:
        if not CUDA:  # on a GPU fp64 is refused
            check_all(masks()["random"], 16, torch.float64, *ways)


@pytest.mark.quick
@pytest.mark.parametrize("table", ["rows_Z", "columns_Z", "transposed_Z", "transposed_rows_Z"])
def test_kernels_find_blocks_by_the_index_tables(table):
    """With other indices a product is another: nothing is derived from where the neighbours lie."""
    s, _ = matrix(masks()["full"], 16)
    x, y = new(s.shape[1], K), new(s.shape[0], K)
    other = Matrix(s.values, changed_index(s, **{table: getattr(s.index, table).flip(0).contiguous()}))
    before, after = ([dsd(one, x), dsd(one.mT, y), sdd(y, x.mT, one).values] for one in (s, other))
    changed = [not torch.equal(one, two) for one, two in zip(before, after, strict=True)]
    assert (
        changed
        == {
            "rows_Z": [False, False, True],
            "columns_Z": [True, False, True],
            "transposed_Z": [False, True, False],
            "transposed_rows_Z": [False, True, False],
        }[table]
    )


@pytest.mark.quick
def test_indices_of_16_bits_and_offsets_of_64_give_the_same_bits():
    s, _ = matrix(masks()["random"], 16)
    dtypes = dict(
        zip(TABLES, (torch.int16, torch.int16, torch.int64, torch.int64, torch.int16, torch.int64), strict=True)
    )
    other = Matrix(s.values, changed_index(s, **{name: getattr(s.index, name).to(t) for name, t in dtypes.items()}))
    x, y = new(s.shape[1], K), new(s.shape[0], K)
    assert torch.equal(dsd(s, x), dsd(other, x))
    assert torch.equal(dsd(s.mT, y), dsd(other.mT, y))
    assert torch.equal(sdd(y, x.mT, s).values, sdd(y, x.mT, other).values)


@pytest.mark.quick
def test_expanded_and_sliced_operands_are_read_as_they_are():
    s, dense = matrix(masks()["random"], 16)
    wide = new(s.shape[1], 2 * K)
    for b in (wide[:, ::2], wide[:, 3 : 3 + K], wide[:, :1].expand(-1, K)):
        assert error(dsd(s, b), dense @ b.double()) < TOLERANCE[torch.float32]


@pytest.fixture
def allowed(request):
    """torch's switch for fp32 products, as a test's parameter says."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = request.param
    yield request.param
    torch.backends.cuda.matmul.allow_tf32 = before


def fp32_products(monkeypatch, blocks):
    """The relative error of each product and gradient in fp32, and the precision of each launch."""
    launched, errors = [], []

    def launch(*arguments, **options):
        launched.append(options["PRECISION"])
        return run(*arguments, **options)

    run = block_products.launch
    monkeypatch.setattr(block_products, "launch", launch)
    for block, transposed in itertools.product(blocks, (False, True)):
        s, dense = matrix(masks()["random"][:3, :4], block, transposed=transposed)
        values, pattern = s.values.requires_grad_(), (dense != 0).double()
        a, b = new(K, s.shape[0]), new(s.shape[1], K)
        y, z = dsd(s, b), dds(a, s)
        (dvalues,) = torch.autograd.grad(y, values, a.mT)
        errors += [
            error(y.detach(), dense @ b.double()),
            error(z.detach(), a.double() @ dense),
            error(s.with_values(dvalues).to_dense(), a.mT.double() @ b.mT.double() * pattern),
        ]
    return errors, launched


@pytest.mark.quick
@pytest.mark.parametrize("allowed", [False, True], indirect=True)
def test_fp32_operands_are_rounded_where_torchs_switch_says_so(allowed, monkeypatch):
    _, launched = fp32_products(monkeypatch, blocks=(16,))
    assert launched == ["tf32" if allowed else "ieee"] * 6


@pytest.mark.gpu
@pytest.mark.parametrize("allowed, least, most", [(False, 0, 1e-5), (True, 1e-4, 2e-3)], indirect=["allowed"])
def test_the_error_of_fp32_products_is_that_of_tf32_where_it_is_allowed(allowed, least, most, monkeypatch):
    """fp32 rounds to 2^-24; tf32 rounds each operand to 2^-11, or cuts it off at 2^-10."""
    errors, _ = fp32_products(monkeypatch, blocks=(16, 128))
    assert all(least <= one < most for one in errors), errors


@pytest.mark.quick
def test_second_derivatives_are_those_of_the_dense_product():
    s, dense = matrix(masks()["banded"][:3, :3], 16)
    b = new(48, 5).requires_grad_()
    for out, x in ((dsd(s, b).square().sum(), b), ((dense @ b.double()).square().sum(), b)):
        (first,) = torch.autograd.grad(out, x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)
        if out.dtype is torch.float32:
            found = second.double()
    assert error(found, second.double()) < 1e-5


@pytest.mark.quick
@pytest.mark.parametrize("product", ["sdd", "dsd", "dds"])
def test_compiled_gradients_in_plain_torch_are_those_of_eager(product):
    if CUDA:
        pytest.skip("on a GPU fp64 is refused")
    s, _ = matrix(masks()["random"], 16, torch.float64)
    a, b = (new(*shape, dtype=torch.float64) for shape in ((5, s.shape[0]), (s.shape[1], 5)))

    def compute(values, a, b):
        sparse = s.with_values(values)
        if product == "sdd":
            return sdd(a.mT, b.mT, sparse).values
        return dsd(sparse, b) if product == "dsd" else dds(a, sparse)

    leaves = [leaf.requires_grad_() for leaf in (s.values, a, b)]
    found = [
        torch.autograd.grad(run(*leaves).sin().sum(), leaves, materialize_grads=True, allow_unused=True)
        for run in (compute, torch.compile(compute, backend="aot_eager", fullgraph=True))
    ]
    for eager, compiled in zip(*found, strict=True):
        assert error(compiled, eager) < TOLERANCE[torch.float64]


@pytest.mark.quick
def test_autocast_changes_neither_kernels_nor_plain_torch(monkeypatch):
    monkeypatch.setattr("foundry_moe.sparse.products.blocksparse_available", lambda *_: CUDA)
    s, dense = matrix(masks()["random"], 16)
    b = new(s.shape[1], K).requires_grad_()
    with torch.autocast(DEVICE, torch.bfloat16):
        y = dsd(s, b)
        (db,) = torch.autograd.grad(y, b, torch.ones_like(y))
        values = sdd(y, b.mT, s)
    assert error(y.detach(), dense @ b.detach().double()) < TOLERANCE[torch.float32]
    assert error(db, dense.mT @ torch.ones_like(y, dtype=torch.float64)) < TOLERANCE[torch.float32]
    assert values.values.dtype is torch.float32


@pytest.mark.quick
@pytest.mark.parametrize("current, entered", [(0, [1]), (1, [])])
def test_products_run_with_their_gpu_as_the_current_device(current, entered, monkeypatch):
    """Triton launches on the current device."""
    seen = []

    @contextmanager
    def enter(device):
        seen.append(device.index)
        yield

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "device", enter)
    monkeypatch.setattr(products, "on_device", lambda _: on_device(SimpleNamespace(is_cuda=True, device=GPU_1)))
    s, _ = matrix(masks()["random"], 16)
    x, y = new(s.shape[1], K), new(s.shape[0], K)
    for run in (lambda: dsd(s, x), lambda: dds(x.mT, s.mT), lambda: sdd(y, x.mT, s)):
        seen.clear()
        run()
        assert seen == entered


@pytest.mark.gpu
def test_products_of_tensors_on_another_gpu_than_the_current_one():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    s, dense = matrix(masks()["random"], 16)
    s, b = Matrix.from_dense(dense.float().to(GPU_1), block=16), new(s.shape[1], K).to(GPU_1).requires_grad_()
    assert torch.cuda.current_device() == 0
    y = dsd(s, b)
    y.sum().backward()
    assert error(y.detach().to(DEVICE), dense @ b.detach().to(DEVICE).double()) < TOLERANCE[torch.float32]
    assert error(b.grad.to(DEVICE), dense.mT @ torch.ones_like(y, device=DEVICE).double()) < TOLERANCE[torch.float32]


def csr(s: Matrix, **tables: torch.Tensor) -> Matrix:
    given = {"row_offsets": s.index.row_offsets_M1, "column_indices": s.index.columns_Z, **tables}
    return Matrix.from_csr(s.values, columns=s.shape[1], **given)


MISTAKES = {
    "inner sizes must agree": lambda s, x: dsd(s, x[1:]),
    "inner sizes": lambda s, x: dds(x, s),
    r"and the topology is \[80, 112\]": lambda s, x: sdd(x, x.mT, s),
    "they must agree": lambda s, x: dsd(s, x.half()),
    "dsd of .* and torch.float32 on meta": lambda s, x: dsd(s, x.to("meta")),
    "dds of torch.float32 on meta": lambda s, x: dds(x.mT[:, :80].to("meta"), s),
    "sdd of .* on meta: they": lambda s, x: sdd(x, x.mT.to("meta"), s),
    "sdd on meta with a topology on": lambda s, x: sdd(*(new(*n).to("meta") for n in ((80, 5), (5, 112))), s),
    r"dsd of \[80, 112\] and \[1, 112, 32\]: .* two dim": lambda s, x: dsd(s, x[None]),
    r"dds of \[1, 32, 112\] and .* two dimensions": lambda s, x: dds(x.mT[None], s),
    r"sdd of \[112, 32\] and \[1, 32, 112\]: .* two dim": lambda s, x: sdd(x, x.mT[None], s),
    "dsd multiplies a Matrix and a Tensor, not a Tensor and a Matrix": lambda s, x: dsd(x.mT, s),
    "dds multiplies a Tensor and a Matrix, not a Matrix and a Tensor": lambda s, x: dds(s, x),
    "sdd multiplies a Tensor and a Tensor, not a Matrix and a Tensor": lambda s, x: sdd(s, x, s),
    "sdd's topology is a Tensor": lambda s, x: sdd(x, x.mT, x),
    r"the mask is \[1, 3, 4\]": lambda s, x: Matrix.from_mask(torch.ones(1, 3, 4), block=16),
    r"the dense matrix is \[1, 112, 32\]": lambda s, x: Matrix.from_dense(x[None], block=16),
    r"the mask is \[7, 2, 1\]: it must be": lambda s, x: Matrix.from_dense(x, block=16, mask_MN=torch.ones(7, 2, 1)),
    "must be one of 16, 32, 64, 128": lambda s, x: Matrix.from_dense(x, block=24),
    r"block \(16.0\) must be one of": lambda s, x: Matrix.from_mask(torch.ones(2, 2), block=16.0),
    r"the mask must be a tensor \[block rows, .*, not list": lambda s, x: Matrix.from_mask([[1]], block=16),
    "the dense matrix must be a tensor": lambda s, x: Matrix.from_dense([[1.0]], block=16),
    "the mask must be a tensor .*, not str": lambda s, x: Matrix.from_dense(x, block=16, mask_MN="all"),
    "values must be a tensor": lambda s, x: Matrix([1], s.index),
    "index must be a BlockIndex, not NoneType": lambda s, x: Matrix(s.values, None),
    "values is int32: it must be one of float64": lambda s, x: s.with_values(s.values.int()),
    "values is complex64": lambda s, x: s.with_values(s.values.to(torch.complex64)),
    r"row_offsets is \[1, \d+\]: it must be": lambda s, x: csr(s, row_offsets=s.index.row_offsets_M1[None]),
    "row_offsets is float32": lambda s, x: csr(s, row_offsets=s.index.row_offsets_M1.float()),
    r"column_indices has \d+ entries for": lambda s, x: csr(s, column_indices=s.index.columns_Z[1:]),
    r"and the mask has \d+ blocks": lambda s, x: Matrix.from_mask(masks()["random"], s.values[1:], block=16),
    "must divide the matrix's size": lambda s, x: Matrix.from_dense(x, block=64),
    "the mask is": lambda s, x: Matrix.from_dense(x[:, :32], block=16, mask_MN=torch.ones(3, 2, device=DEVICE)),
    r"not \[\d+, 16, 16\]": lambda s, x: s.with_values(s.values[1:]),
    "and block is 32": lambda s, x: Matrix.from_mask(masks()["random"], s.values, block=32),
    "rows_Z is not contiguous": lambda s, x: checked(s, rows_Z=s.index.rows_Z.repeat_interleave(2)[::2]),
    "rows_Z is float32: it must be one of int16, int32": lambda s, x: checked(s, rows_Z=s.index.rows_Z.float()),
    "transposed_Z has": lambda s, x: checked(s, transposed_Z=s.index.transposed_Z[1:]),
    "columns_Z has an index outside of 0 to 6": lambda s, x: checked(s, columns_Z=s.index.columns_Z + 1),
    "ascending order": lambda s, x: checked(s, columns_Z=s.index.columns_Z.flip(0)),
    "and column, each once": lambda s, x: checked(
        Matrix.from_mask(torch.ones(1, 2), block=16), columns_Z=torch.zeros(2, dtype=torch.int32)
    ),
    r"size \(0 x 32\)": lambda s, x: Matrix.from_mask(torch.ones(0, 2), block=16),
    r"size \(-16 x 112\)": lambda s, x: csr(s, row_offsets=s.index.row_offsets_M1[:0]),
    "each of the": lambda s, x: checked(s, transposed_Z=s.index.transposed_Z * 0),
    "transposed_rows_Z and": lambda s, x: checked(s, transposed_rows_Z=s.index.transposed_rows_Z.flip(0)),
    "row_offsets_M1 and": lambda s, x: checked(s, row_offsets_M1=s.index.row_offsets_M1.flip(0)),
}


@pytest.mark.quick
@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_one_sentence(words):
    s, _ = matrix(masks()["random"], 16)
    with pytest.raises(ValueError, match=words) as raised:
        MISTAKES[words](s, new(112, 32 if "size" not in words else 100))
    assert "\n" not in str(raised.value)


@pytest.mark.quick
def test_conversions_keep_every_value():
    mask = masks()["random"]
    s, dense = matrix(mask, 32)
    back = Matrix.from_dense(dense.float(), block=32).check()
    assert torch.equal(back.values, s.values)
    assert torch.equal(back.mT.to_dense(), dense.float().mT)
    assert back.mT.mT.values is back.values
    weight = new(*s.shape).requires_grad_()
    kept = Matrix.from_dense(weight, block=32, mask_MN=mask.to(DEVICE))
    kept.to_dense().sum().backward()
    assert torch.equal(weight.grad, mask.to(DEVICE).repeat_interleave(32, 0).repeat_interleave(32, 1).float())


@pytest.mark.quick
def test_the_code_of_the_page_gives_the_dense_products():
    first, *shown = blocks("how-to/block_sparse.md", "python")
    found: dict = {}
    exec(first, found)
    dense = found["a"].double() @ found["b"].double()
    dense *= found["mask"].repeat_interleave(64, 0).repeat_interleave(64, 1)
    for name, truth in (("y", dense @ found["x"].double()), ("z", (dense @ found["x"].double()).mT)):
        assert error(found[name], truth) < TOLERANCE[torch.float32]
    assert error(found["s"].to_dense(), dense) < TOLERANCE[torch.float32]
    example = (ROOT / "examples" / "pruned_linear.py").read_text()
    assert all(line.strip() in example for block in shown for line in block.splitlines())
