"""The tools of `foundry-moe checkpoints`, as their users see them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from foundry_moe.checkpoint import open_store
from foundry_moe.checkpoint.engine import CheckpointEngine, Policy
from foundry_moe.checkpoint.errors import OwnedError
from foundry_moe.checkpoint.ledger import Ledger
from foundry_moe.checkpoint.owners import Identity, Owners
from foundry_moe.commands.checkpoints import expert_shapes, meshes_that_hold
from tests.helpers.checkpoints import check_begins, damage, data_object, make_state, save
from tests.helpers.commands import tool


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "run"
    save(open_store(str(path)), 1, 2, 3)
    return path


def test_ls_and_show_say_what_is_there(folder, capsys) -> None:
    assert tool("ls", folder) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["step", "3", "2", "1"]
    assert tool("show", folder, "--gpus", 8) == 0
    out = capsys.readouterr().out
    assert "step 3, attempt" in out and "mesh.expert must divide 4, and beside it mesh.shard must divide 16" in out
    assert "(8,1,1)" in out and "(2,1,4)" in out and "(1,1,8)" not in out and "(1,8,1)" in out
    assert tool("show", folder, "--step", 7) == 2
    assert "holds no checkpoint of step 7; it holds: 1, 2, 3" in capsys.readouterr().err


def test_a_runs_own_folder_stands_for_its_checkpoints(tmp_path, capsys) -> None:
    save(open_store(str(tmp_path / "run" / "checkpoints")), 1, 2)
    for command in ("ls", "show", "verify"):
        assert tool(command, tmp_path / "run") == 0
        printed = capsys.readouterr()
        assert f"using {tmp_path / 'run' / 'checkpoints'}" in printed.err and "2" in printed.out
    assert tool("export", tmp_path / "run", tmp_path / "out") == 0
    assert (tmp_path / "out").is_dir()


def test_gc_says_what_it_would_do(folder, capsys) -> None:
    assert tool("gc", folder, "--dry-run") == 0
    assert capsys.readouterr().out.splitlines()[0] == "would remove nothing"
    assert tool("gc", folder, "--dry-run", "--keep", 1) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["would remove the checkpoint of step 1", "would remove the checkpoint of step 2"]
    assert lines[-1].startswith("1 checkpoint would stay in ")
    assert len(Ledger(open_store(str(folder))).newest_first()) == 3


@pytest.mark.parametrize("command", ["ls", "show", "verify", "gc", "release"])
def test_commands_that_need_no_tensors_import_no_torch(folder, command) -> None:
    """torch takes two seconds to import."""
    code = "import atexit, sys, foundry_moe.cli as c; atexit.register(lambda: print('torch' in sys.modules)); c.main()"
    ended = subprocess.run(
        [sys.executable, "-c", code, "checkpoints", command, folder], timeout=60, capture_output=True, text=True
    )
    assert ended.returncode == 0 and ended.stdout.endswith("False\n"), ended


@pytest.mark.parametrize("size", ["inf", "0", "nan", "-1"])
def test_a_size_of_files_that_cannot_be_is_refused(folder, tmp_path, capsys, size) -> None:
    with pytest.raises(SystemExit) as ended:
        tool("export", folder, tmp_path / "out", f"--file-gb={size}")
    assert ended.value.code == 2 and "must be a finite number above 0" in capsys.readouterr().err


def test_meshes_that_can_hold_it_divide_the_sizes_of_its_experts(folder) -> None:
    found = Ledger(open_store(str(folder))).open(Ledger(open_store(str(folder))).newest_first()[0])
    assert expert_shapes(found.manifest) == {(4, 16): "model.experts"}
    assert (1, 1, 3) not in list(meshes_that_hold(found.manifest, 3))
    assert (1, 5, 4) not in list(meshes_that_hold(found.manifest, 20))
    assert list(meshes_that_hold(found.manifest, 3)) == [
        (3, 1, 1),
        (1, 3, 1),
    ]  # without expert ranks any shard will do
    assert (1, 3, 2) not in list(meshes_that_hold(found.manifest, 6))


def test_verify_reads_everything(folder, capsys) -> None:
    assert tool("verify", folder) == 0
    assert capsys.readouterr().out.count("every hash agrees") == 3
    damage(open_store(str(folder)), 2, "bit flipped")
    damage(open_store(str(folder)), 1, "object missing")
    assert tool("verify", folder) == 1
    out = capsys.readouterr().out
    assert "step 3: good" in out and "step 2: DAMAGED" in out and "do not have the recorded hash" in out
    assert "step 1: DAMAGED" in out and "is missing" in out
    assert tool("verify", folder, "--step", 3) == 0


def test_gc_removes_what_no_commit_names(folder, capsys) -> None:
    store = open_store(str(folder))
    store.put("steps/000000000009/20260101T000000-deadbeef/data/000000.bin", b"12345")
    assert tool("gc", folder) == 0 and capsys.readouterr().out.startswith("removed nothing")
    assert tool("gc", folder, "--older-than", "0.001s", "--dry-run", "--keep", 1) == 0
    out = capsys.readouterr().out
    assert "would remove the unfinished attempt steps/000000000009" in out and "would remove the checkpoint" in out
    assert len(Ledger(store).newest_first()) == 3
    assert tool("gc", folder, "--older-than", "0.001s", "--keep", 1) == 0
    out = capsys.readouterr().out
    assert "removed the checkpoint of step 1" in out and "1 checkpoint in" in out
    assert {entry.key.split("/")[1] for entry in store.scan("steps/")} == {"000000000003"}
    with pytest.raises(SystemExit):
        tool("gc", folder, "--keep", 0)
    assert "--keep: 0 must be 1 or more" in capsys.readouterr().err


def flip_bytes(store, step) -> None:
    """Of all blocks of a checkpoint's data: sizes stay."""
    path = data_object(store, step)
    raw = bytearray(store.get(path))
    for place in range(0, len(raw), 64):
        raw[place] ^= 1
    store.put(path, bytes(raw))


