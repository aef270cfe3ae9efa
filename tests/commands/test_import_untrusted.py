"""`checkpoints import` of files that somebody else has made: weights come in, and no code is run."""

from __future__ import annotations

import argparse
import datetime
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
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

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


def test_composers_own_files_are_read_without_trust(tmp_path) -> None:
    torch.save(composers(), tmp_path / "ep1.pt")
    assert tool("import", tmp_path / "run", tmp_path / "ep1.pt") == 0
    check_begins(open_store(str(tmp_path / "run")), weights())


def test_a_pickle_that_asks_for_more_is_refused_unless_it_is_trusted(tmp_path, capsys, mark) -> None:
    content = composers()
    content["state"]["trap"] = Trap(mark)
    torch.save(content, tmp_path / "x.pt")
    assert "--trust-pickle" in refused(tmp_path, tmp_path / "x.pt", capsys)
    assert not mark.exists()
    content["state"]["trap"] = argparse.Namespace(harmless=1)
    torch.save(content, tmp_path / "y.pt")
    assert "argparse.Namespace" in refused(tmp_path, tmp_path / "y.pt", capsys)
    assert tool("import", tmp_path / "run", tmp_path / "y.pt", "--trust-pickle") == 0
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


# Folders of torch.distributed.checkpoint


@pytest.fixture
def folder(tmp_path) -> Path:
    state = {"state": {"model": weights(), "run_name": "x", "when": datetime.timedelta(seconds=1)}}
    dcp.save(state, checkpoint_id=tmp_path / "source", no_dist=True)
    return tmp_path / "source"


def forge_index(folder: Path, change) -> None:
    index = pickle.loads((folder / ".metadata").read_bytes())
    other = change(index)
    (folder / ".metadata").write_bytes(pickle.dumps(index if other is None else other))


def entry(index, name="w"):
    return index.state_dict_metadata[f"state.model.{name}"]


def info(index, name="w"):
    return next(found for key, found in index.storage_data.items() if key.fqn == f"state.model.{name}")


def test_a_folder_of_shards_is_read_without_trust(tmp_path, folder) -> None:
    assert tool("import", tmp_path / "run", folder) == 0
    check_begins(open_store(str(tmp_path / "run")), weights())


def put(get, attribute, value):
    return lambda index: object.__setattr__(get(index), attribute, value)


def two_chunks(first, second):
    def change(index) -> None:
        chunks = [ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in (first, second)]
        entry(index).chunks[:] = chunks
        for chunk in chunks:
            index.storage_data[MetadataIndex("state.model.w", chunk.offsets)] = info(index)

    return change


INDEXES = {
    "a chunk out of bounds": lambda index: put(lambda i: entry(i).chunks[0], "offsets", torch.Size([3, 0]))(index),
    "no chunk": lambda index: entry(index).chunks.clear(),
    "a chunk that is too small": two_chunks(([0, 0], [2, 4]), ([2, 0], [2, 4])),
    "chunks that overlap": two_chunks(([0, 0], [3, 4]), ([2, 0], [3, 4])),
    "a huge tensor": put(entry, "size", torch.Size([2**40, 2**10])),
    "more than all": put(entry, "size", torch.Size([2**60])),
    "a negative size": put(entry, "size", (-5, 4)),
    "a size of text": put(entry, "size", "54"),
    "a dtype that is none": lambda index: put(lambda i: entry(i).properties, "dtype", "float32")(index),
    "a file elsewhere": put(info, "relative_path", "../x"),
    "an absolute file": put(info, "relative_path", "/etc/passwd"),
    "the index itself": put(info, "relative_path", ".metadata"),
    "a file that is not there": put(info, "relative_path", "none.distcp"),
    "a place before the file": put(info, "offset", -1),
    "a place behind the file": put(info, "offset", 2**40),
    "a length of text": put(info, "length", "9"),
    "a length of all": put(info, "length", 2**40),
    "compressed": put(info, "transform_descriptors", ["zstd"]),
    "no places": lambda index: index.storage_data.clear(),
    "no storage": lambda index: setattr(index, "storage_data", None),
    "no tensors": lambda index: setattr(index, "state_dict_metadata", 7),
    "a list": lambda index: [index],
    "another class": lambda index: argparse.Namespace(index=index),
}


@pytest.mark.parametrize("name", INDEXES)
def test_an_index_that_is_wrong_is_one_sentence(tmp_path, folder, name, capsys) -> None:
    forge_index(folder, INDEXES[name])
    refused(tmp_path, folder, capsys)


def test_an_index_runs_nothing(tmp_path, folder, capsys, mark) -> None:
    forge_index(folder, lambda index: setattr(index, "planner_data", Trap(mark)))
    assert "--trust-pickle" in refused(tmp_path, folder, capsys)
    assert not mark.exists()


def test_a_shard_runs_nothing(tmp_path, folder, capsys, mark) -> None:
    raw = io.BytesIO()
    torch.save(Trap(mark), raw)
    shard = folder / info(pickle.loads((folder / ".metadata").read_bytes())).relative_path
    shard.write_bytes(raw.getvalue())

    def change(index) -> None:
        found = info(index)
        found.offset, found.length = 0, len(raw.getvalue())
        for key in [key for key in index.state_dict_metadata if key != "state.model.w"]:
            del index.state_dict_metadata[key]

    forge_index(folder, change)
    refused(tmp_path, folder, capsys)
    assert not mark.exists()


def test_a_folder_of_shards_is_read_as_a_pickle_if_that_is_trusted(tmp_path, folder) -> None:
    forge_index(folder, lambda index: setattr(index, "planner_data", argparse.Namespace(of="somebody")))
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


@pytest.mark.parametrize("wrap", ["key", "fqn", "size", "dtype", "encoding"])
def test_nested_tuples_in_an_index_do_not_hang(tmp_path, capsys, wrap) -> None:
    """Tuples of two halves that are one object: 297 bytes, and 2^60 parts for who hashes or shows them."""
    value: tuple = ()
    for _ in range(60):
        value = (value, value)
    content: object = {"fqn": MetadataIndex.__new__(MetadataIndex), "key": Keyed(value)}.get(wrap)
    folder = tmp_path / "dcp"
    folder.mkdir()
    if wrap == "fqn":
        content.__dict__.update(fqn=value, offset=None, index=None)
        content = Keyed(content)
    elif wrap in ("size", "dtype"):
        dcp.save({"w": torch.ones(3)}, checkpoint_id=folder, no_dist=True)
        content = pickle.loads((folder / ".metadata").read_bytes())
        entry = content.state_dict_metadata["w"]
        setattr(entry if wrap == "size" else entry.properties, wrap, value)
    elif wrap == "encoding":
        content = Encoding(value)
    (folder / ".metadata").write_bytes(pickle.dumps(content))
    refused(tmp_path, folder, capsys)


class Keyed:
    """Pickles as a dictionary with one key, which is not hashed here."""

    def __init__(self, key: object) -> None:
        self.key = key

    def __reduce__(self):
        from collections import OrderedDict

        return OrderedDict, (), None, None, iter([(self.key, 1)])


class Encoding:
    """Pickles as a call of an enumeration, which looks its argument up."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __reduce__(self):
        from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

        return _MEM_FORMAT_ENCODING, (self.value,)
