"""Weak scaling of a training step on the GPUs of one host: tokens/s per GPU of each mesh over one GPU's.

    python benchmarks/scaling.py [--gpus 1 2 4] [--mesh 1,1,2 1,2,1] [--run olmoe_1b_7b] [--layers 7]
        [--microbatches 1] [--repeats 3] [--balanced] [--trace] [KEY=VALUE ...]

Each line is a launch of `train_step.py` with `yamls/bench/RUN.yaml`, `compile: blocks`, four sequences per GPU and
microbatch, weights gathered and gradients reduced once per batch; with several microbatches also steps of one
alone. A mesh is (replicate, shard, expert); without `--mesh` a number of GPUs has experts divided, ZeRO-3 and two
replicas. With repeats every mesh runs once before any runs again, and a line is the run with the median step.
`--trace` adds a launch that traces its last step: how long kernels run, how long nothing but NCCL does, and how long
nothing does. With `--balanced` (see `train_step.py`) choices are even where experts are divided, and one GPU runs with
and without it: other meshes send no tokens, and even choices break the graph of a block.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from several_gpus import launched as launcher
from timing import print_table

ROOT = Path(__file__).resolve().parents[1]
SEQUENCES = 4  # per GPU and microbatch
LAYERS = {"olmoe_1b_7b": 7, "qwen3_30b_a3b": 9}  # that fit one GPU of 141 GB
STEPS = 14
LIMIT_S = 300
Mesh = tuple[int, int, int]
Launch = tuple[Mesh, bool]  # a mesh, and whether its choices of experts are even
Row = dict[str, Any]


def meshes_of(gpus: int) -> list[Mesh]:
    """(replicate, shard, expert)."""
    if gpus == 1:
        return [(1, 1, 1)]
    return list(dict.fromkeys([(1, 1, gpus), (1, gpus, 1), (2, 1, gpus // 2)]))


def launches_of(meshes: Iterable[Mesh], balanced: bool) -> list[Launch]:
    """Each mesh; one GPU twice if choices are even on others."""
    found = [(mesh, balanced and mesh[2] > 1) for mesh in meshes]
    if ((1, 1, 1), False) in found and any(even for _, even in found):
        found.insert(1, ((1, 1, 1), True))
    return found


def command_of(launched: Launch, arguments: argparse.Namespace, trace: Path | None = None) -> list[str]:
    mesh, balanced = launched
    replicate, shard, expert = mesh
    gpus = replicate * shard * expert
    layers = arguments.layers or LAYERS[arguments.run]
    keys = [
        f"global_train_batch_size={SEQUENCES * gpus * arguments.microbatches}",
        f"device_train_microbatch_size={SEQUENCES}",
        f"max_duration={STEPS}ba",
        f"model.n_layers={layers}",
        f"model.moe.mesh={{replicate: {replicate}, shard: {shard}, expert: {expert}, compile: blocks}}",
        "fsdp_config.reshard_after_forward=false",
        *arguments.keys,
        *(["--balanced"] if balanced else []),
        *(["--trace", str(trace)] if trace else ["--first-microbatch"] if arguments.microbatches > 1 else []),
    ]
    return [*launcher(gpus, "benchmarks/train_step.py"), f"yamls/bench/{arguments.run}.yaml", *keys]


def launch(command: list[str]) -> Row:
    """The figures of one launch.

    Raises:
        SystemExit: it failed, with the end of its output.
    """
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        sys.exit(f"{' '.join(command)} ended with exit code {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")
    return json.loads(lines[-1])


def union_us(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of spans (begin, end)."""
    total = reached = 0.0
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def device_times(trace: Mapping[str, Any]) -> tuple[float, float]:
    """Milliseconds in which anything runs on the GPU, and in which NCCL alone does, of a trace in Chrome's format."""
    on_device = [event for event in trace["traceEvents"] if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    spans = [(event["ts"], event["ts"] + event["dur"]) for event in on_device]
    others = [span for span, event in zip(spans, on_device, strict=True) if "nccl" not in event["name"].lower()]
    busy = union_us(spans)
    return busy / 1e3, (busy - union_us(others)) / 1e3


def traced(launched: Launch, arguments: argparse.Namespace) -> list[str]:
    """Cells of busy, NCCL alone and idle milliseconds of the traced step, on rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        step_ms = launch(command_of(launched, arguments, file))["spread_ms"][-1]
        busy, nccl = device_times(json.loads(file.read_text()))
    return [f"{busy:.1f}", f"{nccl:.1f}", f"{step_ms - busy:.1f}"]


def middle_of(runs: list[Row]) -> Row:
    """The run with the median step."""
    return sorted(runs, key=lambda run: run["step_ms"])[len(runs) // 2]


def row_of(launched: Launch, run: Row, one_gpu: Row | None) -> list[str]:
    """Speed, speed over one GPU's, MFU and milliseconds of whole steps and of those of one microbatch, if there are."""
    mesh, balanced = launched
    cells = [f"({', '.join(map(str, mesh))}){', even' if balanced else ''}"]
    for key in ("whole", "first_microbatch"):
        step, alone = ({"whole": row, **row}.get(key) for row in (run, one_gpu or {}))
        if step is not None:
            speed, mfu = step["tokens_per_s_per_gpu"], step["mfu"]
            ratio = f"{speed / alone['tokens_per_s_per_gpu']:.3f}" if alone else ""
            cells += [f"{speed:,}", ratio, f"{mfu:.1%}" if mfu else "", str(step["step_ms"])]
    return [*cells, f"{run['slowest_over_median']:.2f}", str(run["reserved_gib"])]


def main() -> None:
    """Runs from the command line; see the text at the top."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--mesh", nargs="+", help="in place of the meshes of --gpus")
    parser.add_argument("--run", choices=LAYERS, default="olmoe_1b_7b")
    parser.add_argument("--layers", type=int, help="in place of as many as fit one GPU of 141 GB")
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--balanced", action="store_true")
    parser.add_argument("--trace", action="store_true")
    arguments, keys = parser.parse_known_args()
    arguments.keys = keys
    meshes: list[Mesh] = [mesh for gpus in arguments.gpus for mesh in meshes_of(gpus)]
    if arguments.mesh:
        meshes = [tuple(int(size) for size in mesh.split(",")) for mesh in arguments.mesh]  # type: ignore[misc]
    launches = launches_of(meshes, arguments.balanced)
    runs: dict[Launch, list[Row]] = {launched: [] for launched in launches}
    for _ in range(arguments.repeats):
        for launched in launches:
            runs[launched].append(launch(command_of(launched, arguments)))
            print(
                json.dumps({"mesh": launched[0], "even": launched[1], **runs[launched][-1]}),
                file=sys.stderr,
                flush=True,
            )
    speed = ["tokens/s per GPU", "over one GPU", "MFU", "step, ms"]
    one = [f"one microbatch: {speed[0]}", *speed[1:]] if arguments.microbatches > 1 else []
    columns = ["mesh", *speed, *one, "slowest step", "reserved, GiB"]
    middle = {launched: middle_of(found) for launched, found in runs.items()}
    rows = [row_of(each, middle[each], middle.get(((1, 1, 1), each[1]))) for each in launches]
    if arguments.trace:
        columns += ["busy, ms", "NCCL alone, ms", "idle, ms"]
        rows = [row + traced(each, arguments) for row, each in zip(rows, launches, strict=True)]
    print(f"{runs[launches[0]][0]['device']}, {arguments.run}, {arguments.microbatches} microbatches per step")
    print_table(columns, rows)


if __name__ == "__main__":
    main()
