"""Norm and clipping on one process equal torch's; over meshes the parity tests hold them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from foundry_moe.parallel.gradients import LocalWeight, clip_grad_norm_, clip_value, gradient_norm, scale_gradients

pytestmark = pytest.mark.quick


@pytest.fixture
def rank_1_of_4() -> Iterator[None]:
    """This process as rank 1 of 4, of which the others do not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield
    dist.destroy_process_group()


def _parameters(seed: int) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(3, 5), (7,), (0, 4), (1,), (2, 3, 4)]
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    parameters.append(torch.nn.Parameter(torch.zeros(2)))  # without gradient
    return parameters


@pytest.mark.parametrize("max_norm", [0.1, 1e6])
def test_clip_norm_equals_torch(max_norm: float) -> None:
    ours, theirs = _parameters(1), _parameters(1)
    norm = clip_grad_norm_(ours, max_norm)
    expected = torch.nn.utils.clip_grad_norm_(theirs, max_norm)
    # fp32 norms, summed in fp64 here and in fp32 there
    torch.testing.assert_close(norm.float(), expected, rtol=1e-6, atol=0)
    for a, b in zip(ours, theirs, strict=True):
        if b.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-6, atol=0)


def test_clip_value_equals_torch() -> None:
    ours, theirs = _parameters(2), _parameters(2)
    clip_value(ours, 0.3)
    torch.nn.utils.clip_grad_value_(theirs, 0.3)
    for a, b in zip(ours, theirs, strict=True):
        assert b.grad is None or torch.equal(a.grad, b.grad)


def test_a_single_tensor_is_a_parameter_and_not_its_rows() -> None:
    ours, theirs = (_parameters(3)[0] for _ in range(2))
    norm = torch.nn.utils.clip_grad_norm_(theirs, 0.1)
    assert gradient_norm(ours).item() == pytest.approx(norm.item(), rel=1e-6)
    assert clip_grad_norm_(ours, 0.1).item() == pytest.approx(norm.item(), rel=1e-6)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-6, atol=0)
    for parameter, clip in ((ours, clip_value), (theirs, torch.nn.utils.clip_grad_value_)):
        clip(parameter, 0.01)
    assert torch.equal(ours.grad, theirs.grad)
    scale_gradients(ours, torch.tensor(0.5))
    assert torch.equal(ours.grad, theirs.grad / 2)


def test_norm_of_no_gradients_is_zero() -> None:
    assert gradient_norm([torch.nn.Parameter(torch.zeros(3))]).item() == 0
    assert gradient_norm([]).item() == 0


def test_local_weight_divides_the_gradient_alone() -> None:
    weight = torch.randn(4, 2, requires_grad=True)
    local = LocalWeight(expert=4)(weight)
    assert torch.equal(local, weight)
    local.sum().backward()
    assert torch.equal(weight.grad, torch.full((4, 2), 0.25))


def test_each_element_counts_once_however_many_ranks_hold_it(rank_1_of_4: None) -> None:
    """On one rank of four, whose sums nobody adds: the share of each gradient that it answers for."""
    mesh = init_device_mesh("cpu", (2, 2))
    placements = [([Replicate(), Shard(0)], 2), ([Shard(1), Shard(0)], 1), ([Replicate(), Replicate()], 4)]
    parameters, squares = [], 0.0
    for of_mesh, copies in [*placements, (None, 4)]:
        grad = torch.randn(6, 4)
        parameters.append(torch.nn.Parameter(torch.zeros(6, 4)))
        if of_mesh is not None:
            shape = (6 * (2 if Shard(0) in of_mesh else 1), 4 * (2 if Shard(1) in of_mesh else 1))
            whole = DTensor.from_local(
                torch.zeros(6, 4), mesh, of_mesh, run_check=False, shape=shape, stride=(shape[1], 1)
            )
            parameters[-1] = torch.nn.Parameter(whole)
            grad_of_mesh = DTensor.from_local(grad, mesh, of_mesh, run_check=False, shape=shape, stride=(shape[1], 1))
        parameters[-1].grad = grad if of_mesh is None else grad_of_mesh
        squares += grad.double().square().sum().item() / copies
    assert gradient_norm(parameters).item() == pytest.approx(squares**0.5, rel=1e-6)


def test_a_norm_whose_square_is_beyond_fp32_is_finite() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(9)]
    for parameter in parameters:
        parameter.grad = torch.full((1,), 1e19)
    assert gradient_norm(parameters).item() == pytest.approx(3e19)


def test_a_norm_of_16_bit_gradients_is_not_rounded_to_their_dtype() -> None:
    parameters = [
        torch.nn.Parameter(torch.zeros(n, dtype=dtype))
        for n, dtype in ((10**6, torch.float16), (999, torch.bfloat16), (3, torch.float64))
    ]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 100.0)
    # 100,000 is above fp16's largest number; a CPU adds a million squares in fp32, one after the other
    assert gradient_norm(parameters).item() == pytest.approx(100 * (10**6 + 999 + 3) ** 0.5, rel=1e-3)
    bf16 = gradient_norm(parameters[1]).item()
    assert bf16 == pytest.approx(100 * 999**0.5, rel=1e-6)


@pytest.mark.parametrize("use", [lambda w: w.t(), lambda w: w, lambda w: w @ torch.ones(2, 3)])
def test_local_weight_divides_the_gradient_in_a_compiled_graph_too(use: Callable[[torch.Tensor], torch.Tensor]) -> None:
    weight = torch.randn(4, 2, requires_grad=True)
    local = LocalWeight(expert=4)
    use(weight).sum().backward()
    assert weight.grad is not None
    expected = weight.grad / 4
    weight.grad = None
    torch.compile(lambda w: use(local(w)), backend="aot_eager", fullgraph=True)(weight).sum().backward()
    assert torch.equal(weight.grad, expected)
