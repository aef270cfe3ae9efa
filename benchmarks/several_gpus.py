"""All that needs several GPUs of one host, in one go: certificates, dispatch, training steps, scaling, skewed loads.

    python benchmarks/several_gpus.py OUT [--gpus 4] [--minutes 25] [--only verify olmoe] [--list]

Each part is a command with a time limit; its output stays in OUT/PART.log. A part that has succeeded
is not run again, so a second call continues where the first one ended. OUT/report.md has a table of all steps, with
their floors and aims where four GPUs have some, and the end of every other part's output. Exit code 1 if a part failed.

GPUs are H200s as far as layers fit; a step is four sequences of 4096 tokens per GPU, as in RESULTS.md.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from foundry_moe.parallel.mesh import divisors

ROOT = Path(__file__).resolve().parents[1]
PEAK_TFLOPS = 989  # of an H200 in bf16, dense, from NVIDIA's data sheet
LAYERS = {"dbrx_wide": {1: 1, 2: 3, 4: 7}, "qwen3_30b_a3b": {1: 9, 2: 20, 4: 31}}  # that fit so many GPUs
# on four GPUs: what of a step, floor, aim
GOALS = {
    "olmoe-1-1-4": ("tokens/s per GPU", 42_000, 45_600),
    "olmoe-1-2-2": ("tokens/s per GPU", 42_000, 45_600),
    "dbrx": ("MFU", 0.52, 0.58),
    "qwen3": ("TFLOP/s", 330, 400),
}
SLOWEST = 1.15  # step after the fifth, over the median, at most
SHOWN_LINES = 40  # of a part's output in the report
FAILED, STOPPED = 1, 124


@dataclass(frozen=True, kw_only=True)
class Part:
    """A command, run from the project's folder. A line of JSON that it prints is a step's figures."""

    name: str
    command: tuple[str, ...]
    limit_s: float


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a part ended. exit_code: 124 where its limit of time did."""

    name: str
    command: tuple[str, ...]
    exit_code: int
    seconds: float

    @classmethod
    def read(cls, part: Part, out: Path) -> Outcome | None:
        """None where the part has not run with this command, or no readable record of it exists."""
        try:
            kept = json.loads((out / f"{part.name}.json").read_text())
            outcome = cls(**{**kept, "command": tuple(kept["command"])})
        except (OSError, ValueError, TypeError, KeyError):
            return None
        return outcome if outcome.command == part.command else None


