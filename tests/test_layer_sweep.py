"""The sweep's table calls a cliff what its neighbours do not explain, and nothing else."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from layer_sweep import TOKENS, Point, Time, cliffs, neighbours, table, work_ms


def point(tokens, dtype="bf16", load="uniform", what="step"):
    return Point(layer="few", dtype=dtype, load=load, what=what, tokens=tokens)


def level(**kind):
    """Times that are what work takes, and 0.1 ms."""
    points = [point(tokens, **kind) for tokens in TOKENS]
    works = [work_ms(p, 8 * p.tokens, min(256, 8 * p.tokens)) for p in points]
    return {p: Time(ms=0.1 + work, work_ms=work) for p, work in zip(points, works, strict=True)}


def test_times_that_follow_the_work_have_no_cliff():
    assert cliffs(level()) == {}


@pytest.mark.parametrize("factor, found", [(1.4, False), (2.0, True)])
def test_one_slow_size_is_a_cliff(factor, found):
    times = level()
    slow = point(64)
    times[slow] = Time(ms=times[slow].ms * factor, work_ms=times[slow].work_ms)
    assert (slow in cliffs(times)) is found
    marked = [line for line in table(times, "few", "step") if "(" in line[1]]
    assert [line[0] for line in marked] == (["64"] if found else [])


def test_a_load_or_a_dtype_is_compared_at_the_same_tokens():
    assert set(neighbours(point(64, dtype="fp16", load="one"))) == {
        point(32, dtype="fp16", load="one"),
        point(128, dtype="fp16", load="one"),
        point(64, dtype="fp16"),
        point(64, load="one"),
    }
    times = level() | {p: Time(ms=2 * t.ms, work_ms=t.work_ms) for p, t in level(load="zipf").items()}
    assert len(cliffs(times)) == len(TOKENS)
