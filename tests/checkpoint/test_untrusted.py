"""Manifests and records that were forged, hashes and all: each is damage, and the commit before is used."""

from __future__ import annotations

import dataclasses
import os
import random
import sys
import zlib

import numpy as np
import pytest
import torch

from foundry_moe.checkpoint import open_store, strict
from foundry_moe.checkpoint.engine import CheckpointEngine, Policy
from foundry_moe.checkpoint.errors import DamagedError
from foundry_moe.checkpoint.layout import cut
from foundry_moe.checkpoint.ledger import Ledger
from foundry_moe.checkpoint.manifest import (
    MAGIC,
    Manifest,
    TensorEntry,
    _check_blocks,
    build_manifest,
    check_tiling,
    object_key,
)
from foundry_moe.checkpoint.records import Commit, CommitKey
from tests.helpers.checkpoints import blank, check, save
from tests.helpers.commands import tool
from tests.helpers.forged_manifests import MANIFESTS, OFFSETS, SHAPE, nested, put
from tests.helpers.forging import forge_manifest, forge_record, key_of, put_manifest, put_record, record_of


@pytest.fixture
def store(tmp_path):
    store = open_store(str(tmp_path / "run"))
    save(store, 1, 2)
    return store


def check_damaged(store, capsys) -> None:
    """What a run, and each tool, makes of it if the commit of step 2 is not to be trusted."""
    loaded = CheckpointEngine(store).load(blank())
    check(loaded, 1)
    assert len(loaded.rejected) == 1 and len(loaded.rejected[0]) < 600 and loaded.rejected[0].isprintable()
    assert tool("verify", store.url) == 1
    out = capsys.readouterr().out
    assert "step 2: DAMAGED" in out and "step 1: good" in out


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_forged_manifest_is_damage(store, name, capsys) -> None:
    forge_manifest(store, 2, MANIFESTS[name])
    check_damaged(store, capsys)


def raw_json(text: bytes):
    return MAGIC + zlib.compress(text, 9)


@pytest.mark.parametrize(
    "raw",
    [
        raw_json(b"[" * 100_000),
        raw_json(b'{"a":' * 100_000),
        raw_json(b"1" * 100_000),
        raw_json(b"\xff\xfe"),
        raw_json(b" " * 2**27),
        raw_json(b"{}") + b"more",
        raw_json(b"{}")[:-3],
        MAGIC,
        b"",
    ],
    ids=["lists", "objects", "a long number", "no text", "a bomb", "more behind it", "cut short", "nothing", "empty"],
)
def test_bytes_that_are_no_manifest_are_damage(store, raw, capsys) -> None:
    put_manifest(store, 2, raw)
    check_damaged(store, capsys)


def test_a_bomb_costs_no_more_memory_than_its_limit(monkeypatch) -> None:
    asked = []
    real = zlib.decompressobj

    class Watching:
        def __init__(self) -> None:
            self.real = real()

        def decompress(self, raw, most):
            asked.append(most)
            return self.real.decompress(raw, most)

        def __getattr__(self, name):
            return getattr(self.real, name)

    monkeypatch.setattr(strict.zlib, "decompressobj", Watching)
    with pytest.raises(DamagedError, match="become more than"):
        Manifest.from_bytes(raw_json(b" " * 2**27))
    assert asked == [strict.FREE_BYTES + 1]


@pytest.mark.parametrize("kind", ["record", "manifest"])
def test_an_object_that_is_too_large_is_not_read(store, tmp_path, kind, capsys) -> None:
    """A file of 100 GB, almost all of it a hole."""
    key = key_of(2) if kind == "record" else f"{record_of(store, 2)['attempt']}/MANIFEST"
    os.truncate(tmp_path / "run" / key, 10**11)
    check_damaged(store, capsys)


def test_a_manifest_of_the_right_size_with_another_hash_is_damage(store) -> None:
    record = record_of(store, 2)
    record["manifest"]["xxh3"] = "0" * 32  # the manifest itself is good
    put_record(store, 2, record)
    ledger = Ledger(store)
    with pytest.raises(DamagedError, match=r"bytes and hash .*, not \d+ and 0{32}"):
        ledger.open(ledger.newest_first()[0])


def test_a_manifest_of_another_attempt_of_its_step_is_damage(store) -> None:
    forge_manifest(store, 2, lambda body: body["info"].__setitem__("attempt", body["info"]["attempt"][:-8] + "0" * 8))
    ledger = Ledger(store)
    with pytest.raises(DamagedError, match="belongs to attempt steps/000000000002/"):
        ledger.open(ledger.newest_first()[0])


