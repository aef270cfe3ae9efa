"""The training command: `composer -n 8 foundry_moe/train.py run.yaml key=value ...`.

A thin door to LLM Foundry's trainer, which does the work. It adds three things: it checks the MoE keys before
anything slow is imported, reads `fsdp_config` as FSDP2, and ends a run that was complete already without an error.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from foundry_moe.config import META_NEEDS_MESH, MoEConfig, check_compilation, from_mapping
from foundry_moe.errors import run_cleanly
from foundry_moe.layers.gates.registry import check_gate
from foundry_moe.parallel.mesh import plan_mesh

# said by Composer and torch of their own code, every few batches
_NOISE = ("To copy construct from a tensor", "'pin_memory' argument is set as true but no accelerator is found")

USAGE = "usage: composer -n PROCESSES foundry_moe/train.py RUN.yaml [key=value ...]"


def load_run(path: str, overrides: list[str]) -> DictConfig:
    """The YAML with command-line overrides merged in.

    Raises:
        ValueError: no such file, or an override that is not `key=value`.
    """
    if not Path(path).is_file():
        raise ValueError(f"{path}: there is no such file; {USAGE}")
    for override in overrides:
        if "=" not in override:
            raise ValueError(f"{override}: an override is key=value, for example max_duration=100ba")
    config = OmegaConf.merge(OmegaConf.load(path), OmegaConf.from_cli(overrides))
    if not isinstance(config, DictConfig):
        raise ValueError(f"{path} must be a mapping of keys to values at its top level")
    return config


def check_run(run: Mapping[str, Any]) -> MoEConfig | None:
    """Checks the keys that are ours, in `algorithms.dmoe` or `model.moe`; None where the run has neither.

    Raises:
        ValueError: one sentence that names key, value and what would be valid.
    """
    algorithm = (run.get("algorithms") or {}).get("dmoe")
    has_algorithm = "dmoe" in (run.get("algorithms") or {})
    model = run.get("model") or {}
    if has_algorithm and model.get("name") == "dmoe_causal_lm":
        raise ValueError(
            "algorithms.dmoe and model.name: dmoe_causal_lm both put experts into the model: keep one of them"
        )
    if has_algorithm or "moe" in model:
        check_surroundings(run)
    if has_algorithm:
        config = from_mapping(MoEConfig, algorithm, "algorithms.dmoe")
    elif "moe" in model:
        config = from_mapping(MoEConfig, model["moe"], "model.moe")
    else:
        return None
    check_gate(config.gate, config.loss, num_experts=config.num_experts, top_k=config.top_k)
    if model.get("init_device") == "meta" and config.mesh_config is None:
        raise ValueError(f"model.{META_NEEDS_MESH}")
    if config.mesh_config is not None:
        check_compilation(run)
        world_size = os.environ.get("WORLD_SIZE")
        if world_size is not None:
            ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
            plan_mesh(
                config.mesh_config,
                world_size=int(world_size),
                ranks_per_node=ranks_per_node,
                num_experts=config.num_experts,
            )
    return config


def check_surroundings(run: Mapping[str, Any]) -> None:
    """Checks keys that are not ours but do not go with experts.

    Raises:
        ValueError: tensor parallelism, or FSDP1.
    """
    if run.get("tp_config"):
        raise ValueError("tp_config: tensor parallelism does not go with dMoE layers; remove it and use mesh.expert")
    version = os.environ.get("FSDP_VERSION", "2")
    if run.get("fsdp_config") and version != "2":
        raise ValueError(f"FSDP_VERSION ({version}): dMoE layers need FSDP2; unset it, or set FSDP_VERSION=2")


def train(arguments: list[str]) -> int:
    """Trains; see the module's text. Returns the exit code."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if arguments else 2
    run = load_run(arguments[0], arguments[1:])
    plain = OmegaConf.to_container(run, resolve=True)
    assert isinstance(plain, dict)
    check_run({str(key): value for key, value in plain.items()})
    os.environ.setdefault("FSDP_VERSION", "2")
    for message in _NOISE:
        warnings.filterwarnings("ignore", message=message)

    from llmfoundry.command_utils import train as train_with_foundry

    from foundry_moe.callbacks.run_report import TrainingComplete

    try:
        train_with_foundry(run)
    except TrainingComplete as done:
        print(done)
    return 0


def main() -> None:
    """Entry point of the script."""
    sys.exit(run_cleanly(lambda: train(sys.argv[1:])))


if __name__ == "__main__":
    main()
