"""`foundry-moe verify`: compares small runs on their meshes with the same runs on one process.

The small runs are shrunk copies of a user's run, or of those of cases.yaml. Launches the trials and builds a
certificate of each run from their results. Must not know how a trial trains.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import math
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed, wait
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml

from foundry_moe.commands.plan.shape import HUGGING_FACE
from foundry_moe.commands.verify.rows import TOLERANCE, Row, compare_trials, formula_rows, resume_rows, step_zero_row
from foundry_moe.commands.verify.shrink import SAVE_AFTER, SmallRun, changes, moe_keys, shrink
from foundry_moe.commands.verify.trial import PRELOAD, Trial, train_trials, trial_of
from foundry_moe.launch.processes import run_processes
from foundry_moe.launch.run_config import check_whole_run, load_run, own_mistakes, plain, read_moe
from foundry_moe.parallel.mesh import Mesh, can_replicate
from foundry_moe.schema import UserError, raise_mistakes, section

DEFAULT_MESHES: tuple[Mesh, ...] = (
    *((1, 1, 1), (1, 1, 2), (1, 2, 1), (2, 1, 1), (1, 1, 4), (1, 2, 2), (2, 1, 2), (2, 2, 1), (2, 2, 2), (1, 1, 8)),
)
# Launches, if there are cores for them: on a GPU most of the time imports modules and compiles kernels.
_SIDE_BY_SIDE = 5
Train = Callable[[Sequence[Trial]], dict[str, dict[str, Any]]]


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """The table of one small run on one mesh."""

    run: str
    mesh: str
    device: str
    notes: tuple[str, ...]
    rows: tuple[Row, ...]

    @property
    def wrong(self) -> list[str]:
        return [row.quantity for row in self.rows if row.verdict == "differs"]

    @property
    def verdict(self) -> str:
        return "differs" if self.wrong else "pass"

    @property
    def worst(self) -> Row:
        """The row with the largest difference from one process, relative to its tolerance."""
        compared = [row for row in self.rows if row.difference is not None]
        return max(compared, key=lambda row: row.difference / (row.tolerance or 1e-300))  # type: ignore[operator]

    def as_text(self) -> str:
        lines = [f"run     {self.run}", f"mesh    {self.mesh} against one process, on {self.device}"]
        lines += [f"shrunk  {note}" for note in self.notes]
        lines.append(f"{'quantity':58}{'difference':>12}{'tolerance':>11}  verdict")
        for row in self.rows:
            value = "" if row.difference is None else f"{row.difference:.1e}"
            limit = "" if row.difference is None else f"{row.tolerance:.0e}"
            why = f": {row.why}" if row.why else ""
            lines.append(f"{row.quantity:58}{value:>12}{limit:>11}  {row.verdict}{why}")
        return "\n".join([*lines, f"verdict: {self.verdict}{': ' if self.wrong else ''}{'; '.join(self.wrong)}"])

    def as_line(self) -> str:
        return f"{self.mesh:12}{self.run:48}{self.worst.difference:10.1e}  {self.verdict}: {self.worst.quantity}"

    def as_json(self) -> str:
        rows = [{**asdict(row), "verdict": row.verdict} for row in self.rows]
        for row in rows:
            if row["difference"] is not None and not math.isfinite(row["difference"]):
                row["difference"] = str(row["difference"])  # JSON has no infinity
        return json.dumps({**asdict(self), "rows": rows, "verdict": self.verdict})


def small_cases() -> dict[str, dict[str, Any]]:
    """The runs that are verified without a YAML, by name."""
    return yaml.safe_load(Path(__file__).with_name("cases.yaml").read_text(encoding="utf-8"))["runs"]


def certify(
    runs: Mapping[str, Mapping[str, Any]],
    meshes: Sequence[Mesh | None] = (None,),
    *,
    device: str = "cpu",
    precision: str = "fp32",
    timeout_s: float = 600.0,
    train: Train = train_trials,
) -> list[Certificate]:
    """Trains shrunk copies of runs on meshes and on one process, and compares the two.

    Trials of equally many processes share a launch, or a few that run side by side where there are cores for them.

    Args:
        runs: resolved and plain, as of `plain`, by name.
        meshes: of every run; None = the run's, shrunk.
        precision: fp64 | fp32.
        train: the function of the child processes; tests inject faults with it.
    """
    with tempfile.TemporaryDirectory(prefix="verify-") as folder:
        options = {"device": device, "precision": precision}
        chosen = itertools.product(meshes, runs.items())
        small = [
            _small_run(name, run, mesh, Path(folder, f"model-{index}"), options)
            for index, (mesh, (name, run)) in enumerate(chosen)
        ]
        trials = [_trials_of(run, f"{folder}/{index}") for index, run in enumerate(small)]
        launch = partial(_launch, train, device=device, timeout_s=timeout_s)
        most = max(trial.processes for roles in trials for trial in roles.values())
        side_by_side = max(1, min(_SIDE_BY_SIDE, len(os.sched_getaffinity(0)) // (2 * most)))
        seen: dict[str, dict[str, Any]] = {}
        for parts in _launches(trials, most, side_by_side):
            for found in _run_together(launch, parts) if side_by_side > 1 else map(launch, parts):
                seen |= found
    return [
        _certificate(run, device, {role: seen[trial.name] for role, trial in roles.items()})
        for run, roles in zip(small, trials, strict=True)
    ]


def _small_run(
    name: str, run: Mapping[str, Any], mesh: Mesh | None, folder: Path, options: Mapping[str, Any]
) -> SmallRun:
    config = read_moe(run)
    if config is None:
        raise UserError("the run has no experts to verify: neither algorithms.dmoe nor model.moe is there")
    given, scale, source, notes = run, 1.0, "", ()  # type: tuple[Mapping[str, Any], float, str, tuple[str, ...]]
    if section(run, "model").get("name") == HUGGING_FACE:
        from foundry_moe.commands.verify.shrink_hugging_face import write_small_model

        given, scale, source, notes = write_small_model(run, config, folder)
    small = shrink(given, mesh=mesh, scale=scale, **options)
    raise_mistakes(own_mistakes(small.run, read_moe(small.run), None))
    return replace(small, name=name, source=source, notes=(*changes(run, small.run), *notes))


def _launches(trials: Sequence[Mapping[str, Trial]], most: int, side_by_side: int) -> list[list[list[Trial]]]:
    """The trials, each once: launches, of which those in one list may run at the same time.

    Those of a certificate are in order. One that resumes what other numbers of processes have saved is in a later list.

    Args:
        most: processes of a trial, whose launch is divided into `side_by_side`.
    """
    known: set[str] = set()
    lists: list[dict[tuple[int, int], list[Trial]]] = [{}, {}]
    for index, roles in enumerate(trials):
        for role, trial in roles.items():
            if trial.name in known:
                continue
            known.add(trial.name)
            later = role == "resumed" and trial.processes != roles["mesh"].processes
            part = index % side_by_side if trial.processes == most else 0
            lists[later].setdefault((-trial.processes, part), []).append(trial)
    return [[parts[key] for key in sorted(parts)] for parts in lists if parts]


def _run_together(launch: Callable[[list[Trial]], Any], parts: Sequence[list[Trial]]) -> list[Any]:
    """Each part's result. An error or an interruption ends all of them."""
    with ThreadPoolExecutor(len(parts)) as pool:
        running = [pool.submit(launch, part) for part in parts]
        try:
            return [done.result() for done in as_completed(running)]
        except BaseException:
            while wait(running, timeout=0.1).not_done:  # one that starts has no process yet
                for child in multiprocessing.active_children():
                    child.kill()
            raise