def test_a_manifest_that_arrives_changed_once_is_read_again(store, monkeypatch) -> None:
    reads = []
    real = store.get

    def get(name, *args):
        raw = real(name, *args)
        if name.endswith("MANIFEST"):
            reads.append(name)
            if len(reads) < 3:
                return raw[:-1] + bytes([raw[-1] ^ 1])
        return raw

    monkeypatch.setattr(store, "get", get)
    ledger = Ledger(store)
    assert ledger.open(ledger.newest_first()[0]).commit.where.step == 2
    assert len(reads) == 3


@pytest.mark.parametrize(("start", "size"), [(3, 128), (64, 95), (0, 31)], ids=["unaligned", "past the end", "short"])
def test_one_block_is_aligned_and_within_its_object(start, size) -> None:
    """The only block of the only object: no other check is reached. It has 32 bytes."""
    entry = TensorEntry(
        dtype="int8", shape=(32,), offsets_BN=np.zeros((1, 1), np.int64), sizes_BN=np.array([[32]]),
        object_B=np.zeros(1, np.int64), start_B=np.array([start]), hash_B=np.zeros(1, np.uint64),
    )  # fmt: skip
    aligned = start // 64 * 64
    fits = dataclasses.replace(entry, start_B=np.array([aligned]))
    _check_blocks([("data/000000.bin", aligned + 32)], {"w": fits})
    with pytest.raises(DamagedError, match=rf"a block lies at bytes {start} to {start + 32} of an object of {size}"):
        _check_blocks([("data/000000.bin", size)], {"w": entry})


@pytest.mark.quick
def test_blocks_may_share_no_byte_of_any_object() -> None:
    """Against counting each byte. Blocks of several objects lie at the same places, so their order matters."""
    rng = np.random.default_rng(0)
    outcomes = {True: 0, False: 0}
    for _ in range(500):
        sizes, count = rng.integers(1, 257, size=3), int(rng.integers(1, 6))
        objects = [(object_key(rank), int(size)) for rank, size in enumerate(sizes)]
        tensors, bytes_OB = {}, np.zeros((3, 1000), dtype=int)
        for number in range(count):
            place, start, size = int(rng.integers(0, 3)), int(rng.integers(0, 4)) * 64, int(rng.integers(1, 160))
            tensors[str(number)] = TensorEntry(
                dtype="int8", shape=(size,), offsets_BN=np.zeros((1, 1), np.int64), sizes_BN=np.array([[size]]),
                object_B=np.array([place]), start_B=np.array([start]), hash_B=np.zeros(1, np.uint64),
            )  # fmt: skip
            bytes_OB[place, start : start + size] += 1
        expected = all(not row[size:].any() and row.max() < 2 for row, size in zip(bytes_OB, sizes, strict=True))
        outcomes[expected] += 1
        try:
            _check_blocks(objects, tensors)
        except DamagedError:
            assert not expected, tensors
        else:
            assert expected, tensors
    assert min(outcomes.values()) > 50


@pytest.mark.quick
def test_ranks_that_write_nothing_have_no_object() -> None:
    box = ((0,), (4,))
    written = {3: (64, [("b", box, 0, 3)]), 0: (0, []), 1: (128, [("c", box, 64, 2), ("a", box, 0, 1)])}
    manifest = build_manifest({name: (torch.float32, (4,)) for name in "abc"}, written, {}, {})
    assert manifest.objects == [(object_key(1), 128), (object_key(3), 64)]
    places = {name: (*entry.object_B, *entry.start_B, *entry.hash_B) for name, entry in manifest.tensors.items()}
    assert places == {"a": (0, 0, 1), "b": (1, 0, 3), "c": (0, 64, 2)}


RECORDS = {
    "an attempt of another run": put("attempt", value="../victim"),
    "all attempts": put("attempt", value="steps"),
    "all records": put("attempt", value="commits"),
    "an attempt above": put("attempt", value="steps/000000000002/../000000000001"),
    "an attempt that is absolute": put("attempt", value="/etc"),
    "an attempt that ends in a line": lambda body: body.__setitem__("attempt", body["attempt"] + "\n"),
    "an attempt with other digits": put("attempt", value="steps/00000000000²/20260101T000000-0123abcd"),
    "the attempt of another step": put("attempt", value="steps/000000000001/20260101T000000-0123abcd"),
    "an attempt that is no text": put("attempt", value=["steps"]),
    "a step as text": put("step", value="2"),
    "a step as truth": put("step", value=True),
    "a step as a fraction": put("step", value=2.0),
    "another step": put("step", value=1),
    "another generation": put("generation", value=5),
    "a manifest's size as text": put("manifest", "size", value="7"),
    "a huge manifest": put("manifest", "size", value=2**45),
    "a manifest's hash of another kind": put("manifest", "xxh3", value=7),
    "a manifest that is no object": put("manifest", value=7),
    "a fork from text": put("forked_from", value="1"),
    "a nonce of a number": put("nonce", value=7),
    "no nonce": lambda body: body.pop("nonce"),
    "a summary that is a list": put("summary", value=[]),
    "a size as text": put("summary", "bytes", value="many"),
    "a huge size": put("summary", "bytes", value=10**400),
    "a time that writes to the terminal": put("summary", "saved", value="\x1b]0;x\x07"),
    "a mesh of lists": put("summary", "mesh", value={"expert": [2]}),
    "a deep summary": put("summary", "x", value=nested(300)),
    "a milestone of text": put("summary", "milestone", value="yes"),
}


