"""Runs of tests/distributed/tiny.yaml, through LLM Foundry and Composer, in processes of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from foundry_moe.launch.processes import run_processes
from tests.distributed import elastic_worker
from tests.helpers.commands import tool
from tests.helpers.launching import PRELOAD

YAML = str(Path(__file__).parents[1] / "distributed" / "tiny.yaml")
BATCHES = 6
MIXED = {"fsdp_config.mixed_precision": {"param_dtype": "bf16", "reduce_dtype": "fp32"}}
KEPT = {"fsdp_config.reshard_after_forward": False}


def mesh(replicate: int, shard: int, expert: int, **more: Any) -> dict[str, Any]:
    return {
        "algorithms.dmoe.mesh.replicate": replicate,
        "algorithms.dmoe.mesh.shard": shard,
        "algorithms.dmoe.mesh.expert": expert,
        **more,
    }


def largest_difference(run: dict[str, Any], expected: dict[str, Any]) -> float:
    assert run["weights"].keys() == expected["weights"].keys()
    gaps = [
        ((run["weights"][name] - weight).abs().max() / weight.abs().max()).item()
        for name, weight in expected["weights"].items()
    ]
    return max(gaps)


def run(folder: Path, mesh: tuple[int, int, int], *, keys: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """Overrides for one run. The balance loss is taken over a microbatch, so its size in the whole job stays 4."""
    replicate, shard, expert = mesh
    overrides: dict[str, Any] = {
        "callbacks.elastic_checkpoint": {"folder": str(folder), "interval": "2ba", "async": False, **(keys or {})},
        "device_train_microbatch_size": 4 // (replicate * shard * expert),
        "max_duration": f"{BATCHES}ba",
        "scheduler.t_warmup": "3ba",
        **more,
    }
    if replicate * shard * expert > 1:
        names = ("replicate", "shard", "expert")
        overrides |= {f"algorithms.dmoe.mesh.{name}": n for name, n in zip(names, mesh, strict=True)}
    return overrides


def launch(world: int, *runs: dict[str, Any], yaml: str = YAML) -> list[dict[str, Any]]:
    return run_processes(elastic_worker.run_all, yaml, list(runs), world_size=world, preload=PRELOAD)


def model_of(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """The model of a commit, as one process holds it."""
    out = folder.with_name(f"{folder.name}-exported-{step}")
    if not out.exists():
        assert tool("export", folder, out, "--step", step) == 0
    return {name: tensor for file in out.glob("*.safetensors") for name, tensor in load_file(file).items()}
