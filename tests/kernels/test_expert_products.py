"""The Hopper kernels of the six products against plain torch: ragged loads, rows past the end poisoned with NaN.

Shapes: R rows, D model width, F expert width, E experts. On Hopper they run in bf16. On a CPU twins in plain torch
take the arguments of every launch, in fp32: tensor maps, tables and counts are tested there, the kernels are not.
"""

import pytest
import torch
from foundry_moe_kernels import expert_products as ep
from foundry_moe_kernels.tuning import Tile

from tests.helpers import kernel_twins as reference

if not ep.descriptors.GLUON:
    pytest.skip("the Hopper kernels need Triton 3.6", allow_module_level=True)
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
DTYPE = torch.bfloat16 if CUDA else torch.float32
# bf16 rounds a result once to 2^-9 relative; fp32 sums of at most 200 products stay within 200 * 2^-24
TOLERANCE = 4e-3 if CUDA else 2e-5
if CUDA:
    LOADS = {"ragged": [300, 0, 1, 515, 128], "one takes all": [0, 0, 1023, 0, 0], "empty": [0, 0, 0, 0, 0]}
    ROWS, D, F = 1030, 264, 392
else:
    LOADS = {"ragged": [5, 0, 140, 1, 17], "one takes all": [0, 0, 170, 0, 0], "empty": [0, 0, 0, 0, 0]}
    ROWS, D, F = 170, 40, 72
pytestmark = [
    pytest.mark.quick,
    pytest.mark.skipif(CUDA and not ep.descriptors.device_supported(torch.device("cuda")), reason="not Hopper"),
]


TILES = {
    "halves": Tile(stages=4),
    "quarters": Tile(stages=4, split=4),
    "whole": Tile(stages=3, split=1, group=3),
    "long steps": Tile(stages=2, bk=128),
    "three consumers": Tile(bm=192),
    "three consumers, quarters": Tile(bm=192, split=4, group=3),
}


@pytest.fixture(autouse=True)
def twins(monkeypatch):
    if not CUDA:
        from tests.helpers import hopper_twin

        hopper_twin.stand_in(monkeypatch)


@pytest.fixture(params=TILES)
def tile(request):
    return TILES[request.param]


@pytest.fixture(params=LOADS)
def loads(request):
    return LOADS[request.param]


def new(*shape, scale=1.0):
    return (torch.randn(*shape, device=DEVICE) * scale).to(DTYPE)


def setup(loads, seed=0):
    torch.manual_seed(seed)
    offsets_E = torch.tensor(loads, device=DEVICE).cumsum(0).int()
    used = sum(loads)
    experts = len(loads)
    weights = [new(experts, F, D, scale=D**-0.5), new(experts, F, D, scale=D**-0.5), new(experts, D, F, scale=F**-0.5)]
    return ep.ragged_rows(offsets_E, ROWS), offsets_E, used, weights


def poison(tensor, used, dim=0):
    tensor.narrow(dim, used, ROWS - used).fill_(float("nan"))
    return tensor


def close(actual, expected, used=None, dim=0):
    if used is not None:
        actual = actual.narrow(dim, 0, used)
        expected = expected.narrow(dim, 0, used)
    assert torch.isfinite(actual).all()
    error = (actual.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30)
    assert error <= TOLERANCE, float(error)


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_up_writes_pre_activations_and_gated_product(loads, activation, swap, tile):
    rows, offsets_E, used, (w1, v1, _) = setup(loads)
    if swap:
        w1, v1 = v1, w1
    x = poison(new(ROWS, D), used)
    z, h = ep.up(x, (w1, v1), rows, activation, tile=tile)
    z_true, h_true = reference.up(x.double(), w1.double(), v1.double(), offsets_E, activation)
    close(z, z_true, used, 1)
    close(h, h_true, used)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "relu2"])
def test_up_without_gate(loads, activation):
    rows, offsets_E, used, (w1, _, _) = setup(loads)
    x = poison(new(ROWS, D), used)
    z, h = ep.up(x, (w1,), rows, activation)
    z_true, h_true = reference.up(x.double(), w1.double(), None, offsets_E, activation)
    close(z, z_true, used, 1)
    close(h, h_true, used)