def test_gc_reads_the_newest_that_stays_before_others_go(folder, capsys) -> None:
    damage(open_store(str(folder)), 3, "bit flipped")
    assert tool("gc", folder, "--keep", 1) == 0
    told = capsys.readouterr()
    assert "step 3 is damaged and is not counted" in told.err and "checkpoint of step 1" in told.out
    assert tool("verify", folder, "--step", 2) == 0 and tool("verify", folder, "--step", 3) == 1


def test_a_run_that_met_damage_does_not_count_it_as_kept(folder) -> None:
    """Else it would remove the checkpoint that it went on from, and keep the damaged one."""
    store = open_store(str(folder))
    damage(store, 3, "bit flipped")
    engine = CheckpointEngine(store, policy=Policy(keep=2))
    loaded = engine.load(make_state(0))
    assert loaded is not None and loaded.step == 2
    engine.save(make_state(4), 4)
    engine.wait()
    assert {key.step for key in Ledger(store).newest_first()} == {4, 3, 2}


def test_gc_keeps_the_newest_good_checkpoint(folder, capsys) -> None:
    store = open_store(str(folder))
    ledger = Ledger(store)
    store.put(ledger.newest_first()[0].key, b"torn")
    store.delete([f"{ledger.read(ledger.newest_first()[1]).attempt}/MANIFEST"])
    assert tool("gc", folder, "--keep", 1, "--dry-run") == 0
    assert tool("gc", folder, "--keep", 1) == 0
    assert "checkpoint of step" not in capsys.readouterr().out
    assert len(ledger.newest_first()) == 3 and tool("verify", folder, "--step", 1) == 0


