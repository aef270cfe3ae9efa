"""Compares two records: the first step and tensors that differ by more than rounding, and a diagnosis.

Of two runs that should be the same, such as one process and many, or a run and its resumption.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from foundry_moe.certify.record import Quantity, Record, Step
from foundry_moe.certify.sketch import STACK
from foundry_moe.schema import UserError, shorten

# Sums in another order: measured up to 3e-15 in fp64, 1e-6 in fp32, a few units of rounding in 16 bits.
TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 5e-2, "float16": 2e-2}
_EPSILON = {"float64": 2e-16, "float32": 1e-7, "bfloat16": 8e-3, "float16": 1e-3}
SAME_BITS = 1e-9  # of sketches of equal bits, in replicas, a checkpoint, or a resumption: fp64 sums in another order
# A tensor has a setting in fp32; the end of a schedule is 0, or some 1e-20 by another formula.
_SETTING = {"rel_tol": 1e-6, "abs_tol": 1e-12}
_GATE = re.compile(r"(^|[._])(gate|router|wg)([._](weight|bias|\w*_ED?)|$)")
_DOUBLINGS = 10  # of the tolerance, one for each later step: rounding grows with training
_MOST = 0.25  # a zero or doubled gradient differs by 0.5 or more, rounding in bf16 by 0.06 after 14 steps of the tests


class Unit(NamedTuple):
    """A tensor, or one of a stack (`place` is then not None)."""

    name: str
    place: int | None

    def __str__(self) -> str:
        return self.name if self.place is None else f"{self.name}[{self.place}]"


class Pair(NamedTuple):
    """Sketches of a unit in both records; None = there is no such tensor."""

    unit: Unit
    numel: int
    a: Sequence[float] | None
    b: Sequence[float] | None


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Units of one kind that differ at one step by more than `tolerance`, the largest difference first."""

    step: int
    kind: str
    units: tuple[Unit, ...]
    tolerance: float
    largest: float
    compared: int


@dataclass(frozen=True, kw_only=True)
class Report:
    """first: what differs first. symptoms: sentences. steps: compared. notes: facts that change no verdict.

    tolerance: of the first step; of the start if that alone is compared.
    """

    first: Difference | None
    symptoms: tuple[str, ...]
    steps: tuple[int, ...]
    tolerance: float
    largest: float
    notes: tuple[str, ...] = ()

    @property
    def same(self) -> bool:
        return self.first is None and not self.symptoms


def compare(
    a: Record, b: Record, *, tolerance: float | None = None, rename: Callable[[str], str] | None = None
) -> Report:
    """Compares B with A, the reference.

    Args:
        tolerance: relative, of the first step; None: of the least precise type of a parameter, and 1e-9 at the start
            where B has the same bits: a checkpoint in A's types, or a resumption of A.
        rename: from a name in B to that in A.

    Raises:
        ValueError: the records have no parameter or no step in common, or no gradient of a common parameter.
    """
    b = _renamed(b, rename) if rename is not None else b
    names = [name for name in a.shapes if b.shapes.get(name) == a.shapes[name]]
    if not names:
        raise UserError(f"{a.name} and {b.name} have no parameter of the same name and shape: see --names")
    dtypes = {record.dtypes[name] for record in (a, b) for name in names}
    limit = tolerance or max(TOLERANCE.get(dtype, TOLERANCE["bfloat16"]) for dtype in dtypes)
    judge = _Judge(a, b, names, limit, floor_of(dtypes, limit), exact=tolerance is None)
    symptoms = [*_other_parameters(a, b), *_replicas(b), *_replicas(a), *judge.untrained(), *judge.settings()]
    first = judge.run()
    if first is not None:
        if not symptoms and first.kind in ("unclipped", "gradient") and first.largest <= TOLERANCE["bfloat16"]:
            judge.notes.append(
                "the first difference is within the rounding of bf16: if the runs compute in it, as under autocast, "
                f"give a tolerance of {TOLERANCE['bfloat16']}"
            )
        symptoms += judge.diagnose(first)
    if not judge.steps and judge.start is None:
        raise UserError(
            f"{a.name} has steps {_range(a)}, {b.name} {_range(b)}: no step in common; pass `step` to Recorder"
        )
    return Report(
        first=first,
        symptoms=tuple(dict.fromkeys(symptoms)),
        steps=tuple(step.number for step, _ in judge.steps),
        tolerance=limit if b.steps else judge.start_limit,
        largest=judge.largest,
        notes=(*judge.notes, *judge.left_out()),
    )


def _range(record: Record) -> str:
    return f"{record.steps[0].number} to {record.steps[-1].number}"


