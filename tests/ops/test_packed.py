"""Experts whose gate and up are one tensor, as published models keep them, against plain torch in fp64.

Shapes: T tokens, K choices, E experts, D model width, F expert width.
"""

import pytest
import torch
from foundry_moe_kernels import expert_products
from foundry_moe_kernels.descriptors import GLUON
from torch import Tensor
from torch.nn import functional as F

from foundry_moe.ops import PermutePlan, blocksparse, expert_plan, packed_mlp, plan_permute
from foundry_moe.ops import compile_ahead as ahead

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
T, K, E, D, HIDDEN = (200, 2, 5, 128, 192) if CUDA else (19, 2, 5, 24, 40)
DTYPES = [torch.float32, torch.bfloat16] if CUDA else [torch.float32]
# 2^-9 of bf16 a few times over; with a clamp also of values that rounding moves across it
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
CLAMPED = "silu 1.702 0.7 1.0"  # GPT-OSS's formula, with a limit that half of the values pass


def operands(gate_up: str | None, transposed: bool, biased: bool, dtype: torch.dtype) -> dict[str, Tensor]:
    torch.manual_seed(0)
    rows = HIDDEN * (2 if gate_up else 1)
    shapes = {"x": (T, D), "weights": (T, K), "w1": (E, rows, D), "w2": (E, D, HIDDEN)}
    shapes |= {"b1": (E, rows), "b2": (E, D)} if biased else {}
    made = {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}
    made["w1"] *= D**-0.5
    made["w2"] *= HIDDEN**-0.5
    made = {name: value.to(DEVICE, dtype) for name, value in made.items()}
    if transposed:
        made |= {name: made[name].mT.contiguous().mT for name in ("w1", "w2")}
    return {name: value.requires_grad_() for name, value in made.items()}


def choices() -> Tensor:
    """Without a token for the last expert, with a token that has no choice, and one that has one."""
    torch.manual_seed(0)
    experts_TK = torch.rand(T, E - 1).argsort(1)[:, :K]
    experts_TK[3], experts_TK[5, 1] = -1, -1
    return experts_TK.to(DEVICE)


def truth(leaf: dict[str, Tensor], experts_TK: Tensor, gate_up: str | None, activation: str, dtype: torch.dtype):
    """y_TD in fp64, of pre-activations that are rounded to the dtype, since a clamp makes more of a difference."""

    def rounded(z: Tensor) -> Tensor:
        return z + (z.to(dtype).double() - z).detach()

    y_TD = torch.zeros_like(leaf["x"])
    for e in range(E):
        t, k = (experts_TK == e).nonzero(as_tuple=True)
        z = rounded(leaf["x"][t] @ leaf["w1"][e].T)
        if "b1" in leaf:
            z = rounded(z + leaf["b1"][e])
        gate, up = (
            (z, None) if gate_up is None else z.chunk(2, 1) if gate_up == "concatenated" else (z[:, ::2], z[:, 1::2])
        )
        if activation == CLAMPED:
            gate, up = gate.clamp(max=0.7), up.clamp(-0.7, 0.7) + 1
            h = gate * torch.sigmoid(1.702 * gate)
        else:
            h = F.silu(gate)
        out = (h if up is None else h * up) @ leaf["w2"][e].T + (leaf["b2"][e] if "b2" in leaf else 0)
        y_TD = y_TD.index_add(0, t, out * leaf["weights"][t, k, None])
    return y_TD


def gradients(y_TD: Tensor, leaf: dict[str, Tensor]) -> dict[str, Tensor]:
    torch.manual_seed(1)
    direction = torch.randn(y_TD.shape, dtype=torch.float64).to(y_TD.device, y_TD.dtype)
    found = torch.autograd.grad(y_TD, list(leaf.values()), direction)
    return {"y": y_TD, **dict(zip(leaf, found, strict=True))}