def test_rows_product_of_both_orientations_and_planes(loads, tile):
    rows, offsets_E, used, (w1, v1, w2) = setup(loads)
    z = poison(new(2, ROWS, F), used, 1)
    plain = ep.rows_product(z[:1], (w2,), rows, transposed=True, tile=tile)
    close(plain, reference.rows_product(z[:1].double(), (w2.double(),), offsets_E, transposed=True), used)
    both = ep.rows_product(z, (w1, v1), rows, transposed=False, tile=tile)
    truth = reference.rows_product(z.double(), (w1.double(), v1.double()), offsets_E, transposed=False)
    close(both, truth, used)


@pytest.mark.parametrize("width", [320, 384] if CUDA else [24])
def test_last_tile_of_a_row_may_be_narrow(loads, tile, width):
    rows, offsets_E, used, _ = setup(loads)
    x, w = poison(new(1, ROWS, D), used, 1), new(len(loads), width, D, scale=D**-0.5)
    y = ep.rows_product(x, (w,), rows, transposed=True, tile=tile)
    close(y, reference.rows_product(x.double(), (w.double(),), offsets_E, transposed=True), used)
    wide = new(len(loads), D, width, scale=D**-0.5)
    y = ep.rows_product(x, (wide,), rows, transposed=False, tile=tile)
    close(y, reference.rows_product(x.double(), (wide.double(),), offsets_E, transposed=False), used)
    b = poison(new(ROWS, width), used)
    dw = ep.weight_gradient(x, b, rows, tile=tile)
    close(dw, reference.weight_gradient(x.double(), b.double(), offsets_E))
    assert all(count[1:].tolist() == [0, 0] for _, count in rows.blocks.values())  # for the next product


@pytest.mark.parametrize(
    "activation, weighted, gated",
    [("silu", True, True), ("silu", False, True), ("gelu", True, False), ("gelu", True, True), ("gelu", False, False)]
    + [(name, True, False) for name in ("gelu_tanh", "relu", "relu2")],
)
def test_down_backward_gives_every_gradient_of_the_second_product(loads, activation, weighted, gated):
    rows, offsets_E, used, (_, _, w2) = setup(loads)
    z = poison(new(2 if gated else 1, ROWS, F), used, 1)
    dy = poison(new(ROWS, D), used)
    weights = torch.rand(ROWS, device=DEVICE) if weighted else None
    source = torch.randperm(ROWS, device=DEVICE).int()
    args = (offsets_E, activation, weights.double() if weighted else None, source)
    dz_true, h_true, dots_true = reference.down_backward(dy.double(), w2.double(), z.double(), *args)
    h, dots = ep.down_backward_(dy, w2, z, rows, activation, weights, source)
    close(z, dz_true, used, 1)
    close(h, h_true, used)
    if weighted:
        close(dots.sum(0), dots_true, used)


def test_weight_gradient_is_zero_without_rows_and_reads_no_other_experts_rows(loads, tile):
    rows, offsets_E, used, _ = setup(loads)
    a, b = poison(new(2, ROWS, F), used, 1), poison(new(ROWS, D), used)
    out = torch.full((2, len(loads), F, D), float("nan"), dtype=DTYPE, device=DEVICE)
    ep.weight_gradient(a, b, rows, out=out, tile=tile)
    truth = reference.weight_gradient(a.double(), b.double(), offsets_E)
    close(out, truth)
    for expert, load in enumerate(loads):
        if load == 0:
            assert (out[:, expert] == 0).all()


