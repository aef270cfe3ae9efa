"""A rank that fails at any step of a load ends it on all ranks, at once, with its error; the group stays usable."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from foundry_moe.checkpoint.collective_errors import portable
from foundry_moe.checkpoint.errors import CheckpointError, DamagedError, NotFoundError, StoreError
from foundry_moe.checkpoint.exchange import Targets, Traffic, _Exchange
from foundry_moe.checkpoint.layout import Block, Chunks, Grid, Layout, plan_writes
from foundry_moe.checkpoint.manifest import Manifest, block_hash, build_manifest
from foundry_moe.checkpoint.range_reads import GAP_BYTES, Fetcher, block_of, coalesce
from foundry_moe.checkpoint.training_state import place
from foundry_moe.launch.processes import run_processes
from tests.checkpoint import exchange_worker as worker
from tests.checkpoint.exchange_worker import Case
from tests.helpers.launching import PRELOAD

RANKS = 4
TIMEOUT_S = 30.0  # of the group: for so long ranks would wait for one that left
AT_ONCE_S = 5.0

STEPS = ("memory", "read", "place")
EVERYWHERE = [Case(way=way, whole=False, step=step) for way in ("one host", "sent") for step in STEPS]
WHOLE = [Case(way="one host", whole=True, step=step) for step in STEPS]
FIRST_CALL = [Case(way="sent", whole=True, step=step, call=1) for step in ("memory", "read")]
KINDS = [Case(way="sent", whole=True, step="read", errors={1: error}) for error in worker.ERRORS]
TWO = [
    Case(way="one host", whole=False, step="read", errors={0: "damage", 2: "device"}),
    Case(way="one host", whole=False, step="read", errors={0: "damage", 2: "silent store"}),
]


def text(case: Case) -> str:
    return f"{case.way}, {'whole' if case.whole else 'cut'}, {case.step} {case.call}, {case.errors}"


def test_a_rank_that_fails_ends_the_load_on_all_ranks_with_its_error(tmp_path) -> None:
    cases = [*EVERYWHERE, *WHOLE, *FIRST_CALL, *KINDS, *TWO]
    results = run_processes(
        worker.fail_each, str(tmp_path), cases, TIMEOUT_S, world_size=RANKS, timeout_s=300.0, preload=PRELOAD
    )
    for case, ended, again in results:
        at = text(case)
        assert [rank for rank in range(RANKS) if ended[rank].struck] == sorted(case.errors), at
        assert max(one.seconds for one in ended) < AT_ONCE_S, f"{at}: {ended}"
        assert all((one.kind, one.message, one.step) == _expected(case) for one in ended), f"{at}: {ended}"
        newest = 1 if _expected(case)[2] == 1 else 2  # what was found damaged is not tried again
        assert all((one.kind, one.step) == ("loaded", newest) for one in again), f"{at}, after it: {again}"
    assert len(results) == len(cases)


def test_an_error_that_pickle_cannot_bring_ends_a_save_and_a_load_on_all_ranks(tmp_path) -> None:
    results = run_processes(
        worker.fail_beside_the_exchange, str(tmp_path), TIMEOUT_S, world_size=RANKS, timeout_s=200.0, preload=PRELOAD
    )
    assert [(ended.kind, ended.step) for ended in results.pop("nothing")] == [("loaded", 2)] * RANKS
    assert len(results) == 4
    for name, ended in results.items():
        assert all("TwoPartError: injected: a bug" in one.message for one in ended), f"{name}: {ended}"
        assert max(one.seconds for one in ended) < AT_ONCE_S, f"{name}: {ended}"


def _expected(case: Case) -> tuple[str, str, int | None]:
    """Kind and message of the error that all ranks raise, or the step that all load."""
    decides = case.errors[max(case.errors)]  # in TWO, who saw no damage: it may be that nothing else is wrong
    if decides == "damage":
        return "loaded", "", 1  # the commit before
    error = portable(worker.ERRORS[decides]())
    return type(error).__name__, str(error), None


@pytest.mark.parametrize("seed", range(20))
def test_in_each_round_a_rank_expects_what_the_others_send_it(seed: int) -> None:
    """On random meshes, so that a rank belongs to several sets of ranks, which share different blocks."""
    rng = random.Random(seed)
    shapes = {"a": (96, 40), "b": (6, 24, 16), "c": (48,), "d": (24, 36)}

    def layouts(world: int) -> dict[str, Layout]:
        mesh = rng.choice([(world,), (2, world // 2), (world // 2, 2)])
        grid = Grid(mesh, tuple(range(world)))
        return {
            name: Layout(shape, grid, tuple(rng.sample([None, *range(len(shape)), None], len(mesh))))
            for name, shape in shapes.items()
        }

    saved, wanted = layouts(rng.choice([4, 6])), layouts(rng.choice([4, 6, 8]))
    plans = plan_writes([(layout, 4) for layout in saved.values()], max_bytes=1024)
    objects = {rank: place(blocks) for rank, blocks in plans.items()}
    written = {
        rank: (plan.size_bytes, plan.rows(list(shapes), np.zeros(len(plan.blocks), dtype=np.uint64)))
        for rank, plan in objects.items()
    }
    manifest = build_manifest({name: (torch.float32, shape) for name, shape in shapes.items()}, written, {}, {})
    store = SimpleNamespace(range_bytes=2048)
    sides = {}
    for rank in range(math.prod(wanted["a"].grid.shape)):
        places = {
            name: [(box, torch.empty(box[1])) for box in layout.boxes_of(rank)] for name, layout in wanted.items()
        }
        targets = Targets(manifest, rank, wanted, places)
        sides[rank] = _Exchange(targets, Fetcher(store, "", manifest), {rank}, None, Traffic())
    read = [block for side in sides.values() for part, _ in side.reads for block, _ in part.blocks]
    assert len(set(read)) == len(read), "each block is read by one rank"
    for here, side in sides.items():
        got = {block for part, _ in side.reads for block, _ in part.blocks}
        for number, each in enumerate(side.rounds):
            for there, other in sides.items():
                theirs = other.rounds[number].sent if number < len(other.rounds) else []
                assert [part for part, source in each.arriving if source == there] == [
                    part for part, to in theirs if here in to and here != there
                ]
            got |= {block for part, _ in each.arriving for block, _ in part.blocks}
        for there, other in sides.items():
            assert here == there or all(
                here not in to for late in other.rounds[len(side.rounds) :] for _, to in late.sent
            )
        assert got >= {block for dealt in side.targets.needed.values() for mine in dealt.values() for block in mine}


def test_an_error_that_pickle_cannot_bring_is_said_in_another() -> None:
    error = worker.TwoPartError("one", "two")
    said = portable(error)
    assert str(said) == "TwoPartError: one two" and said.__cause__ is error
    plain = MemoryError("no memory")
    assert portable(plain) is plain


def test_the_first_error_is_kept_and_nothing_runs_after_it() -> None:
    side, ran = _Exchange.__new__(_Exchange), []
    side.failure = None

    def fail(name: str) -> None:
        ran.append(name)
        raise ValueError(name)

    assert side._guard(len, "four") == 4
    assert side._guard(fail, "first") is None and side._guard(fail, "second") is None
    assert ran == ["first"] and str(side.failure) == "first"
    side.failure = None
    with pytest.raises(KeyboardInterrupt):
        side._guard(_interrupt)


def _interrupt() -> None:
    raise KeyboardInterrupt


def blocks_at(starts: Sequence[int], size_bytes: int) -> tuple[Manifest, list[Block]]:
    """Tensors of one block each in one object."""
    names = [f"t{start}" for start in starts]
    tensors = {name: (torch.uint8, (size_bytes,)) for name in names}
    hashes = [block_hash(bytes([start % 251]) * size_bytes) for start in starts]
    box = ((0,), (size_bytes,))
    rows = [(name, box, start, digest) for name, start, digest in zip(names, starts, hashes, strict=True)]
    manifest = build_manifest(tensors, {0: (max(starts) + size_bytes, rows)}, {}, {})
    return manifest, [block_of(entry, item, 0) for item, entry in enumerate(manifest.tensors.values())]


@pytest.mark.quick
def test_blocks_that_lie_close_are_read_together_up_to_the_limit() -> None:
    manifest, blocks = blocks_at([0, 128, 256, 384, 512 + GAP_BYTES - 28, 100_000, 100_128, 300_000], 100)
    parts = coalesce(manifest, blocks[::-1], 384)
    assert [(part.start, part.size_bytes, len(part.blocks)) for part in parts] == [
        (0, 356, 3),
        (384, 100, 1),  # the limit
        (512 + GAP_BYTES - 28, 100, 1),
        (100_000, 228, 2),
        (300_000, 100, 1),
    ]
    assert [start for _, start in parts[0].blocks] == [0, 128, 256]
    assert [len(part.blocks) for part in coalesce(manifest, blocks, 2**20)] == [5, 2, 1], "a gap of 4096 bytes is read"
    assert [len(part.blocks) for part in coalesce(manifest, blocks, 50)] == [1] * 8, "a block is never cut"


WHOLE_BOX, SOME_ROWS = ((0, 0), (10, 8)), ((2, 0), (5, 8))


@pytest.mark.quick
@pytest.mark.parametrize(
    ("targets", "direct"),
    [
        ([(WHOLE_BOX, torch.zeros(10, 8, dtype=torch.int16))], True),
        ([(WHOLE_BOX, torch.zeros(10, 8, dtype=torch.float64))], False),
        ([(WHOLE_BOX, torch.zeros(10, 8, dtype=torch.bfloat16))], False),  # as many bytes
        ([(WHOLE_BOX, torch.zeros(8, 10, dtype=torch.int16).t())], False),
        ([(SOME_ROWS, torch.zeros(5, 8, dtype=torch.int16))], False),
        ([(box, torch.zeros(box[1], dtype=torch.int16)) for box in (WHOLE_BOX, SOME_ROWS)], False),
        ([(box, torch.zeros(box[1], dtype=torch.int16)) for box in (SOME_ROWS, WHOLE_BOX)], False),
    ],
    ids=["whole", "wider", "another dtype", "transposed", "part", "whole and part", "part and whole"],
)
def test_a_block_is_read_to_its_final_memory_only_where_that_holds_its_bytes(targets: Any, direct: bool) -> None:
    expected = torch.arange(80, dtype=torch.int16).view(10, 8)
    raw = expected.numpy().tobytes()
    rows = {0: (len(raw), [("w", WHOLE_BOX, 0, block_hash(raw))])}
    manifest = build_manifest({"w": (torch.int16, (10, 8))}, rows, {}, {})

    def read_into(key: str, start: int, out: memoryview, see: Callable[[memoryview], object]) -> None:
        out[:] = raw
        see(out)

    store: Any = SimpleNamespace(range_bytes=1024, read_into=read_into)
    needs = {"w": Chunks([(box, (0,)) for box, _ in targets])}
    side = _Exchange(Targets(manifest, 0, needs, {"w": targets}), Fetcher(store, "", manifest), {0}, None, Traffic())
    assert [memory is not None for _, memory in side.reads] == [direct]
    side.run()
    for ((first, _), (number, _)), tensor in targets:
        assert torch.equal(tensor.to(torch.int16), expected[first : first + number])


@pytest.mark.quick
@pytest.mark.parametrize("starts", [(0,), (0, 128)], ids=["hashed while it is read", "hashed afterwards"])
@pytest.mark.parametrize("fault", ["", "flipped once", "flipped", "missing", "short", "silent"])
def test_a_range_is_read_again_if_it_arrives_changed_and_its_error_is_of_what_is_there(starts: Any, fault: str) -> None:
    manifest, blocks = blocks_at(starts, 100)
    reads: list[int] = []

    def read_into(key: str, start: int, out: memoryview, see: Callable[[memoryview], object]) -> None:
        reads.append(start)
        if fault == "missing":
            raise NotFoundError("no such object")
        if fault in ("short", "silent"):
            raise StoreError("nothing came")
        for begin in starts:
            out[begin : begin + 100] = bytes([begin % 251]) * 100
        out[-1] ^= fault == "flipped" or (fault == "flipped once" and len(reads) == 1)
        see(out)

    whole = manifest.objects[0][1]
    store: Any = SimpleNamespace(read_into=read_into, size_bytes=lambda key: whole - (fault == "short"))
    (part,) = coalesce(manifest, blocks)
    fetch = functools.partial(Fetcher(store, "attempt", manifest).fetch, part, memoryview(bytearray(part.size_bytes)))
    if fault in ("", "flipped once"):
        assert fetch()[-1] == starts[-1] % 251 and len(reads) == (2 if fault else 1)
        return
    kind, words = {
        "flipped": (DamagedError, f"100 bytes from {starts[-1]} on, a block of t{starts[-1]}, do not have"),
        "missing": (DamagedError, r"attempt/data/000000\.bin is missing"),
        "short": (DamagedError, f"has {whole - 1} bytes, not {whole}"),
        "silent": (StoreError, "nothing came"),
    }[fault]
    with pytest.raises(CheckpointError, match=words) as caught:
        fetch()
    assert type(caught.value) is kind and len(reads) == (3 if fault == "flipped" else 1)
