"""`foundry-moe verify run.yaml`: compares a shrunk copy of a run on its mesh with the same run on one process.

Launches the trials and builds one table from their results. Must not know how a trial trains.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from foundry_moe.commands.verify.rows import Row, compare_trials, formula_rows, resume_rows, step_zero_row
from foundry_moe.commands.verify.shrink import BATCHES, Shrunk, moe_keys, set_mesh, shrink
from foundry_moe.commands.verify.trial import PRELOAD, Trial, train_trials
from foundry_moe.config import MoEConfig
from foundry_moe.launch.processes import run_processes
from foundry_moe.launch.run_config import check_whole_run, load_run, plain
from foundry_moe.parallel.mesh import Mesh, can_replicate

SAVE_AFTER = BATCHES - 1
Train = Callable[[Sequence[Trial]], dict[str, dict[str, Any]]]


@dataclass(frozen=True, kw_only=True)
class RunCertificate:
    """The table of one run."""

    run: str
    mesh: str
    device: str
    notes: tuple[str, ...]
    rows: tuple[Row, ...]
    seconds: float

    @property
    def verdict(self) -> str:
        return "pass" if all(row.verdict != "differs" for row in self.rows) else "differs"

    def as_text(self) -> str:
        lines = [f"run     {self.run}", f"mesh    {self.mesh} against one process, on {self.device}"]
        lines += [f"shrunk  {note}" for note in self.notes]
        lines.append(f"{'quantity':58}{'difference':>12}{'tolerance':>11}  verdict")
        for row in self.rows:
            value = "" if row.difference is None else f"{row.difference:.1e}"
            limit = "" if row.difference is None else f"{row.tolerance:.0e}"
            why = f": {row.why}" if row.why else ""
            lines.append(f"{row.quantity:58}{value:>12}{limit:>11}  {row.verdict}{why}")
        wrong = [row.quantity for row in self.rows if row.verdict == "differs"]
        lines.append(f"verdict: {self.verdict}{': ' + '; '.join(wrong) if wrong else ''} ({self.seconds:.0f} s)")
        return "\n".join(lines)

    def as_json(self) -> str:
        rows = [{**asdict(row), "verdict": row.verdict} for row in self.rows]
        for row in rows:
            if row["difference"] is not None and not math.isfinite(row["difference"]):
                row["difference"] = str(row["difference"])  # JSON has no infinity
        return json.dumps({**asdict(self), "rows": rows, "verdict": self.verdict})


def certify_run(
    run: Mapping[str, Any],
    *,
    name: str = "run",
    mesh: Mesh | None = None,
    device: str = "cpu",
    timeout_s: float = 600.0,
    train: Train = train_trials,
) -> RunCertificate:
    """Trains a shrunk copy of the run on its mesh and on one process, and compares the two.

    Args:
        run: resolved and plain, as of `plain`.
        train: what the child processes run; tests plant faults with it.

    Raises:
        ValueError: the run is invalid, with the sentence of `check`, or the shrunk run fails.
    """
    started = time.monotonic()
    config = check_whole_run(run)
    if config is None:
        raise ValueError("the run has no experts to verify: neither algorithms.dmoe nor model.moe is there")
    with tempfile.TemporaryDirectory(prefix="verify-") as folder:
        run, source, family_notes = _with_small_model(run, config, Path(folder))
        shrunk = shrink(run, config, mesh=mesh, device=device)
        launch: dict[str, Any] = {
            "backend": "nccl" if device == "cuda" else "gloo",
            "timeout_s": timeout_s,
            # LLM Foundry initialises CUDA at import, and a process with CUDA must not fork
            "preload": () if device == "cuda" else PRELOAD,
        }
        other = _other_mesh(shrunk, config)
        saved = str(Path(folder) / "checkpoints")
        on_mesh = [_trial(shrunk, "mesh", shrunk.mesh, folder=saved)]
        if other is not None:
            on_mesh.append(_trial(shrunk, "resumed", other, folder=saved, resume=SAVE_AFTER))
        low = device == "cuda" and "16" in str(shrunk.run.get("precision", "amp_bf16"))
        alone = [_trial(shrunk, "alone", None, alone=True, with_formula=not low, source="" if low else source)]
        if low:
            alone.append(_exact(_trial(shrunk, "exact", None, alone=True, with_formula=True, source=source)))
        if shrunk.alone > 1:
            halved = shrunk.alone // 2
            more = _trial(shrunk, "more", None, alone=True, with_formula=True, steps=1, microbatch=halved)
            alone.append(_exact(more) if low else more)
        if other is None:
            alone.append(_trial(shrunk, "resumed", None, alone=True, folder=saved, resume=SAVE_AFTER))
        # gate base shuffles tokens over ranks, where they compete, so one process trains differently
        shuffles = config.gate["name"] == "base" and shrunk.processes > 1
        if shuffles and other is not None:
            on_mesh.append(_trial(shrunk, "beside", other))
        seen = _launch(train, on_mesh, shrunk.processes, launch)
        seen |= _launch(train, alone, 1, launch)
    expected = "beside" if "beside" in seen else "alone"
    compared = compare_trials(
        seen["mesh"], seen[expected], steps=SAVE_AFTER, clips=_clips(shrunk), exact=seen.get("exact")
    )
    notes = (*family_notes, *shrunk.notes)
    if low:
        notes = (*notes, "in 16 bits a tolerance of 3 is of a ratio: the mesh's distance from fp32 over one process's")
    if shuffles:
        why = "gate base shuffles tokens over ranks, where they compete"
        notes = (*notes, f"{why}: held against {f'mesh {other}' if other else 'nothing'} in place of one process")
        if other is None:
            compared = [Row(quantity=row.quantity, why=why) for row in compared]
    rows = [
        *compared,
        *formula_rows(seen),
        *resume_rows(seen["mesh"], seen["resumed"], SAVE_AFTER, _named(other), low=low),
        step_zero_row(seen.get("exact", seen["alone"]), _why_no_source(run, source)),
    ]
    where = f"{shrunk.mesh} (replicate, shard, expert)" if shrunk.mesh else "2 processes of data parallelism"
    return RunCertificate(
        run=name,
        mesh=where,
        device=device,
        notes=notes,
        rows=tuple(rows),
        seconds=time.monotonic() - started,
    )


def _with_small_model(
    run: Mapping[str, Any], config: MoEConfig, folder: Path
) -> tuple[Mapping[str, Any], str, tuple[str, ...]]:
    """The run with a small Hugging Face model in place of its own; where that lies, if its weights are loaded."""
    if (run.get("model") or {}).get("name") != "hf_causal_lm":
        return run, "", ()
    from foundry_moe.commands.verify.shrink_hugging_face import write_small_model

    return write_small_model(run, config, folder / "model")


def _launch(train: Train, trials: Sequence[Trial], processes: int, launch: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return run_processes(train, trials, world_size=processes, **launch)
    except RuntimeError as error:
        said = [line for line in str(error).splitlines() if line.strip()]
        names = " and ".join(trial.name for trial in trials)
        raise ValueError(f"the small run ({names}, {processes} processes) ended with: {said[-1].strip()}") from error


def _trial(shrunk: Shrunk, name: str, mesh: Mesh | None, *, alone: bool = False, **more: Any) -> Trial:
    """One training of the small run: on a mesh, by data parallelism as the run has it, or on one process."""
    run = copy.deepcopy(dict(shrunk.run))
    if alone:
        set_mesh(run, (1, 1, 1))
        _run_plainly(run)
    elif mesh is not None:
        set_mesh(run, mesh)
    return Trial(
        name=name,
        run=run,
        **{
            "batch": shrunk.batch,
            "microbatch": shrunk.alone if alone else shrunk.microbatch,
            "length": int(run["max_seq_len"]),
            "vocabulary": shrunk.vocabulary,
            "steps": BATCHES,
            "save_after": SAVE_AFTER,
            **more,
        },
    )


def _exact(trial: Trial) -> Trial:
    """The same training in fp32, which flash attention does not compute."""
    run = copy.deepcopy(dict(trial.run))
    run["precision"] = "fp32"
    if isinstance(run.get("fsdp_config"), dict):
        run["fsdp_config"].pop("mixed_precision", None)
    attention = run["model"].get("attn_config")
    if isinstance(attention, dict) and attention.get("attn_impl") == "flash":
        attention["attn_impl"] = "sdpa"
    if run["model"].get("use_flash_attention_2"):
        run["model"]["use_flash_attention_2"] = False
    return replace(trial, run=run)


def _run_plainly(run: dict[str, Any]) -> None:
    """What one process is compared as: nothing compiled."""
    for mesh in (moe_keys(run).get("mesh"), (run.get("algorithms") or {}).get("dmoe_mesh")):
        if mesh is not None:
            mesh["compile"] = "none"
    run.pop("compile_config", None)


def _other_mesh(shrunk: Shrunk, config: MoEConfig) -> Mesh | None:
    """Another mesh of as many processes, to resume on; None = one process."""
    if shrunk.mesh is None or isinstance(config.expert_hidden_size, tuple):
        return None
    replicate, shard, expert = shrunk.mesh
    ranks = math.prod(shrunk.mesh)
    for mesh in ((1, ranks, 1), (replicate, expert, shard), (1, 1, ranks), (ranks, 1, 1)):
        fits = config.num_experts % mesh[2] == 0 and (mesh[0] == 1 or can_replicate("cpu"))
        if mesh != shrunk.mesh and fits:
            return mesh
    return None


def _named(mesh: Mesh | None) -> str:
    return "one process" if mesh is None else str(mesh)


def _clips(shrunk: Shrunk) -> bool:
    return "gradient_clipping" in (shrunk.run.get("algorithms") or {})


def _why_no_source(run: Mapping[str, Any], source: str) -> str:
    if source:
        return ""
    return (
        "the model is not converted from another" if (run["model"]["name"] != "hf_causal_lm") else "nothing is loaded"
    )


def verify_run_command(arguments: argparse.Namespace) -> int:
    """`foundry-moe verify run.yaml`: 0 if nothing differs.

    Raises:
        ValueError: what is wrong with the run or the options, in one sentence.
    """
    meshes: Sequence[Mesh] = arguments.mesh or [None]
    if len(meshes) > 1:
        raise ValueError("--mesh: a run is verified on one mesh; give one R,S,E")
    run = plain(load_run(arguments.yaml, arguments.overrides))
    _check_devices(arguments, meshes[0])
    certificate = certify_run(
        run, name=arguments.yaml, mesh=meshes[0], device=arguments.device, timeout_s=arguments.timeout_s
    )
    print(certificate.as_json() if arguments.json else certificate.as_text())
    return 0 if certificate.verdict == "pass" else 1


def _check_devices(arguments: argparse.Namespace, mesh: Mesh | None) -> None:
    for option in ("precision", "tolerance", "gpus_per_node"):
        if getattr(arguments, option) is not None:
            raise ValueError(f"--{option.replace('_', '-')} is for verify without a run: a run brings its own")
    if arguments.device == "cuda" and mesh is not None:
        import torch

        if math.prod(mesh) > torch.cuda.device_count():
            raise ValueError(
                f"--mesh {','.join(map(str, mesh))} needs {math.prod(mesh)} GPUs and {torch.cuda.device_count()} are "
                "here: use --device cpu"
            )