def test_export_is_the_model_bit_for_bit_in_files_of_a_size(folder, tmp_path, capsys) -> None:
    out = tmp_path / "out"
    assert tool("export", folder, out, "--file-gb", 0.00001) == 0
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    exported = {name: tensor for file in files for name, tensor in load_file(out / file).items()}
    expected = make_state(3)["model"]
    assert exported.keys() == expected.keys() == index["weight_map"].keys()
    for name, tensor in expected.items():
        assert exported[name].dtype == tensor.dtype and torch.equal(exported[name], tensor), name
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values())
    assert tool("export", folder, out) == 2 and "exists and is not empty: name a new path" in capsys.readouterr().err


def test_export_passes_over_damage_or_writes_no_index(folder, tmp_path, capsys) -> None:
    store = open_store(str(folder))
    damage(store, 3, "object missing")
    assert tool("export", folder, tmp_path / "older") == 0
    assert "step 2:" in capsys.readouterr().out
    flip_bytes(store, 2)
    assert tool("export", folder, tmp_path / "bad", "--step", 2) == 1
    told = capsys.readouterr().err
    assert "do not have the recorded hash" in told and "other steps: 1, 3" in told
    assert not (tmp_path / "bad").exists()
    assert tool("export", folder, tmp_path / "bad") == 0
    told = capsys.readouterr()
    assert "step 2 is damaged, trying the one before" in told.err and "step 1:" in told.out
    assert tool("export", folder, tmp_path / "gone", "--step", 3) == 1
    assert "It holds other steps: 1, 2" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["safetensors", "dcp", "torch"])
def test_an_export_that_cannot_be_written_is_one_sentence(folder, tmp_path, capsys, kind) -> None:
    (tmp_path / "file").write_text("kept")
    assert tool("export", folder, tmp_path / "file" / "out", "--format", kind) == 1
    assert capsys.readouterr().err.count("\n") == 1 and (tmp_path / "file").read_text() == "kept"
    with pytest.raises(SystemExit):
        tool("export", folder, "s3://bucket/out", "--format", kind)
    assert "s3://bucket/out must be a path of this host" in capsys.readouterr().err


def test_export_to_pytorchs_formats_and_back(folder, tmp_path, capsys) -> None:
    stock, single = tmp_path / "stock", tmp_path / "state.pt"
    assert tool("export", folder, stock, "--format", "dcp") == 0
    assert tool("export", folder, single, "--format", "torch") == 0
    expected, target = make_state(3), make_state(0)
    dcp.load(target, storage_reader=dcp.FileSystemReader(stock), no_dist=True)
    for state in (target, torch.load(single, weights_only=True)):
        for name, tensor in expected["model"].items():
            assert state["model"][name].dtype == tensor.dtype and torch.equal(state["model"][name], tensor), name
        assert state["optim"]["groups"] == expected["optim"]["groups"] and state["values"]["tuple"] == (1, {"a": None})
        assert torch.equal(state["values"]["late"], expected["values"]["late"])
    for number, words in enumerate(((stock, "--trust-pickle"), (single,))):
        assert tool("import", tmp_path / f"new {number}", *words) == 0
        loaded = CheckpointEngine(open_store(str(tmp_path / f"new {number}"))).load({"model": make_state(0)["model"]})
        for name, tensor in expected["model"].items():
            assert torch.equal(loaded.state["model"][name], tensor), name
    capsys.readouterr()
    for words in ((stock, "--format", "dcp"), (single, "--format", "torch")):
        assert tool("export", folder, *words) == 2
    said = capsys.readouterr().err
    assert f"{stock} exists and is not empty: name a new path" in said
    assert f"{single} exists: name a new path" in said


def test_a_damaged_block_leaves_no_stock_checkpoint(folder, tmp_path, capsys) -> None:
    store = open_store(str(folder))
    damage(store, 3, "bit flipped")
    for out, kind in ((tmp_path / "stock", "dcp"), (tmp_path / "state.pt", "torch")):
        assert tool("export", folder, out, "--step", 3, "--format", kind) == 1
        assert "do not have the recorded hash" in capsys.readouterr().err
        assert not (out / ".metadata").exists() and not out.is_file()


