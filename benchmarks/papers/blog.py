"""The blog's sentences (Chu et al. 2024, "Training MoEs at Scale with PyTorch", pytorch.org) beside what there is here.

    python -m benchmarks.papers.blog [--csv FILE] [--plot FILE]

Reads the figures of `benchmarks/figures/`, which other commands measured, and measures nothing. What is called a plan
is arithmetic: the planner's cost model (`foundry-moe plan`) for a model of DBRX's published shape
(`yamls/cluster/64x8gpu.yaml`) on H100s, with the best mesh, microbatch and recomputation that it finds for a batch of 4
sequences of 4096 tokens a GPU, and of one. It has been held against nine runs on one to four H200s, and against no
network: docs/planning.md. What it assumes is printed below the table.
"""

from __future__ import annotations

import csv
import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.papers.table import finish, parser_of
from foundry_moe.commands.known_constants import shipped_constants
from foundry_moe.commands.model_shape import read_shape
from foundry_moe.commands.plan import Machine, RunPlan, plan_run
from foundry_moe.commands.plan_search import search_meshes
from foundry_moe.commands.planned_memory import GIB
from foundry_moe.commands.restart_time import Rates, restart_time
from foundry_moe.launch.run_config import load_run, plain

ROOT = Path(__file__).parents[2]
FIGURES = ROOT / "benchmarks" / "figures"
WHOLE = ROOT / "yamls" / "cluster" / "64x8gpu.yaml"
STEP = ROOT / "yamls" / "bench" / "olmoe_1b_7b.yaml"
WIDE = [  # the model of `plan_time.csv` that is as wide as DBRX
    "model.d_model=6144",
    "model.n_heads=48",
    "model.n_layers=3",
    "model.attn_config.attn_type=grouped_query_attention",
    "model.attn_config.kv_n_heads=8",
    "model.moe.num_experts=16",
    "model.moe.expert_hidden_size=10752",
    "model.moe.top_k=4",
]
PEAK_FLOPS = 989e12  # of an H100 or H200 in bf16, dense, as its data sheet has it
GPUS_PER_NODE, GPU_BYTES, CHIP = 8, 80 * GIB, "h100"
PLANNED = (64, 512, 1024, 3072)
LARGE = 3072
SAVED_EVERY_S = 1800
PLAN = ("planned", "foundry-moe plan")
COLUMNS = ("the blog", "here", "measured or planned", "from")


