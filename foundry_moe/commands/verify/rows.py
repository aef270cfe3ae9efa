"""Rows of a certificate: differences between the results of trials, with tolerance and verdict."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foundry_moe.certify.compare import floor_of, pairs_of, relative_differences
from foundry_moe.certify.record import Step
from foundry_moe.schema import plain_name

# Sums in another order, over three steps of AdamW: fp64 measures 3e-15, fp32 some 1e-6.
TOLERANCE = {"fp64": 1e-10, "fp32": 1e-4}
# A loss that is dropped or counted twice is off by 1. Rounding is larger here, because the scale comes from the
# difference of two gradients.
SCALE_TOLERANCE = 5e-2


def difference(measured: Tensor | None, expected: Tensor | None) -> float:
    """The largest difference over the largest element expected; `inf` where one is missing, misshapen or no number."""
    if measured is None or expected is None or measured.shape != expected.shape:
        return float("inf")
    if not expected.numel():
        return 0.0
    off, scale = (measured.double() - expected.double()).abs().max().item(), expected.double().abs().max().item()
    relative = off / scale if scale else off
    return float("inf") if math.isnan(relative) else relative


@dataclass(frozen=True, kw_only=True)
class Row:
    """One quantity. `difference` is relative; None = not compared, and `why`."""

    quantity: str
    difference: float | None = None
    tolerance: float = TOLERANCE["fp32"]
    why: str = ""

    @property
    def verdict(self) -> str:
        if self.difference is None:
            return "not compared"
        return "same" if self.difference <= self.tolerance else "differs"


def compare_trials(
    mesh: Mapping[str, Any], alone: Mapping[str, Any], *, steps: int, clips: bool, tolerance: float = TOLERANCE["fp32"]
) -> list[Row]:
    """The mesh against one process, within `tolerance`; the weights at the start must be equal."""
    rows: list[Row] = []
    ours, theirs = ({step.number: step for step in seen["record"].steps} for seen in (alone, mesh))
    shapes = alone["record"].shapes
    floor = floor_of(alone["record"].dtypes.values(), tolerance)

    def row(quantity: str, found: Iterable[float], why: str = "", limit: float = tolerance) -> None:
        largest = max(found, default=None)
        rows.append(Row(quantity=quantity, difference=largest, tolerance=limit, why="" if largest is not None else why))

    def whole(prefix: str) -> list[float]:
        names = [name for name in mesh.keys() | alone.keys() if name.startswith(prefix)]
        return [difference(mesh.get(name), alone.get(name)) for name in names]

    def sketched(kind: str, step: int, part: str = "") -> list[float]:
        chosen = {name: shapes[name] for name, of in alone["kinds"].items() if part in ("", of)}
        return list(relative_differences(pairs_of(ours[step], theirs[step], kind, chosen), floor).values())

    def norms(kind: str) -> list[float]:
        return [difference(_norm(theirs[step], kind), _norm(ours[step], kind)) for step in range(1, steps + 1)]

    row("weights at the start", whole("begin/"), limit=0.0)
    row(f"loss of {steps} steps", [found for step in range(steps) for found in whole(f"loss/{step}")])
    # the first step's, on equal weights, show where a fault is: it is in all gradients after
    row("gate's gradient", sketched("unclipped", 1, "gate"), why="the gate has no weights")
    row("experts' gradients", sketched("unclipped", 1, "experts"))
    row("shared expert's gradients", sketched("unclipped", 1, "shared"), why="there is none")
    row("dense gradients", sketched("unclipped", 1, "dense"))
    later = [found for step in range(2, steps + 1) for found in sketched("unclipped", step)]
    row(f"all gradients of the next {steps - 1} steps", later)
    row("gradients' norm", norms("unclipped"))
    row("clipped norm", norms("gradient") if clips else (), why="the run does not clip")
    row(f"weights after {steps} steps", sketched("weight", steps))
    states = sorted({kind for step in (ours, theirs) for kind in step[steps].kinds if kind.startswith("state ")})
    row(f"optimizer's state after {steps} steps", [found for kind in states for found in sketched(kind, steps)])
    if any(name.startswith("buffer/") for name in alone):
        row(f"gate's bias after {steps} steps", whole("buffer/"))
        apart = max(float(value) for name, value in mesh.items() if name.startswith("agree/"))
        rows.append(Row(quantity="gate's bias, equal on all ranks", difference=apart, tolerance=0.0))
    return rows


def _norm(step: Step, kind: str) -> Tensor:
    rows = [row for rows in step.kinds[kind].rows.values() for row in rows or ()]
    return torch.tensor([row[0] for row in rows], dtype=torch.float64).sum().sqrt()


def formula_rows(seen: Mapping[str, Mapping[str, Any]], tolerance: float) -> list[Row]:
    """Layers against their formula, and the auxiliary losses' share of the gate's gradient."""
    alone = seen["alone"]
    layers: Mapping[str, Any] = alone["formula"]
    why = next((layer["why"] for layer in layers.values() if "why" in layer), "")
    names = ("layer's output, by its formula", "gate's gradient, by its formula", "experts' gradients, by formula")
    if why:
        return [Row(quantity=name, why=why) for name in (*names, "auxiliary losses' scale")]
    gradients: dict[bool, list[float]] = {True: [], False: []}  # of gates, of the rest
    for name, layer in layers.items():
        for parameter, main in layer["main"].items():
            expected = main + sum(layer["losses"].values()) if parameter == "gate.weight_ED" else main
            gradients[parameter.startswith("gate.")].append(difference(_of_layer(alone, name, parameter), expected))
    output = max(layer["output"] for layer in layers.values())
    found = [output, max(gradients[True], default=None), max(gradients[False], default=None)]
    rows = [
        Row(quantity=name, difference=value, tolerance=tolerance, why="" if value is not None else "it is not trained")
        for name, value in zip(names, found, strict=True)
    ]
    if not any(_felt(layer) for layer in layers.values()):
        return [*rows, Row(quantity="auxiliary losses' scale", why="no loss reaches a gate that is trained")]
    more = seen.get("more", {"formula": {}})
    scales = {
        "one process": _scales(layers, alone),
        "twice the microbatches": _scales(more["formula"], more),
        "the mesh": _scales(layers, seen["mesh"]),
    }
    return rows + [
        Row(quantity=f"auxiliary loss {loss}: scale on {where}", difference=off, tolerance=SCALE_TOLERANCE)
        for where, by_loss in scales.items()
        for loss, off in by_loss.items()
    ]


def _of_layer(seen: Mapping[str, Any], layer: str, parameter: str) -> Tensor | None:
    return seen.get(f"gradient/{plain_name(layer)}.{parameter}")


def _felt(layer: Mapping[str, Any]) -> dict[str, Tensor]:
    """The gate's gradient by loss, of losses that have one: a balance over all experts of each token is constant."""
    main = layer["main"].get("gate.weight_ED")
    least = 0.0 if main is None else 1e-9 * float(main.norm())
    return {loss: gradient for loss, gradient in layer["losses"].items() if gradient.norm() > least}