def _renamed(record: Record, rename: Callable[[str], str]) -> Record:
    def keys(found: Mapping) -> dict:
        return {rename(name): value for name, value in found.items()}

    def step(of: Step) -> Step:
        kinds = {kind: Quantity(rows=keys(q.rows), apart=keys(q.apart)) for kind, q in of.kinds.items()}
        return replace(of, kinds=kinds, settings=keys(of.settings))

    parts: dict = {"shapes": keys(record.shapes), "dtypes": keys(record.dtypes), "held": keys(record.held)}
    return replace(record, **parts, begin=step(record.begin), steps=tuple(map(step, record.steps)))


def _other_parameters(a: Record, b: Record) -> Iterator[str]:
    for one, other in ((a, b), (b, a)):
        missing = [name for name in one.shapes if name not in other.shapes]
        if missing:
            yield f"{other.name} has no parameter {shorten(missing)}"
    for name in a.shapes:
        if name in b.shapes and a.shapes[name] != b.shapes[name]:
            yield f"{name} has shape {list(a.shapes[name])} in {a.name} and {list(b.shapes[name])} in {b.name}"


def _replicas(record: Record) -> Iterator[str]:
    for step in (record.begin, *record.steps):
        for kind, quantity in step.kinds.items():
            apart = [name for name, off in quantity.apart.items() if not off <= SAME_BITS]
            if apart and (kind == "weight" or kind.startswith("state ")):
                when = "before the first step" if step is record.begin else f"after step {step.number}"
                yield f"{record.name}: {kind} of {shorten(apart)} differs between replicas {when}"
                return


def _finite(row: Sequence[float] | None) -> bool:
    return row is None or all(map(math.isfinite, row))


def _norm(row: Sequence[float] | None) -> float:
    return math.sqrt(max(row[0], 0.0)) if row is not None else 0.0


def pairs_of(ours: Step, theirs: Step, kind: str, shapes: Mapping[str, tuple[int, ...]]) -> list[Pair]:
    """Sketches of a kind at two steps, for the parameters in `shapes`; without units that neither step has."""
    pairs = []
    for name, shape in shapes.items():
        found = [step.kinds[kind].rows.get(name) if kind in step.kinds else None for step in (ours, theirs)]
        for index in range(max((len(rows) for rows in found if rows is not None), default=0)):
            unit = Unit(name, index if len(shape) >= STACK else None)
            a, b = (None if rows is None else rows[index] for rows in found)
            pairs.append(Pair(unit, math.prod(shape[1:] if len(shape) >= STACK else shape), a, b))
    return pairs


def relative_differences(pairs: Sequence[Pair], floor: float) -> dict[Unit, float]:
    """The larger difference of norms or projections over the norm; infinite where one is missing or no number.

    Args:
        floor: of the norm, as a share of the norm that the unit would have with the largest rms of these.
    """
    rms = max((_norm(pair.a) / math.sqrt(pair.numel) for pair in pairs if pair.numel), default=0.0)
    return {pair.unit: _off(pair, floor * rms * math.sqrt(pair.numel)) for pair in pairs}


def floor_of(dtypes: Iterable[str], tolerance: float) -> float:
    """See `relative_differences`: so that rounding of a larger tensor's scale is within the tolerance."""
    return min(0.1, 10 * max(_EPSILON.get(dtype, 8e-3) for dtype in dtypes) / tolerance)


def _off(pair: Pair, least: float) -> float:
    a, b = pair.a, pair.b
    if a is None or b is None:
        return 0.0 if _norm(a) == _norm(b) == 0 else math.inf
    scale = max(_norm(a), _norm(b), least)
    if scale == 0:
        return 0.0
    off = max(abs(_norm(a) - _norm(b)), *(abs(x - y) for x, y in zip(a[1:], b[1:], strict=False))) / scale
    return off if math.isfinite(off) else math.inf