@pytest.mark.parametrize("name", RECORDS)
def test_a_forged_record_is_damage(store, name, capsys) -> None:
    forge_record(store, 2, RECORDS[name])
    check_damaged(store, capsys)
    assert tool("ls", store.url) == 1
    assert "damaged" in capsys.readouterr().out


@pytest.mark.parametrize("raw", [b"", b"7", b"[]", b"null", b"[" * 10**5, b'{"a":' * 10**5, b"\xff", b" " * 2**21])
def test_bytes_that_are_no_record_are_damage(store, raw, capsys) -> None:
    store.put(key_of(2), raw)
    check_damaged(store, capsys)


@pytest.mark.parametrize(
    "name",
    [
        "²-³.json",
        "000000-00000000000٣.json",
        "0-2.json",
        "000000-000000000002.json.json",
        "0000000-000000000002.json",
        "-1-2.json",
        "999999999999-000000000002.json",
        "sub/000000-000000000009.json",
        "000000-000000000009.json\n",
    ],
)
def test_a_file_that_has_no_records_name_is_none(store, name) -> None:
    path = store.root / "commits" / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"{}")
    assert CommitKey.parse(f"commits/{name}") is None
    loaded = CheckpointEngine(store).load(blank())
    check(loaded, 2)
    assert loaded.rejected == []


def test_names_come_back() -> None:
    for generation, step in ((0, 0), (7, 123), (10**6, 10**13)):
        key = CommitKey(generation=generation, step=step)
        assert CommitKey.parse(key.key) == key


def test_forged_offsets_make_no_large_file(store, tmp_path, capsys) -> None:
    def change(body) -> None:
        columns = body["tensors"]["model.dense"]
        columns[SHAPE] = [2**29, 64]
        columns[OFFSETS][0] = 2**29 - 64

    forge_manifest(store, 2, change)
    assert tool("export", store.url, tmp_path / "out", "--step", 2) == 1
    assert capsys.readouterr().err.startswith("error: no checkpoint in") and not (tmp_path / "out").exists()


def test_what_could_not_be_read_again_is_not_saved(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(strict, "FREE_BYTES", 2**16)
    engine = CheckpointEngine(open_store(str(tmp_path / "run")), policy=Policy(max_failures=9))

    def error_of(state) -> str | None:
        try:
            engine.save({"model": {}, "values": state}, 1)
        except ValueError as error:
            return str(error)
        report = engine.wait()
        return report.error if report is not None else None

    deep: dict = {}
    for _ in range(100):
        deep = {"a": deep}
    assert "nested deeper than 60" in error_of(deep)
    assert "rename its key" in error_of({"a\nb": torch.zeros(1)})
    assert "two tensors have the path" in error_of({"a": {"b": torch.zeros(1)}, "a.b": torch.zeros(999)})
    assert "keep large data in tensors" in error_of([0] * 2**17)
    assert error_of({"long": bytes(2**15), "noise": random.Random(0).randbytes(2**17)}) is None
    loaded = CheckpointEngine(open_store(str(tmp_path / "run"))).load({"model": {}})
    assert loaded.state["values"]["long"] == bytes(2**15) and len(loaded.state["values"]["noise"]) == 2**17


# Whether blocks tile a tensor


def tiles(shape, boxes) -> bool:
    offsets = np.array([box[0] for box in boxes], dtype=np.int64).reshape(len(boxes), len(shape))
    sizes = np.array([box[1] for box in boxes], dtype=np.int64).reshape(len(boxes), len(shape))
    try:
        check_tiling("w", tuple(shape), offsets, sizes)
    except DamagedError:
        return False
    return True


def covered_once(shape, boxes) -> bool:
    """The slow way."""
    count = np.zeros(shape, dtype=int)
    for offsets, sizes in boxes:
        if any(size < 1 or start + size > most for start, size, most in zip(offsets, sizes, shape, strict=True)):
            return False
        count[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))] += 1
    return bool((count == 1).all())