def _launch(train: Train, trials: Sequence[Trial], *, device: str, timeout_s: float) -> dict[str, dict[str, Any]]:
    processes = trials[0].processes
    os.environ.setdefault("FOUNDRY_MOE_COMPILE_AHEAD", "0")  # loads that four steps do not bring
    try:
        return run_processes(
            train,
            trials,
            world_size=processes,
            backend="nccl" if device == "cuda" else "gloo",
            timeout_s=timeout_s,
            # LLM Foundry initialises CUDA at import, and a process with CUDA must not fork
            preload=() if device == "cuda" else PRELOAD,
        )
    except RuntimeError as error:
        said = [line for line in str(error).splitlines() if line.strip()]
        raise UserError(
            f"the small run ({trials[0].name}, {processes} processes) ended with: {said[-1].strip()}"
        ) from error


def _trials_of(run: SmallRun, saved: str) -> dict[str, Trial]:
    """The trainings that a certificate compares, by their role.

    mesh: on the mesh. alone: on one process. more: one process with twice the microbatches. resumed: another mesh, or
    one process, from the checkpoint of `mesh`.
    """
    other = _other_mesh(run)
    resume = partial(_trial_alone, run) if other is None else partial(trial_of, run, other)
    trials = {
        "mesh": trial_of(run, run.mesh, f"mesh {run.mesh}", folder=saved),
        "alone": _trial_alone(run, "alone", with_formula=True),
        "resumed": resume(f"resumed {run.mesh}", folder=saved, resume=SAVE_AFTER),
    }
    if run.alone > 1:
        trials["more"] = _trial_alone(run, "more", with_formula=True, steps=1, microbatch=run.alone // 2)
    return trials


def _trial_alone(run: SmallRun, name: str, *, microbatch: int = 0, **more: Any) -> Trial:
    """One training on one process, with nothing compiled. Meshes with the same microbatches share it."""
    keys = copy.deepcopy(dict(run.run))
    for mesh in (moe_keys(keys).get("mesh"), section(keys, "algorithms").get("dmoe_mesh")):
        if mesh is not None:
            mesh["compile"] = "none"
    keys.pop("compile_config", None)
    microbatch = microbatch or run.alone
    name = f"{name}, {run.batch} sequences by {microbatch}"
    return trial_of(replace(run, run=keys), (1, 1, 1), name, processes=1, microbatch=microbatch, **more)


def _certificate(run: SmallRun, device: str, seen: Mapping[str, Mapping[str, Any]]) -> Certificate:
    tolerance = TOLERANCE[run.precision]
    clips = "gradient_clipping" in section(run.run, "algorithms")
    rows = compare_trials(seen["mesh"], seen["alone"], steps=SAVE_AFTER, clips=clips, tolerance=tolerance)
    if run.config.gate["name"] == "base" and run.processes > 1:
        why = "gate base shuffles tokens over ranks, where they compete"
        rows = [Row(quantity=row.quantity, why=why) for row in rows]
    where = str(_other_mesh(run) or "one process")
    rows += formula_rows(seen, tolerance)
    rows += resume_rows(seen["mesh"], seen["resumed"], SAVE_AFTER, where, tolerance)
    rows.append(step_zero_row(seen["alone"]))
    mesh = str(run.mesh) if run.mesh else "2 processes of data parallelism"
    return Certificate(run=run.name, mesh=mesh, device=device, notes=run.notes, rows=tuple(rows))


def _other_mesh(run: SmallRun) -> Mesh | None:
    """Another mesh of as many processes, to resume on; None = one process."""
    if run.mesh is None or isinstance(run.config.expert_hidden_size, tuple):
        return None
    replicate, shard, expert = run.mesh
    ranks = math.prod(run.mesh)
    for mesh in ((1, ranks, 1), (replicate, expert, shard), (1, 1, ranks), (ranks, 1, 1)):
        fits = run.config.num_experts % mesh[2] == 0 and (mesh[0] == 1 or can_replicate("cpu"))
        if mesh != run.mesh and fits:
            return mesh
    return None


def verify_command(arguments: argparse.Namespace) -> int:
    """`foundry-moe verify`: prints the certificates; 0 if nothing differs."""
    started = time.monotonic()
    os.environ["PYTHONWARNINGS"] = "ignore"  # modules that the fork server imports
    devices = torch.cuda.device_count() if arguments.device == "cuda" else math.inf
    for mesh in arguments.mesh or ():
        if math.prod(mesh) > devices:
            named = ",".join(map(str, mesh))
            raise UserError(f"--mesh {named} needs {math.prod(mesh)} GPUs and {devices} are here: use --device cpu")
    if arguments.yaml is None:
        runs, precision = small_cases(), "fp64" if arguments.device == "cpu" else "fp32"
        fitting = [mesh for mesh in DEFAULT_MESHES if math.prod(mesh) <= max(devices, 1)]
        meshes = arguments.mesh or [mesh for mesh in fitting if mesh[0] == 1 or can_replicate(arguments.device)]
    else:
        run = plain(load_run(arguments.yaml, arguments.overrides))
        check_whole_run(run)
        os.environ.pop("WORLD_SIZE", None)  # of a launcher: small runs have other numbers of processes
        runs, meshes, precision = {arguments.yaml: run}, arguments.mesh or [None], "fp32"
    precision = arguments.precision or precision
    certificates = certify(runs, meshes, device=arguments.device, precision=precision, timeout_s=arguments.timeout_s)
    for certificate in certificates:
        if arguments.json:
            print(certificate.as_json())
        elif arguments.yaml is not None or certificate.wrong:
            print(certificate.as_text())
    passed = all(not certificate.wrong for certificate in certificates)
    if not arguments.json:
        if arguments.yaml is None:
            print(*(certificate.as_line() for certificate in certificates), sep="\n")
        worst = max((certificate.worst for certificate in certificates), key=lambda row: row.difference or 0.0)
        print(
            f"{len(certificates)} certificates on {arguments.device}: largest difference {worst.difference:.1e} "
            f"({worst.quantity}, tolerance {worst.tolerance:.0e}): {'pass' if passed else 'FAIL'} "
            f"({time.monotonic() - started:.0f} s)"
        )
    return 0 if passed else 1
