"""The command `foundry-moe plan`: reads the run once and prints its plan, and every mesh with `--search`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

import torch

from foundry_moe.commands.plan.constants import CHIPS, MEMORY_GIB, constants_of
from foundry_moe.commands.plan.memory import GIB
from foundry_moe.commands.plan.planner import Machine, plan_run
from foundry_moe.commands.plan.report import format_plan, format_search, plan_object, search_object
from foundry_moe.commands.plan.search import search_meshes
from foundry_moe.commands.plan.shape import ModelShape, planned_moe
from foundry_moe.launch.run_config import check_run, load_run, plain
from foundry_moe.ops.backends import describe_backend


def machine_of(arguments: argparse.Namespace) -> Machine:
    """The machine that the command's arguments describe."""
    return Machine(
        gpus=arguments.gpus,
        gpus_per_node=arguments.gpus_per_node,
        gpu_bytes=(arguments.gpu_memory_gib or MEMORY_GIB[arguments.chip]) * GIB,
        constants=constants_of(arguments.chip, arguments.constants),
        skew=arguments.skew,
    )


def plan_command(arguments: argparse.Namespace) -> int:
    """`foundry-moe plan`: 0 if the run fits, 1 if not."""
    run = plain(load_run(arguments.yaml, arguments.overrides))
    check_run(run)
    machine = machine_of(arguments)
    plan = plan_run(run, machine)
    backend = planned_backend(run, plan.shape, arguments.chip)
    found: dict[str, Any] = {**plan_object(plan), "experts": backend}
    text = [format_plan(plan), backend]
    if arguments.search:
        meshes = search_meshes(run, machine, plan.shape)
        found["search"] = search_object(meshes)
        own = (plan.mesh.replicate, plan.mesh.shard, plan.mesh.expert)
        text.append(format_search(meshes, own, machine))
    print(json.dumps(found, indent=1) if arguments.json else "\n".join(text))
    return 0 if plan.fits else 1


def planned_backend(run: Mapping[str, Any], shape: ModelShape, chip: str) -> str:
    """The plan's line on the backend of the experts, with the torch and Triton of this host.

    Args:
        chip: a name in `CHIPS`.

    Raises:
        ValueError: the run asks for a backend that the chip does not have.
    """
    moe, _ = planned_moe(run)
    precision = str(run.get("precision", "amp_bf16"))
    dtype = torch.bfloat16 if "bf16" in precision else torch.float16 if "16" in precision else torch.float32
    text = describe_backend(
        moe.backend,
        torch.device("cuda"),
        dtype,
        width=shape.d_model,
        hidden=moe.expert_hidden_size if isinstance(moe.expert_hidden_size, tuple) else shape.widest_expert,
        capacity=moe.capacity,
        capability=CHIPS[chip],
    )
    return f"experts on {chip}, with this host's torch {torch.__version__}: {text}"
