"""Forged manifests and records, many of them: none may raise anything but damage, nor load what was not written.

    python -m tests.chaos.fuzz_manifests --cases 10000 --seed 0

Each case takes two good checkpoints and changes the newer one's manifest or record, as JSON (values, keys, whole
branches; the hashes are made right again) or as bytes. Then a run resumes into memory full of NaN, and a tool verifies.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import io
import json
import random
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from foundry_moe.checkpoint.engine import CheckpointEngine
from foundry_moe.checkpoint.errors import DamagedError, MismatchError, NotAnObjectError, NotFoundError, StoreError
from foundry_moe.checkpoint.ledger import Ledger
from foundry_moe.checkpoint.range_reads import verify
from foundry_moe.checkpoint.records import ATTEMPT, CommitKey
from foundry_moe.checkpoint.store import SMALL_BYTES, Entry, Store, StoreOptions, checked_key
from foundry_moe.commands.checkpoints import expert_shapes, meshes_that_hold
from tests.helpers.forging import key_of, manifest_of, packed, put_manifest, put_record, record_of

ODD = [
    *(0, 1, -1, 2, 3, 63, 64, 2**31, 2**40, 2**50, 2**62, 2**63, 2**64, -(2**63), 10**30, True, False, None),
    *(
        0.0,
        0.5,
        -1.5,
        1e308,
        float("nan"),
        float("inf"),
        "",
        "0",
        "²",
        "../x",
        "steps",
        "\ud800",
        "\x1b[2J",
        "a" * 5000,
    ),
    *("a" * 5000, "float32", "int8", "bool", "complex128", "object", "model.dense", "model", "$ref", "nan"),
    *([], {}, [[]], [0], [0, 0, 0], ["a", "b"], {"": 0}, {"$ref": "model.dense"}, {"$ref": "no"}, {"$ref": 3}),
    *({"$tuple": 1}, {"$tuple": [1]}, {"$dict": [[[], 1]]}, {"$dict": [[1]]}, {"$set": [{}]}, {"$float": "1"}),
    *(
        {"$numpy": ["<f4", [2**40], {"$b": ""}]},
        {"$numpy": ["O", [1], {"$b": "00"}]},
        {"$scalar": ["<i8", [], {"$b": ""}]},
    ),
    *(
        {"$tensor": ["float32", [0, 2**62], {"$b": ""}]},
        {"$tensor": ["int8", [1], {"$z": "00"}]},
        {"$b": "\n"},
        {"$z": 3},
    ),
    *({"$size": [-1]}, {"$size": [2**70]}, {"$datetime": "now"}, {"$timedelta": [10**9, 0, 0]}, {"$device": "cuda:x"}),
    *({"$dtype": "torch.float32"}, {"$call": ["os.system", "true"]}, {"a": {"$ref": "model.dense"}}),
]


class MemoryStore(Store):
    """Objects in a dictionary. `asked` is every key that was read."""

    def __init__(self, objects: dict[str, bytes] | None = None) -> None:
        self.url, self.options, self.objects = "memory", StoreOptions(), dict(objects or {})
        self.asked: set[str] = set()

    def put(self, key: str, data: bytes | memoryview) -> None:
        self.objects[checked_key(key)] = bytes(data)

    def put_new(self, key: str, data: bytes) -> bool:
        if key in self.objects:
            return False
        self.put(key, data)
        return True

    def get(self, key: str, most_bytes: int = SMALL_BYTES) -> bytes:
        self.asked.add(checked_key(key))
        if key not in self.objects:
            raise NotFoundError(f"no {key}")
        if len(self.objects[key]) > most_bytes:
            raise NotAnObjectError(f"{key} is too large")
        return self.objects[key]

    def read_into(self, key: str, start: int, out: memoryview, see=lambda piece: None) -> None:
        piece = self.get(key)[start : start + len(out)]
        if len(piece) != len(out):
            raise StoreError(f"{key} is short")
        out[:] = piece
        see(out)

    def size_bytes(self, key: str) -> int | None:
        return len(self.objects[key]) if key in self.objects else None

    def scan(self, prefix: str = "") -> Iterator[Entry]:
        for key in sorted(self.objects):
            if key.startswith(prefix):
                yield Entry(key=key, size_bytes=len(self.objects[key]), modified_s=time.time())

    def delete(self, keys: Iterable[str]) -> None:
        for key in list(keys):
            self.objects.pop(key, None)

    def now_s(self) -> float:
        return time.time()


def make_state(step: int, fill: float | None = None) -> dict[str, Any]:
    """Tensors in one block and in several, small ones and an empty one, and values of every kind."""
    ramp = torch.arange(3 * 40 * 32, dtype=torch.float32)
    state: dict[str, Any] = {
        "model": {"experts": ramp.reshape(3, 40, 32) + step, "dense": ramp[:960].reshape(30, 32) - step},
        "optim": {"state": {"w": {"step": torch.tensor(float(step)), "exp_avg": ramp[:100] + step}}},
        "values": {"step": step, "tuple": (1, {"a": None}), "bytes": b"12", "time": torch.float32, 3: {1.5}},
    }
    if fill is not None:
        for tensor in (*state["model"].values(), *state["optim"]["state"]["w"].values()):
            tensor.fill_(fill)
    return state


def good_folder() -> dict[str, bytes]:
    store = MemoryStore()
    engine = CheckpointEngine(store)
    for step in (1, 2):
        engine.save(make_state(step), step)
        report = engine.wait()
        assert report is not None and report.error is None, report
    return store.objects


def branches(body: Any, path: tuple = ()) -> Iterator[tuple]:
    """The paths of all values."""
    items = body.items() if isinstance(body, dict) else enumerate(body) if isinstance(body, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from branches(value, (*path, key))


def alter(body: Any, rng: random.Random) -> str:
    """One change of some JSON, in place; returns what kind it was."""
    path = rng.choice(list(branches(body)))
    *above, key = path
    inner = body
    for part in above:
        inner = inner[part]
    kind = rng.choice(["odd", "odd", "nudge", "delete", "copy", "swap", "wrap"])
    value = inner[key]
    if kind == "nudge" and type(value) is int:
        inner[key] = rng.choice([value + 1, value - 1, value * 2, -value, value + 64, value ^ 1])
    elif kind == "nudge" and type(value) is str and value:
        place = rng.randrange(len(value))
        inner[key] = value[:place] + chr(rng.choice([48, 97, 47, 46, 0, 178, 955, 0x2028])) + value[place + 1 :]
    elif kind == "delete":
        del inner[key]
    elif kind == "copy" and isinstance(inner, list):
        inner.insert(key, copy.deepcopy(value))
    elif kind == "copy" and isinstance(inner, dict):
        inner[rng.choice(["again", "step", "model.dense", "$ref", "\x07"])] = copy.deepcopy(value)
    elif kind == "swap":
        other = rng.choice(list(inner) if isinstance(inner, dict) else range(len(inner)))
        inner[key], inner[other] = inner[other], inner[key]
    elif kind == "wrap":
        for _ in range(rng.choice([1, 3, 120, 400])):
            value = [value]
        inner[key] = value
    else:
        inner[key] = copy.deepcopy(rng.choice(ODD))
    return kind


def alter_bytes(raw: bytes, rng: random.Random) -> bytes:
    kind, place = rng.randrange(5), rng.randrange(len(raw))
    if kind == 0:
        return raw[:place]
    if kind == 1:
        return raw[:place] + rng.randbytes(rng.randrange(1, 9)) + raw[place:]
    if kind == 2:
        return raw[:place] + bytes([raw[place] ^ (1 << rng.randrange(8))]) + raw[place + 1 :]
    if kind == 3:
        return raw + rng.randbytes(3)
    return rng.randbytes(place)


def forge(store: MemoryStore, rng: random.Random) -> None:
    """Changes the checkpoint of step 2; its hashes are right."""
    what = rng.choice(["manifest", "manifest", "manifest", "record", "manifest bytes", "record bytes", "file name"])
    if what == "manifest":
        body = manifest_of(store, 2)
        for _ in range(rng.choice([1, 1, 2, 4])):
            with contextlib.suppress(IndexError):  # nothing is left to change
                alter(body, rng)
        put_manifest(store, 2, packed(body))
    elif what == "record":
        body = record_of(store, 2)
        for _ in range(rng.choice([1, 1, 2])):
            alter(body, rng)
        put_record(store, 2, body)
    elif what == "manifest bytes":
        put_manifest(store, 2, alter_bytes(store.objects[f"{record_of(store, 2)['attempt']}/MANIFEST"], rng))
    elif what == "record bytes":
        store.objects[key_of(2)] = alter_bytes(store.objects[key_of(2)], rng)
    else:
        name = list(key_of(2))
        name[rng.randrange(8, len(name))] = rng.choice(["0", "9", "²", "٣", "-", ".", "/", "x"])
        store.objects["".join(name)] = store.objects.pop(key_of(2))


def check_case(good: dict[str, bytes], case: int) -> str:
    """Forges one and resumes; returns which step was taken, or what was said. Anything else that is raised is a bug."""
    store = MemoryStore(good)
    forge(store, random.Random(case))
    store.asked.clear()
    Ledger(store).damaged.clear()  # of the case before
    here = make_state(0, fill=float("nan"))
    try:
        loaded = CheckpointEngine(store).load(here)
    except MismatchError as error:  # of another model: told, and nothing was changed
        assert str(error).isprintable() and len(str(error)) < 5000
        return "another model"
    assert loaded is not None
    for key in store.asked:
        assert CommitKey.parse(key) or ATTEMPT.match(key), key
    for sentence in loaded.rejected:
        assert len(sentence) < 2000 and sentence.encode(), sentence
    expected = make_state(loaded.step)
    for name, tensor in here["model"].items():
        assert not tensor.isnan().any(), f"{name} was not filled"
        if loaded.step == 1:
            assert torch.equal(tensor, expected["model"][name]), name
    assert not here["optim"]["state"]["w"]["exp_avg"].isnan().any()
    ledger = Ledger(store)
    with contextlib.redirect_stdout(io.StringIO()):
        for key in ledger.newest_first():
            try:
                found = ledger.open(key)
            except DamagedError:
                continue
            problems = verify(store, found)
            assert all(isinstance(problem, str) for problem in problems)
            expert_shapes(found.manifest)
            next(meshes_that_hold(found.manifest, found.manifest.info["world_size"]), None)
            json.dumps(found.commit.summary)
    return f"step {loaded.step}"


def run(cases: int, first: int, *, long: bool) -> collections.Counter[str]:
    """Hypothesis draws the cases; a failure is shrunk to the smallest number, which `check_case` repeats."""
    good = good_folder()
    outcomes: collections.Counter[str] = collections.Counter()

    @seed(first)
    @settings(
        max_examples=cases,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink] if long else [Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.integers(0, 2**64 - 1))
    def one(case: int) -> None:
        outcomes[check_case(good, case)] += 1

    one()
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    began = time.perf_counter()
    outcomes = run(arguments.cases, arguments.seed, long=True)
    print(f"{sum(outcomes.values())} cases in {time.perf_counter() - began:.0f} s: {dict(outcomes)}")


if __name__ == "__main__":
    main()