@pytest.mark.parametrize("stages, split", [(4, 2), (3, 1)])
@pytest.mark.parametrize("choices", [1, 8])
def test_tokens_give_the_bits_of_copied_rows(loads, stages, split, choices):
    count, width = 130, 512
    rows, _, used, _ = setup(loads)
    x = new(count, width)
    x[0] = float("nan")  # nobody's, and nothing comes of it
    source = torch.randint(choices, count * choices, (ROWS,), device=DEVICE).int()
    source[used:] = -1
    copied = poison(x[source.clamp(min=0).long() // choices], used)
    tokens = ep.Tokens(x_TD=x, source_R=source, choices=choices)
    w1, v1 = (new(len(loads), F, width, scale=width**-0.5) for _ in range(2))
    w2 = new(len(loads), width, F, scale=F**-0.5)
    z = poison(new(2, ROWS, F), used, 1)
    tile = Tile(stages=stages, split=split, group=3)

    def products(a):
        yield from (part[..., :used, :] for part in ep.up(a, (w1, v1), rows, "silu", tile=tile))
        yield from (part[..., :used, :] for part in ep.up(a, (w1,), rows, "gelu", tile=tile))
        yield ep.rows_product(a, (w1,), rows, transposed=True, tile=tile)[:used]
        yield ep.rows_product(a, (w2,), rows, transposed=False, tile=tile)[:used]
        yield ep.weight_gradient(a, z[0], rows, tile=tile)
        yield ep.weight_gradient(z, a, rows, tile=tile)
        yield ep.weight_gradient(z, a, rows, tile=tile, out=torch.empty(2, len(loads), F, width, device=DEVICE))

    for first, second in zip(products(copied), products(tokens), strict=True):
        assert torch.isfinite(first).all()
        assert torch.equal(first, second)
    x_RD = torch.full_like(copied, 7.0)
    alone = ep.rows_product(z, (w1, v1), rows, transposed=False, tile=tile)
    beside = ep.rows_product(z, (w1, v1), rows, transposed=False, tile=tile, beside=(tokens, x_RD))
    assert torch.equal(alone[:used], beside[:used])
    assert torch.equal(x_RD[:used], copied[:used])
    assert (x_RD[used:] == 7.0).all()


def test_tokens_are_taken_uncopied_by_narrow_experts():
    x = new(4, 512).to(torch.bfloat16)
    assert ep.gathers(x, 1024) and ep.gathers(x, 768, backward=True) and not ep.gathers(x, 769, backward=True)
    assert not ep.gathers(x, 1025) and not ep.gathers(x[:, :264], 512) and not ep.gathers(x[:0], 512)


def test_no_write_past_the_end(loads, tile):
    rows, _, used, (w1, _, _) = setup(loads)
    x = new(ROWS, D)
    c = torch.full((ROWS, F), 7.0, dtype=DTYPE, device=DEVICE)
    arguments, constants = ep._rows_arguments(x[None], (w1,), rows, F, transposed=True, tile=tile, c_YRN=c)
    ep.launch(*arguments, **constants)
    assert (c[used:] == 7.0).all()


def test_products_of_the_same_input_have_the_same_bits(loads, tile):
    rows, _, used, (w1, _, _) = setup(loads)
    x, dz = new(ROWS, D), new(1, ROWS, F)
    first, second = (ep.rows_product(x[None], (w1,), rows, transposed=True, tile=tile)[:used] for _ in range(2))
    assert torch.equal(first, second)
    first, second = (ep.weight_gradient(dz, x, rows, tile=tile) for _ in range(2))
    assert torch.equal(first, second)


def test_same_input_gives_the_same_bits(loads):
    rows, _, used, (_, _, w2) = setup(loads)
    z, dy = new(2, ROWS, F), new(ROWS, D)
    weights, source = torch.rand(ROWS, device=DEVICE), torch.randperm(ROWS, device=DEVICE).int()
    first = [z.clone()]
    first += ep.down_backward_(dy, w2, first[0], rows, "silu", weights, source)
    second = [z.clone()]
    second += ep.down_backward_(dy, w2, second[0], rows, "silu", weights, source)
    for a, b in zip(first, second, strict=True):
        n = used
        a, b = (a[:, :n], b[:, :n]) if a.shape[0] <= 4 else (a[:n], b[:n])
        assert torch.equal(a, b)
