"""A rank that fails at any step of a load ends it on all ranks, at once, with its error; the group stays usable."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from foundry_moe.checkpoint.collective_errors import portable
from foundry_moe.checkpoint.exchange import Targets, Traffic, _Exchange
from foundry_moe.checkpoint.layout import Grid, Layout, plan_writes
from foundry_moe.checkpoint.manifest import build_manifest
from foundry_moe.checkpoint.range_reads import Fetcher
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
