"""`foundry-moe certify`: compares two records of training steps."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict

from foundry_moe.certify import Report, compare, read_record
from foundry_moe.schema import UserError

SHOWN = 5  # units of the first difference


def certify_command(arguments: argparse.Namespace) -> int:
    """Returns 0 if the records are the same, 1 if they differ.

    Raises:
        ValueError: a folder without a record, a damaged record, or records that have nothing in common.
    """
    pairs = [word.partition("=") for word in arguments.names]
    if wrong := [f"{old}{sign}{new}" for old, sign, new in pairs if not old or not sign]:
        raise UserError(f"--names {wrong[0]} must be OLD=NEW, for example --names model.=")

    def rename(name: str) -> str:
        for old, _, new in pairs:
            name = name.replace(old, new)
        return name

    a, b = read_record(arguments.a), read_record(arguments.b)
    report = compare(a, b, tolerance=arguments.tolerance, rename=rename if pairs else None)
    print(_as_json(report) if arguments.json else _as_text(report))
    return 0 if report.same else 1


def _as_text(report: Report) -> str:
    lines = list(report.symptoms)
    if (first := report.first) is not None:
        shown = ", ".join(map(str, first.units[:SHOWN]))
        more = f" and {len(first.units) - SHOWN} more" if len(first.units) > SHOWN else ""
        lines.append(
            f"first difference: step {first.step}, {first.kind}: {len(first.units)} of {first.compared} tensors, up to "
            f"{first.largest:.1e} (tolerance {report.tolerance:.0e}): {shown}{more}"
        )
    lines += [f"note: {note}" for note in report.notes]
    steps = f"{len(report.steps)} steps compared" if report.steps else "weights and states at the start compared"
    verdict = "same" if report.same else "differs"
    return "\n".join([*lines, f"{verdict}: {steps}, largest difference within tolerance {report.largest:.1e}"])


def _as_json(report: Report) -> str:
    found = asdict(report)
    if report.first is not None:
        largest = report.first.largest
        found["first"] |= {"units": [str(unit) for unit in report.first.units]}
        found["first"] |= {"largest": largest if math.isfinite(largest) else str(largest)}
    return json.dumps({**found, "same": report.same})
