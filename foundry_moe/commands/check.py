"""`foundry-moe check`: validates a run's YAML and describes the run. Imports no trainer."""

from __future__ import annotations

import argparse
import resource
from collections.abc import Mapping
from typing import Any

from foundry_moe.commands.plan import planner
from foundry_moe.commands.plan.constants import CHIPS
from foundry_moe.commands.plan.step import GIB
from foundry_moe.config import AUTO, MeshConfig, MoEConfig
from foundry_moe.launch.run_config import (
    Machine,
    check_whole_run,
    device_notes,
    load_run,
    mesh_of,
    plain,
    ranks_that_train,
)
from foundry_moe.launch.run_files import file_mistakes, missing_files
from foundry_moe.parallel.mesh import MeshPlan, plan_mesh
from foundry_moe.schema import raise_mistakes, section

GLOO_GROUPS = 2  # those of a run with `elastic_checkpoint` on a GPU: of the threads that save, and of the main threads


def check_command(arguments: argparse.Namespace) -> int:
    """Returns 0 for a valid run; for another one, raises a sentence for each mistake."""
    run = plain(load_run(arguments.yaml, arguments.overrides))
    machine = arguments.gpus and (arguments.gpus, min(arguments.gpus_per_node, arguments.gpus))
    config = check_whole_run(run, machine)
    raise_mistakes(file_mistakes(run))
    if machine and machine[0] > 1 and config is None and run.get(planner.MICROBATCH, AUTO) == AUTO:
        from foundry_moe.commands.plan.microbatch import choose_microbatch  # torch, which takes seconds

        choose_microbatch(run, _h100s(machine))  # raises, as the start does: it does not plan models without experts
    mesh = f", mesh {_planned(run, config, machine)}" if machine else ""
    if arguments.data:
        raise_mistakes(missing_files(run))
    print(f"ok: {describe(run, config)}{mesh}")
    for sentence in [*missing_files(run), *device_notes(run), *descriptor_notes(arguments.gpus or 1)]:
        print(f"note: {sentence}")
    return 0


def _planned(run: Mapping[str, Any], config: MoEConfig | None, machine: Machine) -> MeshPlan:
    """The mesh of the GPUs that train; with `mesh: auto` that of the planner, on H100s."""
    if config is not None and config.mesh == AUTO:
        return planner.plan_run(run, _h100s(machine)).mesh
    used, experts = ranks_that_train(run, config, machine), None if config is None else config.num_experts
    keys = mesh_of(run, config) or MeshConfig()
    return plan_mesh(keys, world_size=used, ranks_per_node=machine[1], num_experts=experts)


def _h100s(machine: Machine) -> planner.Machine:
    gpus, gpus_per_node = machine
    return planner.Machine(gpus=gpus, gpus_per_node=gpus_per_node, gpu_bytes=CHIPS["h100"].memory_gib * GIB)


def descriptor_notes(gpus: int) -> list[str]:
    """A sentence if this machine's limit of open files is too low for gloo's connections between so many ranks."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    needed = GLOO_GROUPS * (gpus + 3)  # measured; rank 0 needs them with TORCH_GLOO_LAZY_INIT=1 too
    if limit == resource.RLIM_INFINITY or needed <= limit:
        return []
    return [
        f"a process of {gpus} opens up to {needed} files; the limit here is {limit} (ulimit -Hn): raise it on the nodes"
    ]


def describe(run: Mapping[str, Any], config: MoEConfig | None) -> str:
    """The run in one line: model, experts, batch, length and precision."""
    model = section(run, "model")
    words = [str(model["name"])]
    if "n_layers" in model and "d_model" in model:
        words.append(f"{model['n_layers']} layers of width {model['d_model']}")
    elif "pretrained_model_name_or_path" in model:
        words.append(str(model["pretrained_model_name_or_path"]))
    if config is None:
        words.append("no experts")
    else:
        words.append(f"{config.num_experts} experts, top {config.top_k}, gate {config.gate['name']}")
    words.append(f"batch {run['global_train_batch_size']} x {run['max_seq_len']} tokens")
    words.append(f"{run['max_duration']} in {run.get('precision', 'amp_bf16')}")
    return ", ".join(words)