def figures(name: str) -> list[dict[str, str]]:
    """The rows of a file of figures."""
    with (FIGURES / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def cell(name: str, row: str, column: str) -> str:
    """Of the row whose first column is `row`.

    Raises:
        KeyError: no such row or column.
    """
    for found in figures(name):
        if next(iter(found.values())) == row:
            return found[column]
    raise KeyError(f"figures/{name}.csv has no row {row!r}")


def number(text: str) -> float:
    """The first number in a cell."""
    found = re.search(r"\d+(\.\d+)?", text)
    assert found, text
    return float(found[0])


def measured_mfu() -> Iterator[tuple[str, int, float]]:
    """(model, GPUs, MFU) of every measured step: of the tables of steps, and those the planner was held against."""
    for row in figures("train_step"):
        if "blocksparse" not in row["backend"]:
            continue
        yield row.get("model") or "OLMoE-1B-7B", int(row["GPUs"]), number(row["MFU"]) / 100
    for row in figures("train_step_one_gpu"):
        layers = "1 layer" if row["layers"] == "1" else f"{row['layers']} layers"
        yield f"{row['model']}, {layers}", 1, number(row["MFU"]) / 100
    shape = read_shape(plain(load_run(str(STEP), WIDE)))
    for row in figures("plan_time"):
        if row["model"].startswith("DBRX"):
            gpus = [int(size) for size in re.findall(r"\d+", row["mesh"])]
            mfu = float(row["tokens/s a GPU"]) * shape.flops_per_token / PEAK_FLOPS
            yield row["model"], gpus[0] * gpus[1] * gpus[2], mfu


@dataclass(frozen=True, kw_only=True)
class Projection:
    """A plan. recomputed: whether activations are (`activation_checkpointing`), which MFU does not count as work."""

    plan: RunPlan
    recomputed: bool

    @property
    def tokens_per_s(self) -> float:
        """Of one GPU."""
        return self.plan.time.tokens_per_s

    @property
    def mfu(self) -> float:
        return self.plan.time.flops / self.plan.time.step_s / PEAK_FLOPS

    def __str__(self) -> str:
        plan, mesh = self.plan, self.plan.mesh
        return (
            f"{mesh.world_size:,} GPUs, {plan.microbatches} x {plan.microbatch} sequences each, activations "
            f"{'recomputed' if self.recomputed else 'kept'}, mesh ({mesh.replicate}, {mesh.shard}, {mesh.expert}): "
            f"{plan.memory_bytes / GIB:.0f} GiB, {self.tokens_per_s:,.0f} tokens/s a GPU, {self.mfu:.1%} MFU"
        )


def machine_of(gpus: int) -> Machine:
    """So many GPUs, in nodes."""
    return Machine(gpus=gpus, gpus_per_node=GPUS_PER_NODE, gpu_bytes=GPU_BYTES, constants=shipped_constants(CHIP))


def project(gpus: int, sequences: int) -> Projection:
    """The fastest that the planner finds for so many GPUs, and sequences of each in a step."""
    found = []
    for microbatch, recomputed in itertools.product((1, 2, 4), (True, False)):
        if microbatch <= sequences:
            keys = [f"global_train_batch_size={sequences * gpus}", f"device_train_microbatch_size={microbatch}"]
            keys += [f"fsdp_config.activation_checkpointing={str(recomputed).lower()}", "model.moe.mesh.spares=false"]
            meshes = search_meshes(plain(load_run(str(WHOLE), keys)), machine_of(gpus))
            found += [Projection(plan=f.plan, recomputed=recomputed) for f in meshes if f.plan and f.fits]
    return max(found, key=lambda projection: projection.tokens_per_s)


def restart_s(gpus: int) -> float:
    """Seconds from a node's loss to the next batch, by the plan of the shipped run."""
    keys = [f"global_train_batch_size={7 * gpus}", "model.moe.mesh.spares=true"]
    run: dict[str, Any] = plain(load_run(str(WHOLE), keys))
    machine = machine_of(gpus)
    return restart_time(run, plan_run(run, machine), machine, Rates()).total_s


def speed_rows(plans: dict[int, Projection], strong: Projection) -> Iterator[list[str]]:
    """MFU and scaling. plans: by GPUs, with the same batch a GPU; strong: of `LARGE` GPUs, one sequence each."""
    sentence = "MFU numbers over 40%"
    best: dict[tuple[str, int], float] = {}
    for model, gpus, value in measured_mfu():
        best[model, gpus] = max(value, best.get((model, gpus), 0.0))
    for (model, gpus), value in sorted(best.items()):
        here = f"{value:.1%}, {model}, {gpus} H200{'s' if gpus > 1 else ''}"
        yield [sentence, here, "measured", "train_step.csv, train_step_one_gpu.csv, plan_time.csv"]
    yield [sentence, f"{plans[LARGE].mfu:.1%}, DBRX's shape, {LARGE:,} H100s", *PLAN]
    tokens = f"{strong.plan.step_tokens / 1e6:.1f} M tokens a step"
    yield [sentence, f"{strong.mfu:.1%}, the same with one sequence a GPU ({tokens})", *PLAN]
    sentence = "near linear scaling across very large clusters"
    for row in figures("scaling"):
        if row["of one GPU"] and "before" not in row["mesh"]:
            here = f"{row['of one GPU']} of one GPU's tokens/s on each of {row['GPUs']}, mesh {row['mesh']}"
            yield [sentence, here, "measured", "scaling.csv"]
    first = plans[min(plans)]
    for gpus, projection in plans.items():
        if projection is not first:
            share = f"{projection.tokens_per_s / first.tokens_per_s:.1%}"
            yield [sentence, f"{share} of the tokens/s a GPU of {min(plans)} on {gpus:,}", *PLAN]


def checkpoint_rows() -> Iterator[list[str]]:
    """Saving, resuming, and resuming on another number of GPUs."""
    sentence = "upload checkpoints to cloud storage as frequently as every 30 minutes"
    for row in figures("checkpoint_gpu"):
        blocked_s = number(row["blocked"])
        during = row["tokens/s during a save, of those between"].strip("*")
        here = f"{blocked_s:.2f} s blocked a save, {blocked_s / SAVED_EVERY_S:.3%} of 30 minutes; {row['save takes']} "
        here += f"in the background, to a local disk, with {during} of the tokens/s"
        yield [sentence, here, "measured, 2 H200s", "checkpoint_gpu.csv"]
    here = cell("checkpoint", "until committed, in the background", "Ceph RGW")
    yield [sentence, f"976 MiB in S3 (Ceph RGW) after {here}", "measured, 4 CPU processes", "checkpoint.csv"]
    sentence = "resume from the latest checkpoint in the event of a node failure in less than 5 minutes"
    killed, silent = (cell("restart", "in all", loss) for loss in ("killed", "silent"))
    here = f"{killed} s after a kill, {silent} s after a host fell silent, "
    here += "three hosts of network namespaces on two cores, 982 MB"
    yield [sentence, here, "measured", "restart.csv"]
    for gpus in (512, LARGE):
        yield [sentence, f"{restart_s(gpus):.0f} s on {gpus:,} GPUs, a silent node", "planned", f"{PLAN[1]} --restart"]
    sentence = "first download checkpoints on one replica and then send the necessary shards to other replicas"
    here = f"a rank fetches {cell('checkpoint_scale', 'a rank fetches, of what it needs', 'value')} on (48, 8, 8)"
    yield [sentence, here, "the reader's plan for 3,072 ranks", "checkpoint_scale.csv"]
    fetched = cell("checkpoint", "bytes fetched, of the checkpoint", "Ceph RGW")
    here = f"all ranks together fetch {fetched} of the checkpoint's bytes, with two replicas"
    yield [sentence, here, "measured, 4 CPU processes", "checkpoint.csv"]
    sentence = "elastically resume on a different number of GPUs"
    for row in figures("kills"):
        if "1 to 8 processes" in row["what is killed"]:
            here = f"{row['kills']} kills and resumes of {row['what is killed']}"
            yield [sentence, here, "measured, CPU", "kills.csv"]


def assumptions(projections: Iterable[Projection]) -> list[str]:
    """What the planned rows rest on."""
    constants = shipped_constants(CHIP)
    return [
        f"planned with the constants of {constants.device}: {constants.source}",
        f"of these assumed: {', '.join(constants.assumed)}",
        f"between nodes {constants.network.bytes_per_s / 1e9:g} GB/s a GPU, {GPUS_PER_NODE} GPUs a node of "
        f"{GPU_BYTES / GIB:.0f} GiB; even loads but for 1.2 times the mean on the fullest rank",
        "not counted: stalls, late data, checkpoints, evaluation, restarts, congestion between nodes",
        "restarts: the rates of foundry-moe plan --restart, which it prints",
        *map(str, projections),
    ]


def plot(plans: dict[int, Projection], path: Path) -> None:
    """MFU over GPUs: measured steps and plans."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.5), layout="constrained")
    measured = sorted(set(measured_mfu()))
    for model in sorted({model for model, _, _ in measured}):
        of = [(gpus, value) for name, gpus, value in measured if name == model]
        axes.plot(*zip(*of, strict=True), marker="o", linestyle="", label=f"measured, {model}")
    planned = [projection.mfu for projection in plans.values()]
    axes.plot(list(plans), planned, marker="x", linestyle=":", label="planned, DBRX's shape")
    axes.axhline(0.4, color="grey", linewidth=1, label="the blog: over 40%")
    axes.set(xscale="log", xlabel="GPUs", ylabel="MFU", ylim=(0, None))
    axes.legend(fontsize="x-small")
    figure.savefig(path)


def main() -> None:
    """Runs from the command line; see the text at the top."""
    arguments = parser_of(__doc__).parse_args()
    plans = {gpus: project(gpus, 4) for gpus in PLANNED}
    strong = project(LARGE, 1)
    rows = [*speed_rows(plans, strong), *checkpoint_rows()]
    notes = assumptions([*plans.values(), strong])
    finish(COLUMNS, rows, lambda _, path: plot(plans, path), arguments, notes)


if __name__ == "__main__":
    main()
