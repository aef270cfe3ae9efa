"""What a step leaves in a record, on one process; other ranks' parts are made by hand."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from foundry_moe.certify import Recorder, compare, read_record
from foundry_moe.certify.record import NONE, NUMBERS, Held, RecordWriter
from foundry_moe.schema import UserError

pytestmark = pytest.mark.quick


def model() -> torch.nn.Linear:
    made = torch.nn.Linear(3, 2, bias=False)
    with torch.no_grad():
        made.weight.copy_(torch.arange(6.0).view(2, 3))
    return made


def norm_of(rows: Any) -> float:
    return float(sum(row[0] for row in rows)) ** 0.5


def test_a_record_begins_with_the_first_step_and_has_each_multiple(tmp_path: Path) -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    for recorded, number in ((False, 3), (True, 5)):
        if recorded:  # a resume: the optimizer's states say how many steps were done
            Recorder(net, optimizer, tmp_path, every=3)
        for _ in range(number):
            net(torch.ones(3)).sum().backward()
            optimizer.step()
    found = read_record(tmp_path)
    assert found.begin.number == 3 and [step.number for step in found.steps] == [4, 6]
    assert {"weight", "gradient", "state exp_avg", "state exp_avg_sq"} == found.steps[1].kinds.keys()


def test_losses_microbatches_and_tokens_are_those_of_each_step(tmp_path: Path) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    recorder = Recorder(net, optimizer, tmp_path)
    ids = torch.arange(12).view(4, 3)
    batches = [[ids[:2], ids[2:]], [ids], [ids.flip(0)[:3], ids[:1]], [ids[:2]], [ids.t().reshape(4, 3)]]
    for number, microbatches in enumerate(batches):
        optimizer.zero_grad()
        for part in microbatches:
            net(torch.ones(3)).sum().backward()
            recorder.batch(torch.tensor(float(number + len(part))), part)
        optimizer.step()
    steps = read_record(tmp_path).steps
    assert [step.microbatches for step in steps] == [2, 1, 2, 1, 1]
    assert [step.tokens for step in steps] == [12, 12, 12, 6, 12]
    assert [step.mean_loss for step in steps] == [2.0, 5.0, 4.0, 5.0, 8.0]
    whole, *others = (step.batch for step in steps)
    assert others[:2] == [whole, whole], "the same sequences in another order and division"
    assert len({whole, *others[2:]}) == 3
    assert [norm_of(step.kinds["unclipped"].rows["weight"]) for step in steps[:2]] == pytest.approx([24**0.5, 6**0.5])


def test_gradients_of_a_closure_are_those_of_its_first_call(tmp_path: Path) -> None:
    for way in ("positional", "by name"):
        net, calls = model(), []
        optimizer = torch.optim.LBFGS(net.parameters(), max_iter=3)
        Recorder(net, optimizer, tmp_path / way)

        def closure(net=net, calls=calls, optimizer=optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss = net(torch.ones(3)).square().sum()
            loss.backward()
            calls.append(net.weight.grad.norm().item())
            return loss

        optimizer.step(closure) if way == "positional" else optimizer.step(closure=closure)
        (step,) = read_record(tmp_path / way).steps
        assert len(calls) > 1 and norm_of(step.kinds["gradient"].rows["weight"]) == pytest.approx(calls[0])


def test_a_loss_is_one_number(tmp_path: Path) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    recorder = Recorder(net, optimizer, tmp_path)
    loss = net(torch.ones(3)).sum()
    loss.backward()
    for given in (0.1, loss, loss.detach().view(1)):
        recorder.batch(given)
    with pytest.raises(UserError, match=r"the loss has shape \[2\]: give `batch` one number"):
        recorder.batch(loss * torch.ones(2))
    optimizer.step()
    assert read_record(tmp_path).steps[0].mean_loss == (0.1 + 2 * loss.item()) / 3


def test_settings_are_those_of_each_step(tmp_path: Path) -> None:
    net = torch.nn.Sequential(model(), torch.nn.Linear(2, 2))
    groups = [
        {"params": [net[1].weight, net[0].weight], "weight_decay": 0.1, "lr": torch.tensor(0.5), "foreach": False},
        {"params": [net[1].bias, torch.nn.Parameter(torch.zeros(1))], "betas": (0.5, 0.75)},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.25, weight_decay=0.0, amsgrad=True)
    Recorder(net, optimizer, tmp_path, every=2)
    for lr in (0.25, 0.125, 0.0625, 0.03125):
        optimizer.param_groups[1]["lr"] = lr
        net(torch.ones(3)).sum().backward()
        optimizer.step()
    steps = read_record(tmp_path).steps
    assert [step.settings["1.bias"]["lr"] for step in steps] == [0.25, 0.125, 0.03125]
    of_step = steps[0].settings
    assert of_step.keys() == {"0.weight", "1.weight", "1.bias"}
    common = {"eps": 1e-8, "amsgrad": 1.0, "maximize": 0.0}
    found = {key: value for key, value in of_step["0.weight"].items() if key != "decoupled_weight_decay"}
    assert found == {"lr": 0.5, "weight_decay": 0.1, "betas[0]": 0.9, "betas[1]": 0.999, **common}
    assert of_step["1.weight"] == of_step["0.weight"]
    assert of_step["1.bias"].items() >= {"weight_decay": 0.0, "betas[0]": 0.5, "betas[1]": 0.75, **common}.items()


SGD, ADAMW = torch.optim.SGD, partial(torch.optim.AdamW, lr=1e-3)


@pytest.mark.parametrize(
    ("ours", "theirs", "named"),
    [
        (partial(SGD, lr=1e-5), partial(SGD, lr=2e-5), "lr of weight at step 1 is 2e-05 in place of 1e-05"),
        (ADAMW, partial(ADAMW, weight_decay=0.0), "weight_decay of weight at step 1 is 0 in place of 0.01"),
        (ADAMW, partial(ADAMW, eps=1e-6), "eps of weight at step 1 is 1e-06 in place of 1e-08"),
        (ADAMW, partial(ADAMW, foreach=True), ""),
    ],
)
def test_settings_whose_updates_are_within_the_tolerance_are_compared(
    ours: Callable[..., Any], theirs: Callable[..., Any], named: str, tmp_path: Path
) -> None:
    for name, made in (("a", ours), ("b", theirs)):
        net = model()
        optimizer = made(net.parameters())
        recorder = Recorder(net, optimizer, tmp_path / name)
        net(torch.ones(3)).sum().backward()
        optimizer.step()
        recorder.close()
    report = compare(read_record(tmp_path / "a"), read_record(tmp_path / "b"), tolerance=1e-2)
    assert report.first is None
    assert [bool(re.search(named, symptom)) for symptom in report.symptoms] == [True] * bool(named), report
    path = tmp_path / "b/record.jsonl"  # as it was before settings were recorded
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps({k: v for k, v in line.items() if k != "settings"}) + "\n" for line in lines))
    assert compare(read_record(tmp_path / "a"), read_record(tmp_path / "b"), tolerance=1e-2).same


def test_an_optimizer_of_another_model_is_refused(tmp_path: Path) -> None:
    net, other = model(), model()
    with pytest.raises(UserError, match="the optimizer trains no parameter of this model"):
        Recorder(copy.deepcopy(net), SGD(net.parameters(), lr=0.1), tmp_path / "a")
    assert not (tmp_path / "a").exists()
    other.weight.requires_grad_(False)
    with pytest.raises(UserError, match="the optimizer trains no parameter of this model"):
        Recorder(other, SGD([*other.parameters(), *net.parameters()], lr=0.1), tmp_path / "a")
    Recorder(net, SGD([*other.parameters(), *net.parameters()], lr=0.1), tmp_path / "a")


def test_two_parameters_of_one_clean_name_are_refused(tmp_path: Path) -> None:
    net = model()
    net.module = model()
    with pytest.raises(UserError, match=r"weight and module\.weight would both be recorded as weight"):
        Recorder(net, SGD(net.parameters(), lr=0.1), tmp_path)


class Wrapper(torch.optim.Optimizer):
    """Without torch's constructor, as Accelerate's."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def step(self, closure: Any = None) -> None:
        self.optimizer.step()

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups


