"""`checkpoints import` of files that somebody else has made: weights come in, and no code is run."""

from __future__ import annotations

import datetime
import errno
import io
import json
import os
import pickle
import random
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn

from foundry_moe.checkpoint import open_store
from foundry_moe.checkpoint.ledger import Ledger
from tests.helpers.checkpoints import check_begins
from tests.helpers.commands import tool


class Trap:
    """Leaves a mark when a pickle of it is read."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return open, (str(self.mark), "w")


@pytest.fixture
def mark(tmp_path):
    return tmp_path / "mark"


def weights() -> dict:
    torch.manual_seed(0)
    return {
        "w": torch.randn(5, 4),
        "p": nn.Parameter(torch.randn(3)),
        "b": torch.randn(7).bfloat16(),
        "one": torch.tensor(3.0),
        "none": torch.empty(0, 4),
    }


def composers() -> dict:
    """What Composer's single file holds beside the model: times, schedules, metrics and random states."""
    rest = {
        "timestamp": {"Timestamp": {"batch": 3, "total_wct": datetime.timedelta(seconds=3)}},
        "optimizers": {
            "AdamW": {"state": {"w": {"step": torch.tensor(3.0)}}, "param_groups": [{"betas": (0.9, 0.95)}]}
        },
        "eval_metrics": {"eval": {"Accuracy": {"state_dict": {}, "_computed": np.float64(0.5)}}},
        "integrations": {"huggingface": {"tokenizer": {"x.json": {"content": b"{}"}}}},
    }
    rng = [{"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}]
    return {"state": {"model": weights(), "run_name": "x", **rest}, "rng": rng}


def refused(tmp_path, source, capsys, *words: str) -> str:
    assert tool("import", tmp_path / "run", source, *words) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1, err
    assert Ledger(open_store(str(tmp_path / "run"))).newest_first() == []
    return err


def test_a_state_dict_is_read_without_trust(tmp_path) -> None:
    torch.save(weights(), tmp_path / "w.pt")
    assert tool("import", tmp_path / "run", tmp_path / "w.pt") == 0
    check_begins(open_store(str(tmp_path / "run")), weights())


def test_a_pickle_that_asks_for_more_is_refused_unless_it_is_trusted(tmp_path, capsys, mark) -> None:
    torch.save({"model": weights(), "trap": Trap(mark)}, tmp_path / "x.pt")
    assert "--trust-pickle" in refused(tmp_path, tmp_path / "x.pt", capsys)
    assert not mark.exists()
    torch.save(composers(), tmp_path / "ep1.pt")
    assert "datetime.timedelta" in refused(tmp_path, tmp_path / "ep1.pt", capsys)
    assert tool("import", tmp_path / "run", tmp_path / "ep1.pt", "--trust-pickle") == 0
    check_begins(open_store(str(tmp_path / "run")), weights())


def raw_pickle(path: Path, mark: Path) -> None:
    path.write_bytes(pickle.dumps({"model": Trap(mark)}))


def legacy(path: Path, mark: Path) -> None:
    torch.save({"w": torch.ones(3), "x": Trap(mark)}, path, _use_new_zipfile_serialization=False)


def tar(path: Path, mark: Path) -> None:
    raw = pickle.dumps(Trap(mark))
    with tarfile.open(path, "w") as archive:
        for name in ("sys_info", "storages", "tensors", "pickle"):
            member = tarfile.TarInfo(name)
            member.size = len(raw)
            archive.addfile(member, io.BytesIO(raw))


def torchscript(path: Path, mark: Path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.w

    torch.jit.script(Model()).save(str(path))


def zip_of_a_trap(path: Path, mark: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Trap(mark)))
        archive.writestr("archive/version", b"3\n")


def compressed(path: Path, mark: Path) -> None:
    torch.save({"w": torch.zeros(10**6)}, path)
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, raw in members.items():
            archive.writestr(name, raw)


def expanded(path: Path, mark: Path) -> None:
    torch.save({"w": torch.zeros(1).expand(10**12)}, path)


def fifo(path: Path, mark: Path) -> None:
    os.mkfifo(path)


def names_of_numbers(path: Path, mark: Path) -> None:
    torch.save({1: torch.zeros(1)}, path)


def sparse(path: Path, mark: Path) -> None:
    torch.save({"w": torch.eye(3).to_sparse()}, path)


@pytest.mark.parametrize(
    "make",
    [raw_pickle, legacy, tar, torchscript, zip_of_a_trap, compressed, expanded, fifo, names_of_numbers, sparse],
    ids=lambda make: make.__name__,
)
@pytest.mark.filterwarnings("ignore")
def test_other_files_are_one_sentence_and_run_nothing(tmp_path, capsys, mark, make) -> None:
    make(tmp_path / "x.pt", mark)
    refused(tmp_path, tmp_path / "x.pt", capsys)
    assert not mark.exists()


def test_a_folder_with_safetensors_is_read_without_its_hidden_index(tmp_path, mark) -> None:
    source = tmp_path / "source"
    source.mkdir()
    save_file({"w": torch.ones(3)}, source / "model.safetensors")
    (source / ".metadata").write_bytes(pickle.dumps(Trap(mark)))
    assert tool("import", tmp_path / "run", source) == 0
    assert not mark.exists()
    check_begins(open_store(str(tmp_path / "run")), {"w": torch.ones(3)})


@pytest.mark.parametrize(
    "index",
    [
        {"weight_map": {"w": "../other.safetensors"}},
        {"weight_map": {"w": "/etc/passwd"}},
        {"weight_map": {"w": 3}},
        [],
        7,
        {"weight_map": {}},
    ],
)
def test_an_index_names_only_files_beside_it(tmp_path, capsys, index) -> None:
    (tmp_path / "source").mkdir()
    save_file({"w": torch.ones(3)}, tmp_path / "other.safetensors")
    (tmp_path / "source" / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "index" in refused(tmp_path, tmp_path / "source", capsys)


def test_safetensors_that_are_none_are_one_sentence(tmp_path, capsys) -> None:
    (tmp_path / "x.safetensors").write_bytes((2**40).to_bytes(8, "little") + b"{}")
    refused(tmp_path, tmp_path / "x.safetensors", capsys)


def test_a_folder_of_shards_is_read_if_it_is_trusted(tmp_path, capsys, mark) -> None:
    folder = tmp_path / "source"
    state = {"state": {"model": weights(), "run_name": "x", "when": datetime.timedelta(seconds=1)}}
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    index = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(pickle.dumps(Trap(mark)))
    assert "--trust-pickle" in refused(tmp_path, folder, capsys)
    assert not mark.exists()
    (folder / ".metadata").write_bytes(pickle.dumps([index]))
    refused(tmp_path, folder, capsys, "--trust-pickle")
    (folder / ".metadata").write_bytes(index)
    assert tool("import", tmp_path / "run", folder, "--trust-pickle") == 0
    check_begins(open_store(str(tmp_path / "run")), weights())


def test_one_name_in_two_files_is_refused(tmp_path, capsys) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"w": torch.ones(3)}, folder / "a.safetensors")
    save_file({"w": torch.zeros(3)}, folder / "b.safetensors")
    assert "b.safetensors holds 'w', which another file" in refused(tmp_path, folder, capsys)


def test_a_link_out_of_the_folder_is_refused_but_for_the_hubs_cache(tmp_path, capsys) -> None:
    save_file({"w": torch.ones(3)}, tmp_path / "secret")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "a.safetensors").symlink_to(tmp_path / "secret")
    assert "is a symbolic link out of the folder" in refused(tmp_path, folder, capsys)
    snapshot, blobs = tmp_path / "hub" / "snapshots" / "1", tmp_path / "hub" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    save_file({"w": torch.ones(3)}, blobs / "5")
    (snapshot / "model.safetensors").symlink_to(blobs / "5")
    assert tool("import", tmp_path / "good", snapshot) == 0


@pytest.mark.quick
def test_a_source_that_may_not_be_read_is_a_sentence(tmp_path, monkeypatch, capsys) -> None:
    save_file(weights(), tmp_path / "model.safetensors")
    real = Path.open

    def refuse(path: Path, *arguments, **keys):
        if path.suffix == ".safetensors":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path, *arguments, **keys)

    monkeypatch.setattr(Path, "open", refuse)
    assert tool("import", tmp_path / "run", tmp_path) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"error: {tmp_path}: ") and "Permission denied" in said and said.count("\n") == 1