def _scales(layers: Mapping[str, Any], seen: Mapping[str, Any]) -> dict[str, float]:
    """|scale - 1| of each loss, from the gate's gradient less that of the main loss, by least squares."""
    worst: dict[str, float] = {}
    for name, layer in layers.items():
        measured = _of_layer(seen, name, "gate.weight_ED")
        losses = _felt(layer)
        if measured is None or not losses:
            continue
        rest = (measured.double() - layer["main"]["gate.weight_ED"]).flatten()
        lengths = torch.stack([gradient.norm() for gradient in losses.values()])
        terms = torch.stack([gradient.flatten() for gradient in losses.values()], dim=1) / lengths
        scales = torch.linalg.lstsq(terms, rest[:, None]).solution[:, 0] / lengths
        for loss, scale in zip(losses, scales, strict=True):
            worst[loss] = max(worst.get(loss, 0.0), abs(float(scale) - 1))
    return worst


def resume_rows(
    saved: Mapping[str, Any], resumed: Mapping[str, Any], step: int, where: str, tolerance: float
) -> list[Row]:
    """A resumption: its state bit by bit, and the loss of the batch after."""
    before = {name.removeprefix("saved/"): v for name, v in saved.items() if name.startswith("saved/")}
    after = {name.removeprefix("resumed/"): v for name, v in resumed.items() if name.startswith("resumed/")}
    wrong = [name for name in before if name not in after or not torch.equal(before[name], after[name])]
    wrong += [name for name in after if name not in before]
    off = max((difference(after.get(name), before.get(name)) or 1e-30 for name in wrong), default=0.0)
    if not before or not after:
        off = float("inf")
    return [
        Row(
            quantity=f"state saved, resumed on {where}",
            difference=off,
            tolerance=0.0,
            why=f"{len(wrong)} of {len(before)} tensors, such as {wrong[0]}" if wrong else "",
        ),
        Row(
            quantity=f"next loss, on {where}",
            difference=difference(resumed.get(f"loss/{step}"), saved.get(f"loss/{step}")),
            tolerance=tolerance,
        ),
    ]


def step_zero_row(alone: Mapping[str, Any]) -> Row:
    """A converted model's logits against those of the model that it came from."""
    quantity = "step 0 of the converted model against its source"
    if "converted" not in alone:
        return Row(quantity=quantity, why="the model is not converted from another")
    ours, theirs = alone["converted"]
    return Row(quantity=quantity, difference=difference(ours, theirs))
