"""`foundry-moe certify`: compares two records of training steps, or a record and a checkpoint."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict
from pathlib import Path

import torch.distributed.checkpoint as dcp

from foundry_moe.certify import (
    Report,
    StoredTensors,
    compare,
    compare_checkpoint,
    read_record,
    stored_by_dcp,
    stored_in_safetensors,
)
from foundry_moe.checkpoint.dcp_reader import Reader
from foundry_moe.commands.chosen_checkpoint import open_folder
from foundry_moe.commands.parsers import TRUST
from foundry_moe.schema import UserError, shorten

SHOWN = 5  # units of the first difference


def certify_command(arguments: argparse.Namespace) -> int:
    """Returns 0 if the records are the same, 1 if they differ."""
    pairs = [word.partition("=") for word in arguments.names]
    if wrong := [f"{old}{sign}{new}" for old, sign, new in pairs if not old or not sign]:
        raise UserError(f"--names {wrong[0]} must be OLD=NEW, for example --names model.=")

    def rename(name: str) -> str:
        for old, _, new in pairs:
            name = name.replace(old, new)
        return name

    if (arguments.b is None) == (arguments.checkpoint is None):
        raise UserError("give two records, A and B, or one record and --checkpoint FOLDER")
    a, tolerance = read_record(arguments.a), arguments.tolerance
    if arguments.checkpoint is None:
        report = compare(a, read_record(arguments.b), tolerance=tolerance, rename=rename if pairs else None)
    else:
        stored, step = _stored(arguments)
        report = compare_checkpoint(a, stored.renamed(rename) if pairs else stored, step, tolerance=tolerance)
    print(_as_json(report) if arguments.json else _as_text(report))
    return 0 if report.same else 1


def _stored(arguments: argparse.Namespace) -> tuple[StoredTensors, int | None]:
    """The tensors of `--checkpoint`, and the step it was saved after; None = not known."""
    folder, step = arguments.checkpoint, arguments.step
    path = Path(folder)
    if path.is_dir() and (files := sorted(path.glob("*.safetensors"))):
        return stored_in_safetensors(files, folder), step
    if (path / ".metadata").is_file():
        if not arguments.trust_pickle:
            raise UserError(f"{folder}: the index of torch.distributed.checkpoint is a pickle: {TRUST}")
        return stored_by_dcp(dcp.FileSystemReader(path), folder), step
    store, ledger = open_folder(folder, arguments)
    steps = [key.step for key in ledger.newest_first()]
    if not steps or step not in (None, *steps):
        raise UserError(f"{store.url} has no checkpoint{'' if step is None else f' of step {step}'}; it has: {steps}")
    chosen = steps[0] if step is None else step
    return stored_by_dcp(Reader(store.url, options=store.options), folder, chosen), chosen


def _as_text(report: Report) -> str:
    lines = list(report.symptoms)
    if (first := report.first) is not None:
        lines.append(
            f"first difference: step {first.step}, {first.kind}: {len(first.units)} of {first.compared} tensors, up to "
            f"{first.largest:.1e} (tolerance {first.tolerance:.0e}): {shorten(first.units, SHOWN)}"
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