def test_tiling_agrees_with_counting_each_element() -> None:
    rng = np.random.default_rng(0)
    outcomes = {True: 0, False: 0}
    for _ in range(3000):
        shape = rng.integers(1, 4, size=rng.integers(1, 5)).tolist()
        boxes = list(cut((tuple([0] * len(shape)), tuple(shape)), 1, int(rng.integers(1, 5))))
        for _ in range(rng.integers(0, 3)):  # moves, repeats, drops, stretches
            kind, place = rng.integers(0, 4), int(rng.integers(0, len(boxes))) if boxes else 0
            if not boxes:
                break
            offsets, sizes = (list(part) for part in boxes[place])
            dim = int(rng.integers(0, len(shape)))
            if kind == 0:
                offsets[dim] = int(rng.integers(0, shape[dim]))
                boxes[place] = (tuple(offsets), tuple(sizes))
            elif kind == 1:
                boxes.append(boxes[place])
            elif kind == 2:
                del boxes[place]
            else:
                sizes[dim] = int(rng.integers(0, shape[dim] + 1))
                boxes[place] = (tuple(offsets), tuple(sizes))
        rng.shuffle(boxes)
        boxes = [(tuple(map(int, o)), tuple(map(int, s))) for o, s in boxes]
        expected = covered_once(shape, boxes)
        outcomes[expected] += 1
        assert tiles(shape, boxes) is expected, (shape, boxes)
    assert min(outcomes.values()) > 300


def test_the_tensor_that_is_not_covered_is_named() -> None:
    nothing = np.zeros((0, 2), dtype=np.int64)
    with pytest.raises(DamagedError, match=r"'b' \[3, 4\] leave elements out or hold some twice"):
        check_tiling("b", (3, 4), nothing, nothing)
    check_tiling("a", (3, 4), np.zeros((1, 2), dtype=np.int64), np.array([[3, 4]]))
    check_tiling("none", (0, 5), nothing, nothing)
    check_tiling("one", (), np.zeros((1, 0), np.int64), np.ones((1, 0), np.int64))


def many_blocks(tensors: int, blocks: int) -> Manifest:
    """`tensors` of three dimensions in `blocks` each."""
    names = [f"model.layers.{i}.experts.w1" for i in range(tensors)]
    starts = np.arange(blocks, dtype=np.int64)
    offsets = np.stack([starts, 0 * starts, 0 * starts], axis=1)
    entries = {
        name: TensorEntry(
            dtype="bfloat16",
            shape=(blocks, 8, 4),
            offsets_BN=offsets,
            sizes_BN=np.tile(np.array([1, 8, 4]), (blocks, 1)),
            object_B=starts % 100,
            start_B=(starts // 100 + item * blocks) * 64,
            hash_B=np.random.default_rng(item).integers(0, 2**63, blocks).astype(np.uint64),
        )
        for item, name in enumerate(names)
    }
    return Manifest(
        info={"step": 1, "attempt": "steps/000000000001/20260101T000000-0123abcd", "world_size": 100},
        objects=[(f"data/{i:06d}.bin", 64 * (tensors + 1) * blocks) for i in range(100)],
        tensors=entries,
        values={name: {"$ref": name} for name in names},
    )


def test_checking_a_tensor_makes_as_many_calls_for_many_blocks_as_for_few() -> None:
    def calls(blocks: int) -> int:
        [(name, entry)] = Manifest.from_bytes(many_blocks(1, blocks).to_bytes()).tensors.items()
        counted = []
        sys.setprofile(lambda _, event, __: counted.append(event) if event.endswith("call") else None)
        try:
            check_tiling(name, entry.shape, entry.offsets_BN, entry.sizes_BN)
        finally:
            sys.setprofile(None)
        return len(counted)

    assert 0 < calls(40) == calls(4000)


def test_a_record_reads_what_it_writes() -> None:
    commit = Commit(
        where=CommitKey(generation=1, step=5),
        attempt="steps/000000000005/20260101T000000-0123abcd",
        nonce="ab",
        manifest_bytes=10,
        manifest_hash="0" * 32,
        forked_from=3,
        summary={"bytes": 1, "mesh": {"expert": 2}, "of a later version": {"a": [1, None, 0.5]}},
    )
    assert Commit.from_bytes(commit.to_bytes(), commit.where.key) == commit


def test_texts_of_info_keep_line_breaks_and_no_other_control_characters(tmp_path) -> None:
    store = open_store(str(tmp_path))
    info = {"architecture": {"config": {"note": "two\nlines\tand \x1b[2J"}}}
    engine = CheckpointEngine(store, policy=Policy(asynchronous=False), info=info)
    engine.save(blank(), 1)
    assert engine.wait().error is None
    (found,) = [engine.ledger.open(key) for key in engine.ledger.newest_first()]
    assert found.manifest.info["architecture"]["config"]["note"] == "two\nlines\tand \\x1b[2J"