def test_the_optimizer_of_a_wrapper_without_hooks_is_recorded(tmp_path: Path) -> None:
    net = model()
    wrapper = Wrapper(SGD(net.parameters(), lr=0.1))
    Recorder(net, wrapper, tmp_path)
    net(torch.ones(3)).sum().backward()
    wrapper.step()
    assert read_record(tmp_path).steps[0].settings["weight"]["lr"] == 0.1
    with pytest.raises(UserError, match=r"Wrapper is no torch\.optim\.Optimizer with hooks: give the one it wraps"):
        Recorder(net, Wrapper(None), tmp_path / "none")


def held(begin: int, size: int, shape: int = 4) -> dict[str, Held]:
    return {"w": Held([shape], [begin], [size], "float32")}


def test_shards_are_added_and_replicas_compared(tmp_path: Path) -> None:
    """Ranks 0, 2 and 3 have the first half, 1 the other. The largest difference counts, whichever rank has it."""
    writer = RecordWriter(tmp_path, [held(0, 2), held(2, 2), held(0, 2), held(0, 2)], 1)

    def rank(*row: float, loss: float = 0.0, microbatches: int = 0, tokens: int = 0, batch: int = 0) -> torch.Tensor:
        numbers = torch.tensor([*row, loss, microbatches, tokens, batch], dtype=torch.float64)
        assert len(numbers) == 2 + NUMBERS
        return numbers

    first = rank(4.0, 1.0, loss=6.0, microbatches=2, tokens=5, batch=2**52 - 1)
    others = [rank(9.0, -3.0, loss=1.0, microbatches=1, tokens=7, batch=3), rank(4.0, 1.5), rank(4.0, 1.25)]
    writer.append_step({"begin": 0}, ["weight"], [first, *others])
    writer.append_step({"step": 1}, ["weight"], [first, *others])
    gone = rank(NONE, NONE)
    writer.append_step({"step": 2}, ["gradient"], [first, gone, first, gone])
    writer.append_step({"step": 3}, ["gradient"], [gone] * 4)
    _, step, missing, none = (found := read_record(tmp_path)).begin, *found.steps
    assert step.kinds["weight"].rows == {"w": [[13.0, -2.0]]} and step.kinds["weight"].apart == {"w": 0.25}
    assert (step.loss, step.microbatches, step.tokens, step.batch) == ((3.0, 1.0), 2, 12, 2)
    gradient = missing.kinds["gradient"]
    assert gradient.rows == {"w": [[4.0, 1.0]]} and gradient.apart == {"w": float("inf")}
    assert none.kinds["gradient"].rows == {"w": None} and none.kinds["gradient"].apart == {}


