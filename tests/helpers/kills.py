"""The command of a run that is killed, its log, and what the log must show."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path

from foundry_moe.parallel.mesh import Mesh

ROOT = Path(__file__).parents[2]


GLOBAL_BATCH = 8


# sums in another order on another mesh: 1e-6 a batch in fp32, and training amplifies it
TOLERANCE = 2e-3


@dataclass(kw_only=True)
class Outcome:
    """What a chaotic run came to."""

    lives: int = 0
    kills: int = 0
    causes: list[str] = field(default_factory=list)
    steps_lost: list[int] = field(default_factory=list)
    batches: int = 0
    largest_gap: float = 0.0
    commits: int = 0
    faults_met: dict[str, int] = field(default_factory=dict)
    resumes: list[str] = field(default_factory=list)


def command(data: str, folder: str, endpoint: str | None, log: Path, mesh: Mesh, batches: int) -> list[str]:
    """One life: a tiny model on the demo's data. The balance loss is taken over the microbatch of all ranks."""
    world = math.prod(mesh)
    degrees = zip(("replicate", "shard", "expert"), mesh, strict=True)
    on_mesh = [*(f"model.moe.mesh.{name}={size}" for name, size in degrees), "fsdp_config={}"]
    checkpoint = {"folder": folder, "interval": "2ba", "keep": 3, "timeout": "5s", "max_failures": 5}
    if endpoint:
        checkpoint["endpoint_url"] = endpoint
    return [
        *(sys.executable, "-m", "composer.cli.launcher", "-n", str(world)),
        *("--stdout", f"{log}.out{{rank}}", "--stderr", f"{log}.err{{rank}}"),
        *("foundry_moe/train.py", "yamls/demo/cpu.yaml"),
        *(f"variables.data={data}", f"variables.run={log.parent / log.stem}"),
        *("model.d_model=32", "model.n_layers=2", "model.moe.expert_hidden_size=32", "scheduler.t_warmup=4ba"),
        *(f"max_duration={batches}ba", "eval_interval=0", f"global_train_batch_size={GLOBAL_BATCH}"),
        f"device_train_microbatch_size={GLOBAL_BATCH // world}",
        *("save_folder=null", "autoresume=false"),
        "code_paths=[tests/chaos/loss_log.py]",
        f"callbacks.loss_log.path={log}",
        *(f"callbacks.elastic_checkpoint.{key}={value}" for key, value in checkpoint.items()),
        *(on_mesh if world > 1 else []),
    ]


def read_log(path: Path) -> list[dict]:
    if not path.exists():
        return []
    lines = path.read_text().splitlines()
    return [json.loads(line) for line in lines if line.endswith("}")]


def check(outcome: Outcome, lines: list[dict], calm: list[dict], batches: int) -> None:
    """Every batch, each time it was trained, had the undisturbed run's samples and loss."""
    expected = {line["batch"]: line for line in calm}
    assert sorted(expected) == list(range(1, batches + 1))
    assert {line["batch"] for line in lines} == set(expected)
    for line in lines:
        truth = expected[line["batch"]]
        assert line["samples"] == truth["samples"], f"batch {line['batch']} had other samples"
        gap = abs(line["loss"] - truth["loss"]) / truth["loss"]
        outcome.largest_gap = max(outcome.largest_gap, gap)
        assert gap < TOLERANCE, f"batch {line['batch']}: loss {line['loss']}, undisturbed {truth['loss']}"
    outcome.batches = len(lines)
