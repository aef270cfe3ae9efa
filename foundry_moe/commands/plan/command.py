"""The command `foundry-moe plan`: reads the run once, and prints its plan, and what else was asked for."""

from __future__ import annotations

import argparse
import json
from typing import Any

from foundry_moe.commands.plan.backend import planned_backend
from foundry_moe.commands.plan.chips import MEMORY_GIB
from foundry_moe.commands.plan.known_constants import constants_of
from foundry_moe.commands.plan.memory import GIB
from foundry_moe.commands.plan.planner import Machine, format_plan, plan_run
from foundry_moe.commands.plan.report import plan_object, restart_object, search_object
from foundry_moe.commands.plan.restart_time import Rates, format_restart, restart_time
from foundry_moe.commands.plan.search import format_search, search_meshes
from foundry_moe.launch.run_config import check_run, load_run, plain


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
    if arguments.restart:
        rates = Rates(
            store=arguments.store_gb_s * 1e9,
            link=arguments.link_gb_s * 1e9,
            start_s=arguments.start_s,
            step_s=arguments.step_s,
        )
        restart = restart_time(run, plan, machine, rates)
        found["restart"] = restart_object(restart)
        text.append(format_restart(restart))
    print(json.dumps(found, indent=1) if arguments.json else "\n".join(text))
    return 0 if plan.fits else 1
