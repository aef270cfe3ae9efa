"""Muon equals torch's matrix by matrix on one process, and leaves to AdamW what is no hidden matrix."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from foundry_moe_kernels import symmetric_products
from torch import Tensor, nn

from foundry_moe import Muon
from foundry_moe.algorithms.parameter_rules import apply_rules
from foundry_moe.optim import muon, newton_schulz
from foundry_moe.optim.decoupled import DecoupledAdamWFused
from foundry_moe.optim.matrices import Part, find_matrices
from foundry_moe.schema import UserError
from tests.helpers.small_training import CASES, LORA, Case, build_model

pytestmark = pytest.mark.quick

LR, ADAMW_LR, DECAY, STEPS = 0.02, 0.003, 0.1, 3
HIDDEN = {"mix.weight", "w1_EFD", "v1_EFD", "w2_EDF", "w1_HD", "v1_HD", "w2_HD", "w1.weight", "v1.weight", "w2.weight"}


class Fused(nn.Module):
    """Experts as transformers 5 stores them: gate and up in one tensor, below, beside, or between one another."""

    def __init__(self, *, is_transposed: bool = False, is_concatenated: bool = True) -> None:
        super().__init__()
        self.is_transposed, self.is_concatenated = is_transposed, is_concatenated
        self.gate_up_proj = nn.Parameter(torch.randn((3, 10, 24) if is_transposed else (3, 24, 10)))
        self.down_proj = nn.Parameter(torch.randn(3, 10, 12))

    def matrices(self, tensor: Tensor) -> list[Tensor]:
        """Gate and up of all experts."""
        rows = tensor.mT if self.is_transposed else tensor
        pairs = rows.chunk(2, dim=1) if self.is_concatenated else (rows[:, ::2], rows[:, 1::2])
        return [part for pair in pairs for part in pair]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.embed, self.head = nn.Embedding(50, 10), nn.Linear(10, 50, bias=False)
        self.tall, self.wide, self.gate = nn.Linear(10, 24), nn.Linear(24, 10), nn.Linear(10, 4)
        self.experts = nn.ModuleList([Fused(), Fused(is_transposed=True), Fused(is_concatenated=False)])


def matrices_of(model: Model, values: Mapping[str, Tensor]) -> list[Tensor]:
    """Views of all hidden matrices, of the parameters or of tensors of their shapes."""
    found = [values["tall.weight"], values["wide.weight"]]
    for index, experts in enumerate(model.experts):
        found += experts.matrices(values[f"experts.{index}.gate_up_proj"])  # type: ignore[operator]
        found += values[f"experts.{index}.down_proj"].unbind()
    return found


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, factor: float = 1.0) -> None:
    """One step at a falling rate, on random gradients times `factor`."""
    generator = torch.Generator().manual_seed(number)
    for parameter in model.parameters():
        parameter.grad = factor * torch.randn(parameter.shape, generator=generator)
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * 0.7**number
    optimizer.step()


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch 2.7 has no Muon")
@pytest.mark.parametrize("together", [2**27, 300])  # one batch of equal matrices, or one of each matrix
def test_each_matrix_is_updated_as_torchs_muon_does(monkeypatch: pytest.MonkeyPatch, together: int) -> None:
    monkeypatch.setattr(muon, "TOGETHER", together)
    model = Model()
    theirs = [nn.Parameter(matrix.clone()) for matrix in matrices_of(model, dict(model.named_parameters()))]
    ours = Muon(model.parameters(), model=model, lr=LR, weight_decay=LR * DECAY)
    reference = torch.optim.Muon(theirs, lr=LR, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw")
    for number in range(STEPS):
        step(model, ours, number)
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        for parameter, grad in zip(theirs, matrices_of(model, gradients), strict=True):  # type: ignore[arg-type]
            parameter.grad = grad.contiguous()
        reference.param_groups[0]["lr"] = ours.param_groups[0]["lr"]
        reference.step()
    updated = matrices_of(model, dict(model.named_parameters()))
    assert len(updated) == 2 + 3 * 9
    for matrix, parameter in zip(updated, theirs, strict=True):
        torch.testing.assert_close(matrix, parameter, rtol=0, atol=2e-5)  # of products in bf16 in another order


def gradients_of_kinds(rows: int, columns: int) -> dict[str, Tensor]:
    """Matrices of which each stresses rounding in another way."""
    n = min(rows, columns)
    normal = torch.randn(rows, columns)
    left, _, right = torch.linalg.svd(normal, full_matrices=False)
    ranks = {f"rank {rank}": torch.randn(rows, rank) @ torch.randn(rank, columns) for rank in (1, n // 8)}
    falling = {
        "condition 1e6": torch.logspace(0, -6, n),
        "one over k": 1 / torch.arange(1, n + 1),
        "orthogonal": torch.ones(n),
    }
    spectra = {name: (left * values) @ right for name, values in falling.items()}
    half = normal.clone()
    half[: rows // 2] = 0
    noisy = ranks["rank 1"] + 1e-3 * normal
    return {"normal": normal, **ranks, **spectra, "a half of zeros": half, "rank 1 and noise": noisy}


@pytest.mark.parametrize(("rows", "columns"), [(64, 128), (128, 64), (72, 72)])
def test_gram_matrices_give_the_polynomial_nearer_than_bf16_does(
    monkeypatch: pytest.MonkeyPatch, rows: int, columns: int
) -> None:
    """Without the restart, in bf16, or with a Gram matrix that is not symmetric to the last bit this fails."""
    monkeypatch.setattr(symmetric_products, "TILE", {"SIDE": 32, "BK": 32, "num_stages": 2, "num_warps": 4})
    kinds = gradients_of_kinds(rows, columns)
    x = torch.stack(list(kinds.values())).bfloat16()
    norm = x.double().norm(dim=(1, 2), keepdim=True)
    exact = newton_schulz.iterate(x.double() / norm, 5)
    monkeypatch.setattr(newton_schulz, "supported", lambda x: x.dtype == torch.bfloat16)
    # a rank without matrices receives what its peers send: all results have one dtype
    assert newton_schulz.orthogonalize(x[:0]).dtype == newton_schulz.orthogonalize(x[:1]).dtype == torch.float16
    results = {
        "gram": newton_schulz.orthogonalize(x),
        "bf16": newton_schulz.iterate(x / norm.bfloat16(), 5),
    }
    errors = {name: (y.double() - exact).norm(dim=(1, 2)) / exact.norm(dim=(1, 2)) for name, y in results.items()}
    assert (errors["gram"] < errors["bf16"]).all(), errors
    assert (errors["gram"] < 0.11).all(), errors  # of rank 1 and noise; 0.7 in bf16
    assert torch.linalg.svdvals(results["gram"].double()).max() < 1.21  # the polynomial's largest value: 1.2055
    steps = newton_schulz.iterate(x.double() / norm, 2)  # one segment alone
    two = newton_schulz.iterate_on_gram((x / norm).half(), 2).double()
    torch.testing.assert_close(two, steps, rtol=0, atol=0.01)


def test_a_step_with_kernels_equals_one_without(monkeypatch: pytest.MonkeyPatch) -> None:
    models = [Model(), Model()]
    for model, kernel in zip(models, (True, False), strict=True):
        monkeypatch.setattr(
            muon, "_fits_kernel", lambda *tensors, k=kernel: k and all(t.stride(2) == 1 for t in tensors)
        )
        optimizer = Muon(model.parameters(), model=model, lr=LR, weight_decay=0.01, dtype="float32")
        for number in range(STEPS):
            optimizer.gradient_factor = torch.tensor(0.5**number)  # a constant one would not change directions
            step(model, optimizer, number)
    assert models[0].tall.weight._version >= STEPS, "autograd must see that a tensor was written"
    for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)  # iterations amplify rounding of momentum


def test_other_parameters_are_updated_as_by_adamw() -> None:
    model, copied = Model(), Model()
    ours = Muon(model.parameters(), model=model, lr=LR, adamw_lr=ADAMW_LR, weight_decay=0.01)
    theirs = DecoupledAdamWFused(copied.parameters(), lr=ADAMW_LR, weight_decay=0.01)
    for number in range(STEPS):
        step(model, ours, number)
        step(copied, theirs, number)
    updated = dict(copied.named_parameters())
    for name in ("embed.weight", "head.weight", "gate.weight", "gate.bias", "tall.bias", "wide.bias"):
        torch.testing.assert_close(model.get_parameter(name), updated[name])
    kept = {name: set(ours.state[parameter]) for name, parameter in model.named_parameters()}
    assert kept["experts.0.gate_up_proj"] == kept["wide.weight"] == {"momentum_buffer"}
    assert kept["head.weight"] == {"step", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize(
    "case", [*CASES, Case(name="adapters", moe={**CASES[0].moe, "lora": LORA})], ids=lambda c: c.name
)
def test_hidden_matrices_of_a_model_with_experts(case: Case) -> None:
    model = build_model(case, torch.float32, torch.device("cpu"))
    found = find_matrices(model)
    names = {name for name, parameter in model.named_parameters() if found[parameter] is not None}
    assert {
        name
        for name in names
        if name.split(".", 2)[-1].removeprefix("ffn.experts.").removeprefix("ffn.shared_expert.") not in HIDDEN
    } == set()
    held = {name.rsplit(".", 1)[-1] for name in names}
    assert {"weight", "w1_HD" if "widths" in case.name else "w1_EFD"} <= held
    assert (
        not {name for name, _ in model.named_parameters() if "_EFD" in name or "_HD" in name or "_EDF" in name} - names
    )


def test_a_factor_scales_gradients_and_a_copied_state_continues() -> None:
    model = Model()
    optimizer = Muon(model.parameters(), model=model, lr=LR)
    optimizer.gradient_factor = torch.tensor(0.25)
    step(model, optimizer, 0)
    scaled = copy.deepcopy([state["momentum_buffer"] for state in optimizer.state.values() if "step" not in state])
    again = Model()
    other = Muon(again.parameters(), model=again, lr=LR)
    step(again, other, 0, factor=0.25)
    for ours, theirs in zip(
        scaled, (s["momentum_buffer"] for s in other.state.values() if "step" not in s), strict=True
    ):
        assert torch.equal(ours, theirs)
    resumed = Model()
    resumed.load_state_dict(again.state_dict())
    third = Muon(resumed.parameters(), model=resumed, lr=1.0)
    third.load_state_dict(copy.deepcopy(other.state_dict()))
    step(again, other, 1)
    step(resumed, third, 1)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), resumed.parameters(), strict=True))


def test_a_frozen_matrix_with_a_gradient_of_before_stays() -> None:
    model = Model()
    before = model.wide.weight.detach().clone()
    model.wide.weight.requires_grad_(False)
    optimizer = Muon(model.parameters(), model=model, lr=LR, weight_decay=LR * DECAY)
    step(model, optimizer, 0)
    assert torch.equal(model.wide.weight, before) and not optimizer.state[model.wide.weight]


@pytest.mark.parametrize("adamw_lr", [None, ADAMW_LR])
def test_groups_have_rates_of_their_own(adamw_lr: float | None) -> None:
    model = Model()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    groups: list[dict[str, Any]] = [{"params": list(model.parameters())}, {"params": [], "lr": 0.0}]
    optimizer = Muon(groups, model=model, lr=LR, adamw_lr=adamw_lr)
    apply_rules(model, [optimizer], {"param_groups": ["experts.1|embed"]})
    step(model, optimizer, 0)
    moved = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert {name for name in before if name not in moved} == {
        "embed.weight", "experts.1.gate_up_proj", "experts.1.down_proj"
    }  # fmt: skip


def test_a_group_without_an_adamw_rate_of_its_own_uses_its_rate_for_all_parameters() -> None:
    rates = [{}, {"lr": 0.1}, {"lr": 0.1, "adamw_lr": 0.2}, {"adamw_lr": 0.4}]
    expected = [ADAMW_LR, 0.1, 0.2, 0.4]
    for keys, rate in zip(rates, expected, strict=True):
        model = Model()
        before = model.embed.weight.detach().clone()
        optimizer = Muon([{"params": list(model.parameters()), **keys}], model=model, lr=LR, adamw_lr=ADAMW_LR)
        step(model, optimizer, 1, factor=1e3)  # the first update of AdamW is its rate, at 0.7 of the schedule
        torch.testing.assert_close(
            (model.embed.weight - before).abs(), torch.full_like(before, 0.7 * rate), rtol=1e-3, atol=1e-4
        )
    with pytest.raises(UserError, match=r"muon.lr \(0\) with adamw_lr \(0.003\).* lr must be above 0"):
        Muon(model.parameters(), model=model, lr=0.0, adamw_lr=ADAMW_LR)


def test_a_model_is_needed() -> None:
    model = Model()
    model.embed.weight.grad = torch.ones(50, 10)
    with pytest.raises(UserError, match=r"Muon\(params, model=model\)"):
        Muon(model.parameters()).step()
    with pytest.raises(UserError, match="not one of its model"):
        Muon([nn.Parameter(torch.ones(2, 2))], model=model).step()
    for dtype in ("half a float", "float16", "int64", "bool"):
        with pytest.raises(UserError, match=rf"muon.dtype \({dtype}\) must be bfloat16, float32 or float64"):
            Muon(model.parameters(), dtype=dtype)


@pytest.mark.parametrize(
    ("key", "value", "valid"),
    [
        *((key, value, "0 or more") for key in ("lr", "adamw_lr", "eps", "weight_decay") for value in (-1.0, math.nan)),
        *(("ns_steps", value, "1 or more") for value in (0, -1, 2.5)),
        *(("momentum", value, "0 or more and below 1") for value in (1, 2, -0.1)),
        *(("betas", value, "two numbers from 0 to below 1") for value in ((1.0, 0.9), (0.9, 1.0), (0.9,))),
        ("dtype", "int8", "bfloat16, float32 or float64"),
    ],
)
def test_invalid_values_are_refused_also_in_a_group(key: str, value: Any, valid: str) -> None:
    model = Model()
    groups = [list(model.parameters()), [{"params": list(model.parameters()), key: value}]]
    for group, keys in zip(groups, ({key: value}, {}), strict=True):
        with pytest.raises(UserError, match=rf"^muon.{key} \({re.escape(str(value))}\) must be {valid}"):
            Muon(group, model=model, **keys)


class WithPositions(nn.Module):
    """A model of transformers whose table of positions is larger than its vocabulary, and as large as `up`."""

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.embed = nn.Embedding(64, 8), nn.Embedding(32, 8)
        self.conv, self.up, self.score = nn.Conv1d(8, 8, 4), nn.Linear(8, 64), nn.Linear(8, 1)
        self.lm_head = nn.Linear(8, 32)

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head


def test_the_head_is_the_models_own_and_convolutions_are_not_matrices() -> None:
    model = WithPositions()
    found = find_matrices(nn.Sequential(model))
    assert {name for name, parameter in model.named_parameters() if found[parameter] is not None} == {"up.weight"}


def test_without_a_head_of_its_own_matrices_as_large_as_the_largest_embedding_are_none() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kinds, self.embed, self.places = nn.Embedding(2, 8), nn.Embedding(32, 8), nn.Embedding(16, 8)
            self.head, self.up, self.pair = nn.Linear(8, 32), nn.Linear(8, 16), nn.Linear(8, 2)

    model = Plain()
    found = find_matrices(model)
    assert {name for name, parameter in model.named_parameters() if found[parameter]} == {"up.weight", "pair.weight"}


def test_an_expert_without_tokens_stays_where_it_is() -> None:
    """Its gradient is zero: no direction, and no NaN."""
    model = Model()
    experts = model.experts[0]
    before = experts.gate_up_proj.detach().clone()
    optimizer = Muon(model.parameters(), model=model, lr=LR, weight_decay=0.0)
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        experts.gate_up_proj.grad[1] = 0
        optimizer.step()
    assert torch.equal(experts.gate_up_proj[1], before[1]) and bool(torch.isfinite(experts.gate_up_proj).all())
    assert not torch.equal(experts.gate_up_proj[0], before[0])


def test_which_rank_computes_a_matrix_does_not_depend_on_batches_of_other_ranks() -> None:
    """Ranks that hold experts of different widths have different numbers of their batches."""

    def turns(widths: list[int]) -> list[int]:
        matrices = [matrix("all", 8), *(matrix("experts", width) for width in widths), matrix("all", 4)]
        return [turn for turn, batch in muon._batches(matrices) if batch[0].part.group == "all"]

    def matrix(group: Any, columns: int) -> muon._Matrix:
        part = Part(
            stack=slice(0, 1), across=1, block=slice(None), turned=False, heights=(2, 2), columns=columns, group=group
        )
        rows = torch.zeros(1, 2, columns)
        return muon._Matrix(part=part, weight=rows, grad=rows, momentum=rows)

    assert turns([8, 8]) == turns([4, 12]) == [0, 1]
