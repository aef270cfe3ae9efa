"""`decoupled_adamw_fused` updates as Composer's DecoupledAdamW does, on gradients that `gradient_factor` scales."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from composer.optim import DecoupledAdamW
from torch import nn

from foundry_moe.optim import adamw
from foundry_moe.optim.decoupled import DecoupledAdamWFused
from foundry_moe.optim.muon import Muon

pytestmark = pytest.mark.quick

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KEYS = {"lr": 0.03, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 1e-4}
SHAPES = [(), (1,), (3, 5), (0, 4), (2, 1024), (2049,)]  # a rank may have an empty shard


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(DEVICE)) for shape in SHAPES]


def train(optimizer: torch.optim.Optimizer, fused: bool, factor: float) -> list[torch.Tensor]:
    """Five steps at a falling rate; gradients are scaled before the step where the optimizer does not scale them."""
    group = optimizer.param_groups[0]
    generator = torch.Generator().manual_seed(5)
    for step in range(5):
        group["lr"] = 0.03 * 0.8**step
        for parameter in group["params"]:
            grad = torch.randn(parameter.shape, generator=generator).to(DEVICE)
            parameter.grad = grad if fused else grad * factor
        if isinstance(optimizer, DecoupledAdamWFused) and factor != 1:
            optimizer.gradient_factor = torch.tensor(factor, dtype=torch.float64, device=DEVICE)
        optimizer.step()
    state = [optimizer.state[parameter][key] for parameter in group["params"] for key in ("exp_avg", "exp_avg_sq")]
    return [parameter.detach() for parameter in group["params"]] + state


@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize("factor", [1.0, 0.37])
def test_updates_equal_decoupled_adamw(monkeypatch: pytest.MonkeyPatch, kernel: bool, factor: float) -> None:
    monkeypatch.setattr(adamw, "_fits_kernel", lambda *_: kernel)
    expected = train(DecoupledAdamW(parameters(), **KEYS), False, factor)
    updated = train(DecoupledAdamWFused(parameters(), **KEYS), True, factor)
    if kernel:
        assert all(tensor._version >= 5 for tensor in updated if tensor.numel()), (
            "autograd must see that a tensor was written"
        )
    for ours, theirs in zip(updated, expected, strict=True):
        # fp32 in another order of rounding, five steps
        torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=2e-7)


def test_a_loaded_state_continues_at_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adamw, "_fits_kernel", lambda *_: True)

    def update(optimizer: DecoupledAdamWFused, times: int) -> torch.Tensor:
        """The last of some equal steps from weights of zero, which decay leaves alone."""
        (parameter,) = optimizer.param_groups[0]["params"]
        for _ in range(times):
            parameter.data.zero_()
            parameter.grad = torch.full_like(parameter, 0.3)
            optimizer.step()
        return parameter.detach().clone()

    optimizer = DecoupledAdamWFused([nn.Parameter(torch.zeros(3, device=DEVICE))], **KEYS)
    update(optimizer, 1)
    state = copy.deepcopy(optimizer.state_dict())
    second = update(optimizer, 1)
    update(optimizer, 3)
    optimizer.load_state_dict(state)
    assert torch.equal(update(optimizer, 1), second)


def test_a_frozen_parameter_keeps_its_value_and_a_bf16_one_counts_beyond_256() -> None:
    frozen, parameter = (nn.Parameter(torch.ones(3, dtype=torch.bfloat16, device=DEVICE)) for _ in range(2))
    optimizer = DecoupledAdamWFused([frozen, parameter], lr=0.1)
    for number in range(2):
        frozen.grad = parameter.grad = torch.ones_like(parameter)
        frozen.requires_grad_(False)
        optimizer.step()
        if not number:
            optimizer.state[parameter]["step"].fill_(256)  # 257 is no number of bf16
    assert (frozen == 1).all() and not optimizer.state[frozen]
    assert optimizer.state[parameter]["step"].item() == 257


def test_factor_holds_for_one_step_and_leaves_gradients() -> None:
    parameter = nn.Parameter(torch.ones(3, device=DEVICE))
    optimizer = DecoupledAdamWFused([parameter], lr=0.1, weight_decay=0.0)
    parameter.grad = torch.full((3,), 2.0, device=DEVICE)
    optimizer.gradient_factor = torch.tensor(0.0, device=DEVICE)
    optimizer.step()
    assert (parameter == 1).all() and (parameter.grad == 2).all()
    optimizer.step()
    assert (parameter < 1).all()


def updated_as_by_composer(make: Callable[[], nn.Parameter], lr: object = 0.03, factor: float = 1.0) -> None:
    """Three steps of both optimizers at a falling rate give one result."""
    results = []
    for kind in (DecoupledAdamWFused, DecoupledAdamW):
        parameter = make()
        optimizer = kind([parameter], **{**KEYS, "lr": lr, "weight_decay": 0.1})
        generator = torch.Generator().manual_seed(5)
        for step in range(3):
            grad = torch.randn(parameter.shape, generator=generator).to(parameter)  # its strides are those of its shape
            parameter.grad = grad if kind is DecoupledAdamWFused else grad * factor
            optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["initial_lr"] * 0.8**step
            if kind is DecoupledAdamWFused and factor != 1:
                optimizer.gradient_factor = torch.tensor(factor, dtype=torch.float64, device=DEVICE)
            optimizer.step()
        results.append((parameter.detach(), optimizer.state[parameter]["exp_avg"]))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize(
    "view",
    [lambda x: x.t(), lambda x: x[:, :5], lambda x: x[:, 5:], lambda x: x[::2]],
    ids=["transposed", "left columns", "right columns", "every other row"],
)
def test_parameters_of_any_strides_are_updated(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    stored = torch.randn(6, 10, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    held: list[torch.Tensor] = []

    def make() -> nn.Parameter:
        held.append(stored.clone())
        return nn.Parameter(view(held[-1]))

    updated_as_by_composer(make, factor=0.37)
    for whole in held:
        view(whole).copy_(view(stored))
        assert torch.equal(whole, stored), "numbers beside the view were written"


@pytest.mark.parametrize("kernel", [True, False])
def test_a_group_at_a_rate_of_zero_decays_as_composers(monkeypatch: pytest.MonkeyPatch, kernel: bool) -> None:
    monkeypatch.setattr(adamw, "_fits_kernel", lambda *_: kernel)
    updated_as_by_composer(lambda: nn.Parameter(torch.ones(4, device=DEVICE)), lr=0.0)


def test_gradients_of_each_dtype_are_scaled_by_a_factor_of_full_precision() -> None:
    narrow, wide = nn.Parameter(torch.ones(3, dtype=torch.bfloat16)), nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = DecoupledAdamWFused([narrow, wide], lr=0.1)
    for parameter in (narrow, wide):
        parameter.grad = torch.ones_like(parameter)
    optimizer.gradient_factor = torch.tensor(1 / 3, dtype=torch.float64)
    optimizer.step()
    torch.testing.assert_close(optimizer.state[wide]["exp_avg"], torch.full_like(wide, 0.1 / 3))


def test_a_rate_given_as_a_tensor_keeps_its_first_value() -> None:
    optimizer = DecoupledAdamWFused([nn.Parameter(torch.ones(3))], lr=torch.tensor(0.01))
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.1)
    (group,) = optimizer.param_groups
    assert group["lr"] == pytest.approx(0.001) and group["initial_lr"] == pytest.approx(0.01)


def test_numbers_of_numpy_are_taken_as_pythons() -> None:
    given = {"lr": np.float32(0.5), "weight_decay": np.float32(0.25), "eps": np.float64(1e-8)}
    for optimizer in (DecoupledAdamWFused, Muon):
        betas, mask = (np.float64(0.5), np.float64(0.75)), torch.ones(3)  # a caller's own entry stays
        groups = [{"params": [nn.Parameter(torch.ones(3))], "betas": betas, "mask": mask}]
        (group,) = optimizer(groups, **given).param_groups
        assert [type(beta) for beta in group["betas"]] == [float, float] and group["mask"] is mask
        assert {key: type(group[key]) for key in given} == dict.fromkeys(given, float)
        assert (group["lr"], group["weight_decay"], group["eps"]) == (0.5, 0.25, 1e-8)
