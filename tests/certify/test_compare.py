"""What counts as a difference of two records, with records made by hand."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from foundry_moe.certify.compare import _MOST, TOLERANCE, Report, _renamed, compare
from foundry_moe.certify.record import Quantity, Record, Rows, Step
from foundry_moe.schema import UserError

pytestmark = pytest.mark.quick
SHAPES = {"a.weight": (4, 4), "b.weight": (4, 4)}
Kinds = Mapping[str, Mapping[str, Rows | None]]


def row(norm: float, *projections: float) -> list[list[float]]:
    """Of a matrix: the square of its norm, and projections, which are as large by default."""
    return [[norm**2, *(projections or (norm, -norm))]]


BOTH = {"a.weight": row(1.0), "b.weight": row(2.0)}
KINDS: Kinds = {"gradient": BOTH, "weight": BOTH}


def record(
    steps: Sequence[Kinds], *, apart: Mapping[str, float] | None = None, dtype: str = "float32", name: str = "b", **more
) -> Record:
    def step(number: int, kinds: Kinds) -> Step:
        return Step(number=number, kinds={k: Quantity(rows=r, apart=apart or {}) for k, r in kinds.items()}, **more)

    return Record(
        name=name, ranks=4, projections=2, shapes=SHAPES, dtypes=dict.fromkeys(SHAPES, dtype),
        held={key: [((0, 0), shape)] * 4 for key, shape in SHAPES.items()},
        begin=step(0, {"weight": BOTH}), steps=tuple(step(number, kinds) for number, kinds in enumerate(steps, 1)),
    )  # fmt: skip


def changed(kind: str, **rows: Rows | None) -> Kinds:
    """`KINDS` with other rows of a or b."""
    return {**KINDS, kind: {**KINDS[kind], **{f"{key}.weight": value for key, value in rows.items()}}}


def compared(ours: Kinds, theirs: Kinds) -> Report:
    return compare(record([ours], name="a"), record([theirs]))


@pytest.mark.parametrize(
    ("here", "there"),
    [
        (row(1.0), row(0.0)),
        (row(0.0), row(1.0)),
        (row(1.0), None),
        (None, row(1.0)),
        (row(1.0), row(math.nan)),
        (row(1.0), row(1.0, 1.0, math.inf)),
        (row(1.0), row(1.0, 1.0, 1.0)),  # equal norms
        (row(1.0), row(1.001)),
    ],
)
def test_a_tensor_that_is_zero_missing_no_number_or_another_differs(here: Rows | None, there: Rows | None) -> None:
    assert compared(KINDS, KINDS).same
    for kind in ("gradient", "weight"):
        report = compared(changed(kind, a=here), changed(kind, a=there))
        assert report.first is not None and [str(unit) for unit in report.first.units] == ["a.weight"], kind
        assert report.first.kind == kind
    nothing = changed("gradient", a=row(0.0), b=row(0.0))
    assert compared(nothing, KINDS).first is not None, "beside no other gradient"
    absent = {**KINDS, "gradient": {"a.weight": None, "b.weight": row(2.0)}}
    assert compared(absent, absent).first is None


def test_gradients_of_rounding_size_are_left_out_and_none_that_are_zero() -> None:
    small = row(1e-9)
    report = compared(changed("gradient", a=small), changed("gradient", a=row(3e-9)))
    assert report.first is None and any("of rounding size: a.weight" in note for note in report.notes)
    assert compared(changed("gradient", a=row(0.0)), KINDS).first is not None
    for other in (row(1.0), None):  # of rounding size in one record alone
        for ours, theirs in ((small, other), (other, small)):
            first = compared(changed("gradient", a=ours), changed("gradient", a=theirs)).first
            assert first is not None and first.kind == "gradient", (ours, theirs)


def test_records_without_a_gradient_are_refused() -> None:
    for nothing in (row(0.0), None):
        kinds = changed("gradient", a=nothing, b=nothing)
        with pytest.raises(UserError, match="a and b have no gradient of a common parameter"):
            compared(kinds, kinds)


@pytest.mark.parametrize(
    ("ours", "theirs", "where"), [(1.0, math.nan, "b"), (math.inf, 1.0, "a"), (math.nan, math.nan, "a and b")]
)
def test_values_that_are_not_finite_are_named(ours: float, theirs: float, where: str) -> None:
    for kind in ("gradient", "weight"):
        report = compared(changed(kind, a=row(ours)), changed(kind, a=row(theirs)))
        assert report.symptoms == (f"{kind} of a.weight at step 1 has values that are not finite in {where}",)


def test_the_tolerance_doubles_with_each_step_and_stays_below_a_zero_or_doubled_gradient() -> None:
    steps = 14
    for wrong in range(1, steps + 1):
        for factor, differs in ((1 + 1.5 * TOLERANCE["bfloat16"], wrong == 1), (1 - 1.2 * _MOST, True), (2.0, True)):
            theirs = [KINDS] * steps
            theirs[wrong - 1] = changed("gradient", a=row(factor))
            first = compare(record([KINDS] * steps, dtype="bfloat16"), record(theirs, dtype="bfloat16")).first
            assert (first is not None) == differs, (wrong, factor)
            assert first is None or first.step == wrong


@pytest.mark.parametrize("off", [1e-3, math.inf, math.nan])
def test_replicas_that_differ_or_are_no_numbers_are_a_symptom(off: float) -> None:
    ours, theirs = record([KINDS], name="a"), record([KINDS], apart={"a.weight": off})
    for one, other in ((ours, theirs), (theirs, ours)):
        (said,) = compare(one, other).symptoms
        assert "weight of a.weight differs between replicas before the first step" in said
    assert compare(ours, record([KINDS], apart={"a.weight": 1e-12})).same


@pytest.mark.parametrize(
    ("factor", "cause"),
    [
        (4.0, ": the number of ranks or the data parallel degree"),
        (0.25, ": 1 / the number of ranks or 1 / the data parallel degree"),
        (2.0, ": the number of microbatches"),
        (0.5, ": 1 / the number of microbatches"),
        (-1.0, ""),
        (3.0, ""),
    ],
)
def test_a_factor_of_all_gradients_is_named_with_its_cause(factor: float, cause: str) -> None:
    rows = {key: [[factor**2 * r[0][0], factor * r[0][1], factor * r[0][2]]] for key, r in BOTH.items()}
    theirs = {"gradient": rows}
    report = compare(record([KINDS], name="a", microbatches=2), record([KINDS | theirs], microbatches=2))
    assert report.symptoms == (f"all gradients at step 1 are {factor:.4g} times those of a{cause}",)


def test_a_factor_that_rounds_to_one_is_not_named_and_bf16_is_considered() -> None:
    for factor in (1.0003, 0.997):
        rows = {key: [[factor**2 * r[0][0], factor * r[0][1], factor * r[0][2]]] for key, r in BOTH.items()}
        report = compared(KINDS, KINDS | {"gradient": rows})
        assert report.first is not None and not report.symptoms
        assert any("within the rounding of bf16: if the runs compute in it" in note for note in report.notes)
    assert not any("bf16" in note for note in compared(KINDS, changed("gradient", a=row(1.2))).notes)


def with_settings(*steps: Mapping[str, Mapping[str, float]], name: str = "b", kinds: Kinds = KINDS) -> Record:
    made = record([kinds] * len(steps), name=name)
    return replace(
        made, steps=tuple(replace(step, settings=found) for step, found in zip(made.steps, steps, strict=True))
    )


LR = {"a.weight": {"lr": 0.1, "eps": 0.0}, "b.weight": {"lr": 0.2, "eps": 0.0}}


def test_the_first_step_at_which_a_setting_differs_is_named() -> None:
    lower = {"a.weight": {"lr": 0.05, "eps": 1e-08}, "b.weight": {"lr": 0.2, "eps": 1e-08}}
    symptoms = compare(with_settings(LR, LR, LR, name="a"), with_settings(LR, lower, {})).symptoms
    assert symptoms == (
        "the optimizer's lr of a.weight at step 2 is 0.05 in place of 0.1",
        "the optimizer's eps of a.weight, b.weight at step 2 is 1e-08 in place of 0",
    )
    swapped = {"a.weight": LR["b.weight"], "b.weight": LR["a.weight"]}
    (said,) = compare(with_settings(LR, name="a"), with_settings(swapped)).symptoms
    assert said.endswith("of a.weight, b.weight at step 1 is 0.2 in place of 0.1, 0.1 in place of 0.2")
    renamed = _renamed(with_settings({name.upper(): found for name, found in swapped.items()}), str.upper)
    assert compare(with_settings(LR, name="a"), renamed, rename=str.lower).symptoms == (said,)


def test_settings_of_one_record_alone_and_rounding_are_no_difference() -> None:
    ours = with_settings(LR, name="a")
    others = {name: {"lr": found["lr"] * (1 + 1e-7), "momentum": 0.9} for name, found in reversed(LR.items())}
    others["a.weight"]["eps"] = 1e-20
    for theirs in (LR, others, {}):
        reports = compare(ours, with_settings(theirs)), compare(with_settings(theirs), ours)
        for report in reports:
            assert report.same
            assert report.notes == (() if theirs else ("the optimizer's settings are not compared: not in b",))


def test_a_trained_parameter_that_one_optimizer_does_not_have_is_named() -> None:
    ours, theirs = with_settings(LR, name="a"), with_settings({"a.weight": LR["a.weight"]})
    for one, other in ((ours, theirs), (theirs, ours)):
        assert compare(one, other).symptoms == ("b: b.weight is not in the optimizer at step 1",)
    frozen = changed("gradient", b=None)
    ours = with_settings(LR, name="a", kinds=frozen)
    assert compare(ours, with_settings({"a.weight": LR["a.weight"]}, kinds=frozen)).same
