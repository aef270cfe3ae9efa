"""A checkpoint against the record of its run: each kind is the same, and each planted fault is found and named."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

from foundry_moe import Writer
from foundry_moe.certify import (
    Recorder,
    checkpoint,
    compare,
    compare_checkpoint,
    read_record,
    stored_by_dcp,
    stored_in_safetensors,
)
from foundry_moe.certify.checkpoint import StoredTensors, _faults_of, _keys_of, _sketches
from foundry_moe.cli import main

pytestmark = pytest.mark.quick
State = dict[str, Any]


class Experts(torch.nn.Module):
    """A stack of experts, and a layer around it."""

    def __init__(self) -> None:
        super().__init__()
        self.w_EDF = torch.nn.Parameter(torch.randn(3, 4, 5))
        self.out = torch.nn.Linear(5, 2)

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.out(torch.einsum("td,edf->tf", x_TD, self.w_EDF).tanh())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[State]]:
    """The folder of a record of two steps, and the states after each."""
    folder = tmp_path_factory.mktemp("run")
    torch.manual_seed(3)
    model = Experts()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    Recorder(model, optimizer, folder / "record")
    states = []
    for _ in range(2):
        model(torch.randn(6, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
        states.append(copied(state))
    return folder, states


def copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    return value.clone() if isinstance(value, Tensor) else value


def certify(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        main(["certify", *map(str, arguments)])
    found = capsys.readouterr()
    return int(ended.value.code or 0), found.out + found.err


def save(folder: Path, state: State) -> Path:
    with pytest.warns(UserWarning, match="torch.distributed is unavailable|torch.distributed is disabled"):
        dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


def test_each_kind_of_checkpoint_is_the_same_as_the_record(
    run: tuple[Path, list[State]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, states = run
    save(tmp_path / "dcp", states[1])
    for step, state in enumerate(states, 1):
        with pytest.warns(UserWarning, match="torch.distributed is"):
            writer = Writer(tmp_path / "elastic")
            dcp.save(state, storage_writer=writer, checkpoint_id=step, no_dist=True)
    (tmp_path / "model").mkdir()
    save_file(states[1]["model"], tmp_path / "model/model.safetensors")
    record = folder / "record"

    code, said = certify(capsys, record, "--checkpoint", tmp_path / "dcp")
    assert code == 2 and "is a pickle: if you trust whoever made it, add --trust-pickle" in said
    assert certify(capsys, record, "--checkpoint", tmp_path / "dcp", "--trust-pickle")[0] == 0
    for step in ((), ("--step", 1), ("--step", 2)):
        code, said = certify(capsys, record, "--checkpoint", tmp_path / "elastic", *step)
        assert code == 0 and "same: weights and states" in said, said
    code, said = certify(capsys, record, "--checkpoint", tmp_path / "model")
    assert code == 0 and "holds no optimizer states, so the weights alone are compared" in said


def change(name: str) -> Callable[[State, State], None]:
    """The fault of that name, in a state and the one before."""

    def apply(state: State, before: State) -> None:
        model, states = state["model"], state["optim"]["state"]
        if name == "an expert is stale":
            model["w_EDF"][1] = before["model"]["w_EDF"][1]
        elif name == "weights are stale":
            state["model"] = before["model"]
        elif name == "moments are stale":
            state["optim"] = before["optim"]
        elif name == "a moment is lost":
            del states["out.weight"]["exp_avg"]
        elif name == "a moment is zero":
            states["w_EDF"]["exp_avg_sq"].zero_()
        elif name == "a weight is lost":
            del model["out.bias"]

    return apply


@pytest.mark.parametrize(
    "fault, symptom",
    [
        ("an expert is stale", r"first difference: step 2, weight: 1 of \d+ tensors, .*: w_EDF\[1\]"),
        ("weights are stale", "the weights in the checkpoint are those of step 1, not of step 2"),
        ("moments are stale", "the values of state exp_avg in the checkpoint are those of step 1, not of step 2"),
        ("a moment is lost", "state exp_avg of out.weight is missing or zero in the checkpoint"),
        ("a moment is zero", r"state exp_avg_sq of w_EDF\[0\], .* is missing or zero in the checkpoint"),
        ("a weight is lost", "has no parameter out.bias"),
    ],
)
def test_a_planted_fault_is_found_and_named(
    fault: str, symptom: str, run: tuple[Path, list[State]], tmp_path: Path
) -> None:
    folder, states = run
    before, state = map(copied, states)
    change(fault)(state, before)
    save(tmp_path / "dcp", state)
    stored = stored_by_dcp(dcp.FileSystemReader(tmp_path / "dcp"), "dcp")
    report = compare_checkpoint(read_record(folder / "record"), stored)
    assert not report.same
    text = "\n".join(report.symptoms)
    if (first := report.first) is not None:
        text += f"\nfirst difference: step {first.step}, {first.kind}: {len(first.units)} of {first.compared} tensors, "
        text += f": {', '.join(map(str, first.units))}"
    assert re.search(symptom, text), text


@pytest.mark.parametrize("dtype, lr", [(torch.float32, 1e-6), (torch.bfloat16, 1e-4)])
def test_weights_that_are_stale_by_less_than_rounding_are_found(dtype: torch.dtype, lr: float, tmp_path: Path) -> None:
    """In a checkpoint, and in a resumption that has the right moments; the right weights are the same."""
    torch.manual_seed(3)
    model = Experts().to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    recorder = Recorder(model, optimizer, tmp_path / "record")
    states: list[State] = []

    def train(steps: int) -> None:
        for _ in range(steps):
            model(torch.randn(6, 4, dtype=dtype)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            states.append(copied({"model": model.state_dict(), "optim": optimizer.state_dict()}))

    train(2)
    random = torch.get_rng_state()
    train(1)
    recorder.close()
    record = read_record(tmp_path / "record")
    said = "the weights {} are those of step 1, not of step 2"
    for step, symptoms in ((2, ()), (1, (said,))):
        weights = states[step - 1]["model"]
        save_file(weights, tmp_path / "model.safetensors")
        stored = stored_in_safetensors([tmp_path / "model.safetensors"], "file")
        assert compare_checkpoint(record, stored, 2).symptoms == tuple(s.format("in the checkpoint") for s in symptoms)
        model.load_state_dict(weights)
        optimizer.load_state_dict(copied(states[1]["optim"]))
        recorder = Recorder(model, optimizer, tmp_path / f"resumed {step}")
        torch.set_rng_state(random)
        train(1)
        recorder.close()
        report = compare(record, read_record(tmp_path / f"resumed {step}"))
        assert report.symptoms == tuple(s.format("at the start") for s in symptoms) and report.same == (not symptoms)


def test_shards_side_by_side_do_not_overlap() -> None:
    chunks = [ChunkStorageMetadata(torch.Size(at), torch.Size((2, 3))) for at in ((0, 0), (2, 0), (0, 3), (2, 3))]
    entry = TensorStorageMetadata(TensorProperties(), torch.Size((4, 6)), chunks)
    assert list(_faults_of("w", entry)) == []


@pytest.mark.parametrize(
    "chunks, sentence",
    [
        ([((0, 0), (2, 3)), ((0, 2), (2, 3))], "model.out.weight is stored twice in part: its shards overlap"),
        ([((0, 0), (2, 3))], "model.out.weight has 10 elements, and its shards 6"),
    ],
)
def test_shards_that_overlap_or_leave_elements_out_are_named(
    chunks: list[Any], sentence: str, run: tuple[Path, list[State]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, states = run
    reader = dcp.FileSystemReader(save(tmp_path / "dcp", states[1]))
    metadata = reader.read_metadata()
    metadata.state_dict_metadata["model.out.weight"].chunks = [
        ChunkStorageMetadata(torch.Size(begin), torch.Size(size)) for begin, size in chunks
    ]
    monkeypatch.setattr(reader, "read_metadata", lambda *_: metadata)
    assert sentence in stored_by_dcp(reader, "dcp").faults


def test_a_wrong_step_or_other_names_are_one_sentence(
    run: tuple[Path, list[State]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, states = run
    record = folder / "record"
    save_file(states[1]["model"], tmp_path / "model.safetensors")
    code, said = certify(capsys, record, "--checkpoint", tmp_path, "--step", 3)
    assert code == 2 and "has no step 3: give --step one of 0, 1, 2" in said
    code, said = certify(capsys, record, "--checkpoint", tmp_path, "--names", "out.=head.", "w_EDF=experts")
    assert code == 2 and "holds no parameter of" in said and "see --names" in said
    code, said = certify(capsys, record, record, "--checkpoint", tmp_path)
    assert code == 2 and "give two records, A and B, or one record and --checkpoint FOLDER" in said
    (tmp_path / "model.safetensors").unlink()
    code, said = certify(capsys, record, "--checkpoint", tmp_path)
    assert code != 0 and "error:" in said and "Traceback" not in said


def stored(tensors: Mapping[str, Tensor]) -> StoredTensors:
    return StoredTensors(
        name="checkpoint",
        shapes={key: tuple(tensor.shape) for key, tensor in tensors.items()},
        dtypes={key: tensor.dtype for key, tensor in tensors.items()},
        read=lambda keys: {key: tensors[key] for key in keys},
    )


@pytest.mark.parametrize(
    ("keys", "prefix"),
    [
        (["w", "out.bias"], ""),
        (["model.w", "model.out.bias"], "model."),
        (["model.w", "model.out.bias", "ema.w"], "model."),  # what most parameters have
        (["longer.ema.w", "longer.ema.out.bias", "z.w", "z.out.bias"], "z."),  # the shortest of equal ones
        (["b.w", "b.out.bias", "a.w", "a.out.bias"], "a."),
        (["new", "layout.bias"], None),  # names that end with those of parameters
    ],
)
def test_a_prefix_ends_with_a_dot_and_is_that_of_most_parameters(keys: list[str], prefix: str | None) -> None:
    like: Any = SimpleNamespace(shapes={"w": (1,), "out.bias": (1,)})
    for ending in ("", ".exp_avg"):
        found = _keys_of(stored({key + ending: torch.zeros(1) for key in keys}), like, ending)
        assert found == ({} if prefix is None else {name: prefix + name + ending for name in like.shapes})


@pytest.mark.parametrize("at_once", [1, 30, 2**30])
@pytest.mark.parametrize("other", ["a", "b", "c"])
def test_a_tensor_of_another_shape_leaves_no_other_one_out(other: str, at_once: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(checkpoint, "_READ_BYTES", at_once)
    tensors = {name: torch.full((4,), float(number)) for number, name in enumerate("abc", 1)}
    like: Any = SimpleNamespace(shapes={name: (4,) for name in "abc"}, projections=1)
    rows = _sketches(stored(tensors | {other: torch.zeros(5)}), like, {name: name for name in "abc"}).rows
    squares = {name: None if found is None else found[0][0] for name, found in rows.items()}
    assert squares == {"a": 4.0, "b": 16.0, "c": 36.0} | {other: None}