def meshes_of(gpus: int) -> list[tuple[int, int, int]]:
    """(replicate, shard, expert) of so many GPUs whose experts are divided, most ranks an expert group first."""
    return [
        (gpus // (expert * shard), shard, expert)
        for expert in reversed(divisors(gpus)[1:])
        for shard in divisors(gpus // expert)
    ]


def launched(gpus: int, script: str) -> tuple[str, ...]:
    """A script on so many GPUs."""
    return (sys.executable, "-m", "composer.cli.launcher", "-n", str(gpus), script)


def step(name: str, yaml: str, mesh: tuple[int, int, int], steps: int, *keys: str) -> Part:
    """A run of `train_step.py`."""
    gpus = mesh[0] * mesh[1] * mesh[2]
    on_mesh = [f"model.moe.mesh.{key}={size}" for key, size in zip(("replicate", "shard", "expert"), mesh, strict=True)]
    batch = f"global_train_batch_size={4 * gpus}"
    run = (f"yamls/bench/{yaml}.yaml", batch, f"max_duration={steps}ba", *on_mesh, *keys)
    command = (*launched(gpus, "benchmarks/train_step.py"), *run)
    return Part(name=name, command=command, limit_s=120 + steps)


def parts_of(gpus: int) -> list[Part]:
    """What matters most first."""
    python, several = sys.executable, str(gpus)
    # a launch that takes longer prints where its ranks are
    verify = ["-m", "foundry_moe.cli", "verify", "--device", "cuda", "--precision", "fp32", "--timeout-s", "500"]
    meshes = [",".join(map(str, mesh)) for mesh in meshes_of(gpus)]
    compiled = "model.moe.mesh.compile=blocks"
    whole = (1, 1, gpus)
    parts = [
        Part(name="verify", command=(python, *verify, "--mesh", *meshes), limit_s=1100),
        Part(
            name="exchange",
            command=(python, "-m", "pytest", "-m", "gpu", "tests/distributed/test_parity_exchange.py"),
            limit_s=300,
        ),
        Part(name="dispatch", command=(python, "benchmarks/dispatch.py", "--gpus", several), limit_s=200),
    ]
    parts += [
        step("olmoe-" + "-".join(map(str, mesh)), "olmoe_1b_7b", mesh, 40)
        for mesh in dict.fromkeys((whole, (1, 2, gpus // 2), (1, gpus, 1)))
    ]
    parts += [
        step("olmoe-compiled", "olmoe_1b_7b", whole, 300, compiled),
        step("olmoe-300", "olmoe_1b_7b", whole, 300),
    ]
    for name, yaml in (("dbrx", "dbrx_wide"), ("qwen3", "qwen3_30b_a3b")):
        layers = f"model.n_layers={LAYERS[yaml][min(gpus, 4)]}"
        parts += [step(name, yaml, whole, 20, layers, compiled), step(f"{name}-eager", yaml, whole, 20, layers)]
    counts = [str(2**i) for i in range(gpus.bit_length())]
    scaling = (python, "benchmarks/scaling.py", "--gpus", *counts, "--trace")
    skew = (python, "benchmarks/skew.py", "--gpus", several)
    return [
        *parts,
        Part(name="scaling", command=scaling, limit_s=400 * len(counts)),
        Part(name="skew", command=skew, limit_s=200),
        Part(name="saves", command=launched(gpus, "benchmarks/checkpoint_gpu.py"), limit_s=400),
    ]


def run_part(part: Part, out: Path) -> Outcome:
    """Runs it to its end or its limit, and notes how it ended."""
    began = time.monotonic()
    with (out / f"{part.name}.log").open("wb") as log:
        process = subprocess.Popen(
            part.command,
            cwd=ROOT,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(part.limit_s)
        except BaseException as stopped:
            os.killpg(process.pid, signal.SIGKILL)  # its ranks too
            process.wait()
            if not isinstance(stopped, subprocess.TimeoutExpired):
                raise
            code = STOPPED
    outcome = Outcome(name=part.name, command=part.command, exit_code=code, seconds=time.monotonic() - began)
    (out / f"{part.name}.json").write_text(json.dumps(vars(outcome)))
    return outcome


def figures_of(log: str) -> dict[str, Any] | None:
    """The last line of figures in a part's output."""
    for line in reversed(log.splitlines()):
        if line.startswith("{"):
            try:
                found = json.loads(line)
            except ValueError:
                continue
            if "step_ms" in found:
                return {
                    "ms": found["step_ms"],
                    "tokens/s per GPU": found["tokens_per_s_per_gpu"],
                    "MFU": found["mfu"],
                    "TFLOP/s": found["mfu"] and round(found["mfu"] * PEAK_TFLOPS),
                    "GiB": found["allocated_gib"],
                    "slowest over median": found["slowest_over_median"],
                }
    return None


def verdict(name: str, gpus: int, found: dict[str, Any]) -> list[str]:
    """The goal of a step, with floor and aim, and which of them hold."""
    held = []
    if gpus == 4 and name in GOALS:
        quantity, floor, aim = GOALS[name]
        if (value := found[quantity]) is not None:
            reached = "aim" if value >= aim else "floor" if value >= floor else "missed"
            held.append(f"{quantity} {floor:g}, {aim:g}: {reached}")
    slowest = found["slowest over median"]
    if slowest is not None:
        held.append(f"slowest {SLOWEST}: {'held' if slowest <= SLOWEST else 'missed'}")
    return held


def report(parts: Sequence[Part], gpus: int, out: Path) -> Iterator[str]:
    """Lines of markdown about every part that has run."""
    steps, others = [], []
    for part in parts:
        outcome = Outcome.read(part, out)
        if outcome is None:
            continue
        log = (out / f"{part.name}.log").read_text(errors="replace")
        found = figures_of(log)
        if found is not None and outcome.exit_code == 0:
            steps.append((part, found))
        else:
            others.append((outcome, log))
    yield f"# {gpus} GPUs"
    if steps:
        columns = ["run", *steps[0][1], "goals: floor, aim"]
        yield from ("", "| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns))
        for part, found in steps:
            cells = [part.name, *map(str, found.values()), "; ".join(verdict(part.name, gpus, found))]
            yield "| " + " | ".join(cells) + " |"
    for outcome, log in others:
        yield from ("", f"## {outcome.name}: exit code {outcome.exit_code}, {outcome.seconds:.0f} s", "")
        yield f"`{' '.join(outcome.command)}`"
        yield from ("", "```", *log.splitlines()[-SHOWN_LINES:], "```")


def main() -> int:
    """Runs from the command line; see the text at the top."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="a folder for logs and the report")
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="after so many no part begins")
    parser.add_argument("--only", nargs="+", default=[], help="parts whose names begin so")
    parser.add_argument("--list", action="store_true", help="print the commands, and run none")
    arguments = parser.parse_args()
    if arguments.gpus < 2 or arguments.gpus & (arguments.gpus - 1):
        parser.error(f"--gpus ({arguments.gpus}) must be 2, 4, 8 or another power of two")
    parts = parts_of(arguments.gpus)
    chosen = [part for part in parts if not arguments.only or part.name.startswith(tuple(arguments.only))]
    if not chosen:
        parser.error(f"--only ({' '.join(arguments.only)}) names none of {', '.join(part.name for part in parts)}")
    if arguments.list:
        for part in chosen:
            print(f"{part.name} ({part.limit_s:.0f} s at most): {' '.join(part.command)}")
        return 0
    if torch.cuda.device_count() < arguments.gpus:
        parser.error(f"--gpus ({arguments.gpus}): this host has {torch.cuda.device_count()}; --list shows the commands")
    arguments.out.mkdir(parents=True, exist_ok=True)
    began, failed, left = time.monotonic(), [], []
    for part in chosen:
        earlier = Outcome.read(part, arguments.out)
        if earlier is not None and earlier.exit_code == 0:
            continue
        if time.monotonic() - began > 60 * arguments.minutes:
            left.append(part.name)
            continue
        outcome = run_part(part, arguments.out)
        print(f"{part.name}: exit code {outcome.exit_code}, {outcome.seconds:.0f} s", flush=True)
        if outcome.exit_code:
            failed.append(part.name)
        (arguments.out / "report.md").write_text("\n".join(report(parts, arguments.gpus, arguments.out)) + "\n")
    if left:
        print(f"not begun, for lack of time: {', '.join(left)}")
    print(f"see {arguments.out / 'report.md'}")
    return FAILED if failed else 0


if __name__ == "__main__":
    sys.exit(main())