def packed(
    leaf: dict[str, Tensor], gate_up: str | None, activation: str, memory: str = "save", plan: PermutePlan | None = None
) -> Tensor:
    biases = (leaf["b1"], leaf["b2"]) if "b1" in leaf else None
    return packed_mlp(
        leaf["x"], leaf["weights"], plan or plan_permute(choices(), E), leaf["w1"], leaf["w2"],
        activation=activation, gate_up=gate_up, biases=biases, memory=memory,
    )  # fmt: skip


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """Uninitialised memory holds NaN: what no kernel writes shows."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture(params=["portable", "hopper"])
def kernels(request, monkeypatch):
    """On a CPU the Hopper kernels are their twins."""
    if request.param == "hopper" and not GLUON:
        pytest.skip("the Hopper kernels need Triton 3.6")
    if not CUDA:
        monkeypatch.setattr(expert_plan, "takes_hopper", lambda *_: request.param == "hopper")
        if request.param == "hopper":
            from tests.helpers import hopper_twin

            hopper_twin.stand_in(monkeypatch)
    elif request.param == "portable":
        monkeypatch.setenv("FOUNDRY_MOE_KERNELS", "portable")


@pytest.mark.parametrize("transposed", [False, True], ids=["contiguous", "transposed"])
@pytest.mark.parametrize("biased", [False, True], ids=["no bias", "biased"])
@pytest.mark.parametrize(
    ("gate_up", "activation"),
    [
        (None, "silu"),
        ("concatenated", "silu"),
        ("concatenated", CLAMPED),
        ("interleaved", "silu"),
        ("interleaved", CLAMPED),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_outputs_and_every_gradient_are_those_of_fp64(kernels, gate_up, activation, biased, transposed, dtype):
    leaf = operands(gate_up, transposed, biased, dtype)
    ours = gradients(packed(leaf, gate_up, activation), leaf)
    exact = {name: value.detach().double().requires_grad_() for name, value in leaf.items()}
    theirs = gradients(truth(exact, choices(), gate_up, activation, dtype), exact)
    for name, value in ours.items():
        error = float((value.double() - theirs[name]).norm() / theirs[name].norm())
        assert error < TOLERANCE[dtype], (name, error)
    for name in ("w1", "w2"):  # as the parameter lies, so that autograd keeps it without a copy
        assert ours[name].stride() == leaf[name].stride()
        assert (ours[name][E - 1] == 0).all()


@pytest.mark.parametrize("gate_up", ["concatenated", "interleaved"])
def test_recompute_gives_the_bits_of_save(kernels, gate_up):
    leaf = operands(gate_up, False, True, torch.float32)
    save, recompute = (gradients(packed(leaf, gate_up, "silu", memory), leaf) for memory in ("save", "recompute"))
    for name in save:
        assert torch.equal(save[name], recompute[name]), name


@pytest.mark.parametrize("transposed", [False, True], ids=["contiguous", "transposed"])
def test_products_that_gather_tokens_give_the_bits_of_copied_rows(kernels, transposed, monkeypatch):
    monkeypatch.setitem(globals(), "D", 256)
    leaf, found = operands("concatenated", transposed, False, DTYPES[-1]), {}
    for gathers in (False, True):
        monkeypatch.setattr(expert_products, "gathers", lambda *_, backward=False, gathers=gathers: gathers)
        found[gathers] = gradients(packed(leaf, "concatenated", "silu"), leaf)
    for name, copied in found[False].items():
        assert torch.equal(copied, found[True][name]), name


def test_halves_of_one_tensor_give_the_results_of_two_tensors(kernels):
    from foundry_moe.ops import expert_mlp

    leaf = operands("concatenated", False, False, torch.float32)
    ours = gradients(packed(leaf, "concatenated", "silu"), leaf)
    w1, v1 = (half.detach().contiguous().requires_grad_() for half in leaf["w1"].chunk(2, 1))
    y_TD = expert_mlp(
        leaf["x"], leaf["weights"], plan_permute(choices(), E), w1, v1, leaf["w2"], activation="silu",
        backend="blocksparse",
    )  # fmt: skip
    theirs = gradients(y_TD, {"x": leaf["x"], "w1": w1, "v1": v1, "w2": leaf["w2"]})
    theirs["w1"] = torch.cat([theirs["w1"], theirs["v1"]], dim=1)
    for name in ("y", "x", "w1", "w2"):  # planes may be summed in another order
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("gate_up", ["concatenated", "interleaved"])
def test_surrounding_model_compiles_without_a_graph_break(gate_up):
    leaf, plan = operands(gate_up, True, True, DTYPES[-1]), plan_permute(choices(), E)

    def model(x: Tensor) -> Tensor:
        return torch.tanh(packed({**leaf, "x": 2 * x}, gate_up, CLAMPED, plan=plan))

    results = []
    for call in (model, torch.compile(model, fullgraph=True, backend="inductor" if CUDA else "aot_eager")):
        y_TD = call(leaf["x"])
        results.append([y_TD, *torch.autograd.grad(y_TD.float().square().sum(), list(leaf.values()))])
    for ours, theirs in zip(*results, strict=True):
        assert float((theirs - ours).float().norm() / ours.float().norm()) < (3e-2 if CUDA else 1e-6)


@pytest.mark.skipif(CUDA, reason="kernels would be compiled")
@pytest.mark.parametrize("biased", [False, True], ids=["no bias", "biased"])
@pytest.mark.parametrize("transposed", [False, True], ids=["contiguous", "transposed"])
@pytest.mark.parametrize("gate_up", [None, "concatenated", "interleaved"])
def test_operands_that_are_compiled_ahead_lie_as_those_of_the_layer(kernels, gate_up, transposed, biased, monkeypatch):
    runs, seen = [], []
    monkeypatch.setattr(ahead, "run_once", lambda kind, plan, run: runs.append(run))
    for name in ("_up", "_down"):
        function = getattr(blocksparse, name)
        monkeypatch.setattr(blocksparse, name, lambda *args, function=function: seen.append(args) or function(*args))
    leaf = operands(gate_up, transposed, biased, torch.float32)
    packed(leaf, gate_up, "silu")
    runs[0]()
    w1, v1, bias = seen[0][1:4]
    assert v1 is None and (bias is not None) == biased
    assert w1.shape[1:] == leaf["w1"].shape[1:] and (w1.stride(-1) == 1) == (leaf["w1"].stride(-1) == 1)
    assert seen[1][2].stride()[1:] == leaf["w2"].stride()[1:]


@pytest.mark.quick
def test_wrong_use_names_what_does_not_fit():
    leaf = operands("concatenated", False, False, torch.float32)
    with pytest.raises(ValueError, match=r"gate_up \('halves'\) must be concatenated, interleaved or None"):
        packed(leaf, "halves", "silu")
    with pytest.raises(ValueError, match=r"w2 \(.*\) must be \(5, \d+, \d+\) to fit w1"):
        packed(leaf, None, "silu")
    with pytest.raises(ValueError, match="activation 'selu' is not one of"):
        packed(leaf, "concatenated", "selu")
    for change, words in {
        "b1": r"the bias of w1 must be \[5, \d+\], not \[5, 1\]",
        "b2": r"the bias of w2 must be \[5, \d+\], not \[5, 1\]",
    }.items():
        leaf = operands("concatenated", False, True, torch.float32)
        with pytest.raises(ValueError, match=words):
            packed({**leaf, change: leaf[change][:, :1]}, "concatenated", "silu")
    with pytest.raises(ValueError, match=r"the bias is torch\.float64 on"):
        packed({**leaf, "b2": leaf["b2"].double()}, "concatenated", "silu")
    for change, words in {"x": r"x_TD .* must be \[\d+, D\]", "weights": "as the plan's choices are"}.items():
        with pytest.raises(ValueError, match=words):
            packed({**leaf, change: leaf[change][1:]}, "concatenated", "silu")
