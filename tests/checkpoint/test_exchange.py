"""A rank that fails at any step of a load ends it on all ranks, at once, with its error; the group stays usable."""

from __future__ import annotations

import pytest

from foundry_moe.checkpoint.collective_errors import portable
from foundry_moe.checkpoint.exchange import _Exchange
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
