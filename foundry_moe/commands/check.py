"""`foundry-moe check`: validates a run's YAML and describes the run. Imports no trainer."""

from __future__ import annotations

import argparse
import resource
from collections.abc import Mapping
from typing import Any

from foundry_moe.config import MeshConfig
from foundry_moe.launch.run_config import (
    check_whole_run,
    device_notes,
    load_run,
    mesh_of,
    missing_files,
    plain,
    read_moe,
)
from foundry_moe.launch.run_values import check_fit
from foundry_moe.launch.spares import ranks_in_use
from foundry_moe.parallel.mesh import check_expert_widths, plan_mesh
from foundry_moe.schema import UserError, caught, raise_mistakes, section, sentences_of

GLOO_GROUPS = 2  # those of a run with `elastic_checkpoint` on a GPU: of the threads that save, and of the main threads


def check_command(arguments: argparse.Namespace) -> int:
    """Returns 0 for a valid run.

    Raises:
        ValueError: the run is invalid; a sentence for each mistake.
    """
    run = plain(load_run(arguments.yaml, arguments.overrides))
    mistakes = caught(check_whole_run, run)
    mesh = ""
    if arguments.gpus is not None:
        try:
            mesh = f", mesh {_mesh_of(run, arguments.gpus, arguments.gpus_per_node)}"
        except UserError as error:
            mistakes += sentences_of(error)
        except Exception:
            if not mistakes:
                raise  # else it met a value of the wrong kind, which has been reported
    raise_mistakes(mistakes)
    if arguments.data:
        raise_mistakes(missing_files(run))
    print(f"ok: {describe(run)}{mesh}")
    for sentence in [*missing_files(run), *device_notes(run), *descriptor_notes(arguments.gpus or 1)]:
        print(f"note: {sentence}")
    return 0


def _mesh_of(run: Mapping[str, Any], gpus: int, gpus_per_node: int) -> Any:
    """The mesh of so many GPUs. Raises ValueError if the run's mesh, batch or experts do not fit them."""
    config = read_moe(run)
    num_experts = None if config is None else config.num_experts
    machine: dict[str, Any] = {"ranks_per_node": min(gpus_per_node, gpus), "num_experts": num_experts}
    keys = mesh_of(run) or MeshConfig()
    used = ranks_in_use(keys, world_size=gpus, batch_size=run.get("global_train_batch_size"), **machine)
    check_fit(run, used=used, config=config)
    plan = plan_mesh(keys, world_size=used, **machine)
    if config is not None and isinstance(config.expert_hidden_size, tuple):
        check_expert_widths(config.expert_hidden_size, plan.expert)
    return plan


def descriptor_notes(gpus: int) -> list[str]:
    """A sentence if this machine's limit of open files is too low for gloo's connections between so many ranks."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    needed = GLOO_GROUPS * (gpus + 3)  # measured; rank 0 needs them with TORCH_GLOO_LAZY_INIT=1 too
    if limit == resource.RLIM_INFINITY or needed <= limit:
        return []
    return [
        f"a process of {gpus} opens up to {needed} files; the limit here is {limit} (ulimit -Hn): raise it on the nodes"
    ]


def describe(run: Mapping[str, Any]) -> str:
    """The run in one line: model, experts, batch, length and precision."""
    model = section(run, "model")
    words = [str(model["name"])]
    if "n_layers" in model and "d_model" in model:
        words.append(f"{model['n_layers']} layers of width {model['d_model']}")
    elif "pretrained_model_name_or_path" in model:
        words.append(str(model["pretrained_model_name_or_path"]))
    config = read_moe(run)
    if config is None:
        words.append("no experts")
    else:
        words.append(f"{config.num_experts} experts, top {config.top_k}, gate {config.gate['name']}")
    words.append(f"batch {run['global_train_batch_size']} x {run['max_seq_len']} tokens")
    words.append(f"{run['max_duration']} in {run.get('precision', 'amp_bf16')}")
    return ", ".join(words)