class _Judge:
    """The comparison of two records, with its findings so far.

    start: A's weights and states where B begins. steps: those that both have. pair: the two that were compared last.
    """

    def __init__(self, a: Record, b: Record, names: Sequence[str], limit: float, floor: float, *, exact: bool) -> None:
        self.a, self.b, self.names, self.limit, self.floor = a, b, names, limit, floor
        of_a = {step.number: step for step in a.steps}
        self.start = {**of_a, a.begin.number: a.begin}.get(b.begin.number)
        self.steps = [(of_a[step.number], step) for step in b.steps if step.number in of_a]
        self.pair = a.begin, b.begin
        self.largest = 0.0
        self.notes: list[str] = []
        self._rounding: set[Unit] = set()  # units that are not compared at this step
        self._left_out: dict[Unit, None] = {}  # those of all steps
        same_bits = exact and all(a.dtypes[name] == b.dtypes[name] for name in names) and self._continues()
        self.start_limit, self.start_floor = (SAME_BITS, 0.0) if same_bits else (limit, floor)
        self._divided = {name: max(a.divisions(name), b.divisions(name)) for name in names}

    def run(self) -> Difference | None:
        """The first difference."""
        if self.start is not None:
            self.pair = self.start, self.b.begin
            found = self._difference(self._kinds(*self.pair), self.start_limit, self.start_floor)
            if found is not None:
                return found
        for index, (ours, theirs) in enumerate(self.steps):
            self.pair = ours, theirs
            limit = min(self.limit * 2 ** min(index, _DOUBLINGS), max(self.limit, _MOST))
            self._rounding = self._of_rounding_size(ours) & self._of_rounding_size(theirs)
            self._left_out |= dict.fromkeys(self._rounding)
            kinds = ("unclipped", "gradient", *self._kinds(ours, theirs))
            both = [kind for kind in kinds if kind in ours.kinds and kind in theirs.kinds]
            found = self._difference(both, limit, self.floor)
            if found is not None:
                return found
            self._note_loss(ours, theirs, limit)
        return None

    def _kinds(self, ours: Step, theirs: Step) -> list[str]:
        """States, then weights, which follow from them."""
        found = [kind for kind in {**ours.kinds, **theirs.kinds} if kind.startswith("state ")]
        return [*sorted(found), "weight"]

    def _pairs(self, ours: Step, theirs: Step, kind: str) -> list[Pair]:
        return pairs_of(ours, theirs, kind, {name: self.a.shapes[name] for name in self.names})

    def _continues(self) -> bool:
        """Whether B begins with bits that A had: a checkpoint, or a resumption of A.

        A resumption has all optimizer states of some steps of A, whatever its weights; without states, all weights.
        """
        kinds = [kind for kind in self.b.begin.kinds if kind.startswith("state ")] or ["weight"]
        steps = (self.a.begin, *self.a.steps)
        return not self.b.steps or all(any(self._agree(step, kind, SAME_BITS, 0.0) for step in steps) for kind in kinds)

    def _difference(self, kinds: Iterable[str], limit: float, floor: float) -> Difference | None:
        """That of the first kind that differs in `pair`."""
        for kind in kinds:
            pairs = [p for p in self._pairs(*self.pair, kind) if p.unit not in self._rounding]
            off = relative_differences(pairs, floor)
            wrong = sorted((unit for unit in off if not off[unit] <= limit), key=lambda unit: -off[unit])
            self.largest = max([self.largest, *(value for value in off.values() if value <= limit)])
            if wrong:
                return Difference(
                    step=self.pair[1].number,
                    kind=kind,
                    units=tuple(wrong),
                    tolerance=limit,
                    largest=off[wrong[0]],
                    compared=len(pairs),
                )
        return None

    def _of_rounding_size(self, step: Step) -> set[Unit]:
        """Units whose gradients at this step are nothing but rounding."""
        pairs = self._pairs(step, step, "gradient")
        sizes = {p.unit: _norm(p.a) / math.sqrt(max(p.numel, 1)) for p in pairs}
        largest = max(sizes.values(), default=0.0)
        return {unit for unit, size in sizes.items() if 0 < size < self.floor * largest * 1e-2}

    def left_out(self) -> Iterator[str]:
        if found := sorted(self._left_out):
            yield f"not compared at steps where their gradients are of rounding size: {shorten(found)}"
        records = [record for record in (self.a, self.b) if record.steps]
        if lacking := [record.name for record in records if not any(step.settings for step in record.steps)]:
            yield f"the optimizer's settings are not compared: not in {' and '.join(lacking)}"

    def _note_loss(self, ours: Step, theirs: Step, limit: float) -> None:
        a, b = ours.mean_loss, theirs.mean_loss
        if a is not None and b is not None and abs(a - b) > limit * max(abs(a), 1e-6) and not self.notes:
            self.notes.append(
                f"step {theirs.number}: the mean of the losses is {b:.6g} and not {a:.6g}, though all gradients agree: "
                "one of the runs scales or averages the loss that it reports in another way"
            )

    def untrained(self) -> Iterator[str]:
        """Parameters that never get a gradient in B.

        Raises:
            UserError: no parameter does, in either record.
        """

        def never(record: Record) -> set[str]:
            rows = [step.kinds["gradient"].rows for step in record.steps if "gradient" in step.kinds]
            return {n for n in self.names if rows and all(not any(map(_norm, of.get(n) or ())) for of in rows)}

        in_a, in_b = never(self.a), never(self.b)
        lost = [name for name in self.names if name in in_b - in_a]
        if lost:
            yield f"{self.b.name}: {shorten(lost)} never has a gradient"
        both = [name for name in self.names if name in in_b & in_a]
        if len(both) == len(self.names):
            raise UserError(
                f"{self.a.name} and {self.b.name} have no gradient of a common parameter: did each Recorder get the "
                "model and the optimizer that are trained?"
            )
        if both:
            self.notes.append(f"never a gradient in both: {shorten(both)}")

    def settings(self) -> Iterator[str]:
        """The settings of the optimizer that differ at the first step at which one does, of those that both have."""
        for ours, theirs in self.steps:
            if not ours.settings or not theirs.settings:
                continue
            apart: dict[str, dict[str, str]] = {}
            for name in self.names:
                a, b = ours.settings.get(name, {}), theirs.settings.get(name, {})
                for key in a:
                    if key in b and not math.isclose(a[key], b[key], **_SETTING):
                        apart.setdefault(key, {})[name] = f"{b[key]:.8g} in place of {a[key]:.8g}"
            found = []
            for key, of_key in apart.items():
                values = shorten(dict.fromkeys(of_key.values()))
                found.append(f"the optimizer's {key} of {shorten(of_key)} at step {theirs.number} is {values}")
            pairs = self._pairs(ours, theirs, "gradient")
            trained = dict.fromkeys(p.unit.name for p in pairs if _norm(p.a) and _norm(p.b))
            for record, step, other in ((self.a, ours, theirs), (self.b, theirs, ours)):
                if lost := [name for name in trained if name in other.settings and name not in step.settings]:
                    found.append(f"{record.name}: {shorten(lost)} is not in the optimizer at step {theirs.number}")
            if found:
                yield from found
                return

    def diagnose(self, first: Difference) -> Iterator[str]:
        """Sentences on the cause of the first difference, that of `pair`; none for one of no known kind."""
        ours, theirs = self.pair
        if (ours.batch or ours.tokens) and (theirs.batch or theirs.tokens) and theirs is not self.b.begin:
            if ours.tokens != theirs.tokens:
                yield f"step {first.step}: another batch: {theirs.tokens} tokens, not {ours.tokens}"
                return
            if ours.batch != theirs.batch:
                yield f"step {first.step}: another batch of as many tokens"
                return
        at_start = theirs is self.b.begin
        where = f"at step {first.step}" if not at_start else "at the start" if self.b.steps else "in the checkpoint"
        stacks = self._stacks_of_a_rank(first)
        pairs = {pair.unit: pair for pair in self._pairs(ours, theirs, first.kind)}
        wrong = [pairs[unit] for unit in first.units]
        if broken := [p for p in wrong if not (_finite(p.a) and _finite(p.b))]:
            sides = ((self.a, [p.a for p in broken]), (self.b, [p.b for p in broken]))
            names = " and ".join(record.name for record, rows in sides if not all(map(_finite, rows)))
            yield f"{first.kind} of {shorten(p.unit for p in broken)} {where} has values that are not finite in {names}"
            return
        if first.kind.startswith("state ") and all(_norm(p.b) == 0 for p in wrong):
            lost = "restarted at zero" if self.b.steps else "is missing or zero"
            yield f"{first.kind} of {stacks or shorten(first.units)} {lost} {where}"
        elif first.kind.startswith("state ") and not at_start and (reset := self._restarted(first)):
            yield reset
        elif at_start and (stale := self._stale(first)) is not None:
            what = "the weights" if first.kind == "weight" else f"the values of {first.kind}"
            yield f"{what} {where} are those of step {stale}, not of step {first.step}"
        elif stacks:
            yield f"{first.kind} {where}: {stacks} differ, and all else agrees"
        elif first.kind in ("unclipped", "gradient"):
            yield from self._of_gradients(first, ours, theirs, wrong, where)
        elif not at_start:
            yield f"{first.kind} {where} differs and gradients agree: the optimizer's update or its settings differ"

    def _stacks_of_a_rank(self, first: Difference) -> str:
        """Names the rank whose experts are exactly those that differ; empty if there is none."""
        wrong: dict[str, set[int]] = {}
        for unit in first.units:
            if unit.place is None or self._divided[unit.name] < 2:
                return ""
            wrong.setdefault(unit.name, set()).add(unit.place)
        for record in (self.b, self.a):
            if any(record.divisions(name) < 2 for name in wrong):
                continue
            for rank in range(record.ranks):
                if all(indices == set(record.units_held(name, rank)) for name, indices in wrong.items()):
                    return f"the experts of rank {rank} of {record.name} ({shorten(sorted(wrong))})"
        return ""

    def _restarted(self, first: Difference) -> str:
        """Whether B's first moments are a multiple of its gradients, as after one step, and A's are not."""
        ours, theirs = self.pair
        kind, units = "state exp_avg", set(first.units)
        if kind not in theirs.kinds or "gradient" not in theirs.kinds:
            return ""
        gradients = {p.unit: p for p in self._pairs(ours, theirs, "gradient")}
        moments = [p for p in self._pairs(ours, theirs, kind) if p.unit in units or first.kind != kind]
        fresh = [
            _factor(gradients[p.unit].b, p.b) is not None and _factor(gradients[p.unit].a, p.a) is None
            for p in moments
            if _norm(p.b) and _norm(gradients[p.unit].b)
        ]
        return f"optimizer states restarted at zero at step {first.step}" if fresh and all(fresh) else ""

    def _stale(self, first: Difference) -> int | None:
        for step in (self.a.begin, *self.a.steps):
            if step.number != first.step and self._agree(step, first.kind, self.start_limit, self.start_floor):
                return step.number
        return None

    def _agree(self, step: Step, kind: str, limit: float, floor: float) -> bool:
        """Whether B begins with what A had after this step."""
        off = relative_differences(self._pairs(step, self.b.begin, kind), floor) if kind in step.kinds else {}
        return max(off.values(), default=math.inf) <= limit

    def _of_gradients(
        self, first: Difference, ours: Step, theirs: Step, wrong: Sequence[Pair], where: str
    ) -> Iterator[str]:
        what = "all gradients" if len(wrong) == first.compared else f"the gradients of {shorten(first.units)}"
        divided = {name for name, parts in self._divided.items() if parts > 1}
        if divided and {pair.unit.name for pair in wrong} == divided:
            what = "the gradients of all experts"
        factors = [_factor(pair.a, pair.b) for pair in wrong if _norm(pair.a)]
        known = [factor for factor in factors if factor is not None]
        if all(pair.b is None or _norm(pair.b) == 0 for pair in wrong):
            yield f"{what} {where} are missing in {self.b.name}"
        elif (
            known
            and len(known) == len(factors)
            and max(known) - min(known) <= 1e-2 * abs(max(known))
            and round(factor := known[0], 2) != 1
        ):
            clipped = first.kind == "gradient" and "unclipped" in ours.kinds and "unclipped" in theirs.kinds
            of_experts = bool(divided) and what.endswith("experts")
            cause = "clipping by another norm" if clipped else self._degree(factor, of_experts, ours, theirs)
            yield f"{what} {where} are {factor:.4g} times those of {self.a.name}" + (f": {cause}" if cause else "")
        elif all(_GATE.search(pair.unit.name) for pair in wrong):
            yield (
                f"{what} {where}, of gates alone, differ: an auxiliary loss is missing, counted twice, or scaled in "
                "another way"
            )
        elif ours.mean_loss is not None and theirs.mean_loss is not None:
            off = abs(ours.mean_loss - theirs.mean_loss) / max(abs(ours.mean_loss), 1e-6)
            if off > self.limit:
                yield f"the loss {where} is {theirs.mean_loss:.6g}, not {ours.mean_loss:.6g}: the forward pass differs"
            else:
                yield f"{what} {where} differ with equal losses: the backward pass or the reduction differs"

    def _degree(self, factor: float, of_experts: bool, ours: Step, theirs: Step) -> str:
        """The degrees that are the factor or its inverse."""
        experts, ranks = max(self._divided.values(), default=1), max(self.a.ranks, self.b.ranks)
        degrees = {"the number of microbatches": max(ours.microbatches, theirs.microbatches)}
        degrees |= {"the expert parallel degree": experts} if of_experts else {"the number of ranks": ranks}
        degrees["the data parallel degree"] = ranks // experts
        found = []
        for name, degree in degrees.items():
            if degree > 1 and min(abs(factor / degree - 1), abs(factor * degree - 1)) <= 1e-2:
                found.append(name if factor > 1 else f"1 / {name}")
        return " or ".join(found)


def _factor(a: Sequence[float] | None, b: Sequence[float] | None) -> float | None:
    """c with B = c A; None where no number does."""
    if a is None or b is None or not _norm(a) or not _norm(b):
        return None
    size = _norm(b) / _norm(a)
    for factor in (size, -size):
        if all(abs(y - factor * x) <= 1e-2 * _norm(b) for x, y in zip(a[1:], b[1:], strict=True)):
            return factor
    return None