@pytest.mark.parametrize("kind", ["safetensors", "safetensors folder", "state dict", "composer", "distributed"])
def test_other_formats_are_starting_points(tmp_path, kind, capsys) -> None:
    weights = {"a.w": torch.randn(8, 40, 40), "a.b": torch.randn(3), "h": torch.randn(65, 3).half()}
    source = tmp_path / "source"
    if kind == "safetensors":
        source = tmp_path / "w.safetensors"
        save_file(weights, source)
    elif kind == "safetensors folder":
        source.mkdir()
        save_file({"a.w": weights["a.w"]}, source / "1.safetensors")
        save_file({"a.b": weights["a.b"], "h": weights["h"]}, source / "2.safetensors")
    elif kind == "state dict":
        torch.save(weights, source)
    elif kind == "composer":
        torch.save({"state": {"model": weights, "run_name": "x"}, "rng": []}, source)
    else:
        dcp.save({"state": {"model": weights, "run_name": "x"}}, checkpoint_id=source, no_dist=True)
    store, trust = open_store(str(tmp_path / "run")), ["--trust-pickle"] if kind == "distributed" else []
    assert tool("import", tmp_path / "run", source, *trust) == 0
    assert "3 tensors" in capsys.readouterr().out
    check_begins(store, weights)
    assert tool("import", tmp_path / "run", source) == 1
    assert "holds checkpoints already" in capsys.readouterr().err


def test_what_is_no_weights_is_refused(tmp_path, capsys) -> None:
    (tmp_path / "x.pt").write_bytes(b"nothing")
    torch.save([1, 2], tmp_path / "list.pt")
    (tmp_path / "empty").mkdir()
    for source, words in (
        ("x.pt", "x.pt cannot be read: File is not a zip file"),
        ("list.pt", "holds no state dict"),
        ("empty", "holds neither .metadata nor safetensors"),
        ("none", "there is no such file"),
    ):
        assert tool("import", tmp_path / "run", tmp_path / source) == 1
        assert words in capsys.readouterr().err


def test_a_folder_that_cannot_be_reached_is_one_sentence(moto, capsys) -> None:
    assert tool("ls", "s3://nowhere/run", "--endpoint-url", f"http://{moto[0]}:{moto[1]}") == 2
    assert capsys.readouterr().err.startswith("error: could not list in s3://nowhere/run: bucket 'nowhere'")


@pytest.mark.parametrize("command", ["ls", "show", "verify", "gc", "export", "release"])
@pytest.mark.parametrize("kind", ["files", "s3"])
def test_a_folder_that_is_not_there_is_one_sentence(kind, tmp_path, command, capsys, request) -> None:
    """On S3 a folder is there once it holds something."""
    url, words = str(tmp_path / "nowhere"), []
    if kind == "s3":
        host, port = request.getfixturevalue("moto")
        url, words = "s3://bucket/nowhere", ["--endpoint-url", f"http://{host}:{port}"]
    words += [tmp_path / "out"] if command == "export" else []
    assert tool(command, url, *words) == 2
    out, err = capsys.readouterr()
    assert out == "" and err == f"error: there is nothing at {url}: name the folder of a run that has saved\n"


def test_a_folder_that_is_freed_goes_to_another_run(folder, capsys) -> None:
    store = open_store(str(folder))
    assert tool("release", folder) == 0 and "no run owns" in capsys.readouterr().out
    owners = Owners(store)
    owners.acquire(Identity(run_name="a"), has_commits=lambda: True)
    assert tool("gc", folder) == 0 and "run 'a'" in capsys.readouterr().out
    with pytest.raises(OwnedError):
        owners.acquire(Identity(run_name="b"), has_commits=lambda: True)
    assert tool("release", folder) == 0 and "is released from run 'a'" in capsys.readouterr().out
    assert owners.acquire(Identity(run_name="b"), has_commits=lambda: True).run_name == "b"
