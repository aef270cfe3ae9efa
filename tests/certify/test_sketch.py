"""Sketches of shards add up to those of the whole, and steps are recorded once their gradients are there."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from foundry_moe.certify import Record, Recorder, compare, read_record, sketch
from foundry_moe.certify.sketch import SAMPLES, Part
from foundry_moe.schema import plain_name

pytestmark = pytest.mark.quick
# beyond SAMPLES elements of a unit, and below; a stack, a matrix, a vector
SHAPES = [(2, 300, 250), (3, 7, 5), (300, 250), (7, 5), (SAMPLES + 9,), (6,)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_sketches_of_shards_add_up_to_that_of_the_whole(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    whole = torch.randn(shape, dtype=torch.float64).to(dtype)
    expected = sketch.sketch([Part(whole, (0,) * len(shape), shape)], 3)
    stack = len(shape) > 2
    squares = whole.double().square().flatten(1 if stack else 0).sum(-1)
    torch.testing.assert_close(expected[:, 0], squares.reshape(-1), rtol=1e-12, atol=0)
    for dim, length in enumerate(shape):
        sizes = [1, 0, length - 1]
        parts = [
            Part(local, tuple(begin if d == dim else 0 for d in range(len(shape))), shape)
            for local, begin in zip(whole.split(sizes, dim), (0, 1, 1), strict=True)
        ]
        rows = sketch.sketch(parts, 3)
        if stack and dim == 0:
            found = rows
        else:
            found = sum(rows.split(shape[0] if stack else 1))
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-9)  # sums in another order


def test_tensors_of_one_call_have_the_sketches_of_single_calls() -> None:
    kinds = ((SHAPES[1], torch.float32), ((), torch.bfloat16), ((7, 5), torch.float32))
    tensors = [torch.randn(shape).to(dtype) for shape, dtype in kinds]
    parts = [Part(t, (0,) * t.dim(), tuple(t.shape)) for t in [*tensors, *tensors[::-1], torch.zeros(0, 5)]]
    together = sketch.sketch(parts, 2)
    assert torch.equal(together, torch.cat([sketch.sketch([part], 2) for part in parts]))
    assert together[0, 1:].abs().min() > 0 and not torch.equal(together[0, 1:], together[1, 1:])


@pytest.mark.parametrize("samples, kind", [(100, (2, 7, 5)), (100, (9, 7, 5)), (100, (7, 50)), (7, (4,))])
def test_a_call_copies_a_bounded_number_of_elements(
    samples: int, kind: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = [Part(torch.randn(kind), (0,) * len(kind), kind) for _ in range(8)]
    expected = torch.cat([sketch.sketch([part], 2) for part in parts])
    copied: list[int] = []

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = func(*args, **(kwargs or {}))
            if func is torch.ops.aten._to_copy.default:
                copied.append(found.numel())
            return found

    monkeypatch.setattr(sketch, "_SAMPLED_AT_ONCE", samples, raising=False)
    with Copies():
        found = sketch.sketch(parts, 2)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    of_unit = math.prod(kind[1:] if len(kind) > 2 else kind)
    of_a_call = max(samples, of_unit)  # a unit is not divided
    assert max(copied) <= of_a_call and max(copied) > of_a_call - of_unit


def test_a_tensor_is_left_out_only_at_steps_whose_gradient_is_rounding(tmp_path: Path) -> None:
    def run(name: str, factor: float) -> Record:
        model = nn.ParameterDict({"large": torch.ones(5), "small_at_first": torch.ones(5)})
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        recorder = Recorder(model, optimizer, tmp_path / name)
        for size in (1e-9, factor):
            model["large"].grad, model["small_at_first"].grad = torch.ones(5), torch.full((5,), size)
            optimizer.step()
        recorder.close()
        return read_record(tmp_path / name)

    one = run("one", 1.0)
    note = "not compared at steps where their gradients are of rounding size: small_at_first"
    same, differs = compare(one, run("same", 1.0)), compare(one, run("differs", 2.0))
    assert same.same and same.notes == (note,)
    assert differs.first is not None and (differs.first.step, differs.first.kind) == (2, "gradient")


def trained(folder: Path, *, closure: bool, prefix: str = "", scale: float = 1.0) -> None:
    torch.manual_seed(4)
    model = nn.ModuleDict({prefix or "layer": nn.Linear(5, 3)})
    optimizer = torch.optim.AdamW(model.parameters())
    recorder = Recorder(model, optimizer, folder)
    for _ in range(2):
        x = torch.randn(4, 5)

        def backward(x: torch.Tensor = x) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model[prefix or "layer"](x).square().mean() * scale
            loss.backward()
            recorder.batch(loss)
            return loss

        if closure:
            optimizer.step(backward)
        else:
            backward()
            optimizer.step()
    recorder.close()


def test_a_step_with_a_closure_is_recorded_as_one_without(tmp_path: Path) -> None:
    trained(tmp_path / "plain", closure=False)
    trained(tmp_path / "closure", closure=True)
    trained(tmp_path / "scaled", closure=True, scale=1.5)
    plain = read_record(tmp_path / "plain")
    report = compare(plain, read_record(tmp_path / "closure"))
    assert report.same and report.largest == 0.0 and report.steps == (1, 2)
    assert not compare(plain, read_record(tmp_path / "scaled")).same


def test_of_a_closure_that_is_called_again_the_first_gradient_is_recorded(tmp_path: Path) -> None:
    """And with `every` the first step, each multiple of it, and no other."""
    model, squares = nn.Linear(2, 1, bias=False), []
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    recorder = Recorder(model, optimizer, tmp_path, every=2)

    def backward() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model.weight - 3).square().sum()
        loss.backward()
        squares.append(model.weight.grad.double().square().sum().item())
        return loss

    first = []
    for _ in range(4):
        first.append(len(squares))
        optimizer.step(backward)
    recorder.close()
    steps = read_record(tmp_path).steps
    assert [step.number for step in steps] == [1, 2, 4] and first[1] > 1
    for step in steps:
        assert step.kinds["gradient"].rows["weight"][0][0] == pytest.approx(squares[first[step.number - 1]])


def test_records_with_other_names_are_compared_by_a_map(tmp_path: Path) -> None:
    trained(tmp_path / "a", closure=False)
    trained(tmp_path / "b", closure=False, prefix="linear")
    a, b = (read_record(tmp_path / name) for name in "ab")
    assert compare(a, b, rename=lambda name: name.replace("linear", "layer")).same


def test_wrappers_leave_no_trace_in_names() -> None:
    assert plain_name("module.module._orig_mod.a._checkpoint_wrapped_module.module.w") == "a.module.w"