def test_settings_of_parameters_that_some_ranks_have(tmp_path: Path) -> None:
    """Both ranks have u, and each another; rank 0's optimizer does not have u."""
    part, nan = Held([1], [0], [1], "float32"), float("nan")
    writer = RecordWriter(tmp_path, [{"u": part, "v": part}, {"w": part, "u": part}], 1)
    tail = [0.0] * (4 + NUMBERS)  # sketches of two parameters
    everyone = [[*tail, nan, nan, 0.5, 0.0], [*tail, 0.5, 0.0, 0.25, nan]]
    numbers = [torch.tensor(of_rank, dtype=torch.float64) for of_rank in everyone]
    for line in ({"begin": 0}, {"step": 1}):
        writer.append_step(line, ["weight"], numbers, ["lr", "eps"])
    assert read_record(tmp_path).steps[0].settings == {
        "u": {"lr": 0.25}, "v": {"lr": 0.5, "eps": 0.0}, "w": {"lr": 0.5, "eps": 0.0}
    }  # fmt: skip


@pytest.mark.parametrize("boxes", [[(0, 2), (0, 2)], [(0, 2), (2, 1)], [(0, 4), (2, 2)]])
def test_boxes_that_are_less_or_more_than_the_whole_are_refused(boxes: list[tuple[int, int]], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"w has 4 elements, and ranks hold \d in different boxes"):
        RecordWriter(tmp_path / "record", [held(*box) for box in boxes], 1)
    assert not (tmp_path / "record").exists()
    with pytest.raises(UserError, match=r"w has shapes \[4\] and \[5\] on two ranks"):
        RecordWriter(tmp_path / "record", [held(0, 4), held(0, 5, shape=5)], 1)
