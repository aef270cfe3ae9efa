"""The command `foundry-moe plan`, and its output as text or JSON. Keys of the JSON have their units in their names."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from foundry_moe.commands.plan.constants import CHIPS, read_constants, shipped_constants
from foundry_moe.commands.plan.planner import Machine, RunPlan, plan_run, search_meshes, why_not
from foundry_moe.commands.plan.shape import ModelShape
from foundry_moe.commands.plan.step import GIB, message_s
from foundry_moe.config import RESHARD
from foundry_moe.launch.run_config import check_whole_run, load_run, plain
from foundry_moe.ops.backends import describe_backend
from foundry_moe.parallel.mesh import DIMENSIONS, Mesh


def plan_command(arguments: argparse.Namespace) -> int:
    """`foundry-moe plan`: 0 if the run fits, 1 if not."""
    run = plain(load_run(arguments.yaml, arguments.overrides))
    check_whole_run(run)
    machine = Machine(
        gpus=arguments.gpus,
        gpus_per_node=arguments.gpus_per_node,
        gpu_bytes=(arguments.gpu_memory_gib or CHIPS[arguments.chip].memory_gib) * GIB,
        constants=read_constants(arguments.constants) if arguments.constants else shipped_constants(arguments.chip),
    )
    plan = plan_run(run, machine)
    backend = planned_backend(run, plan.shape, arguments.chip)
    found = {**plan_object(plan), "experts": backend}
    text = [format_plan(plan), backend]
    if arguments.search:
        found["search"] = search_rows(*search_meshes(run, machine, plan.shape))
        text.append(format_search(found["search"], found["mesh"], machine))
    print(json.dumps(found, indent=1) if arguments.json else "\n".join(text))
    return 0 if plan.fits else 1


def planned_backend(run: Mapping[str, Any], shape: ModelShape, chip: str) -> str:
    """One line about the backend of the experts on a chip of `CHIPS`, with the torch and Triton of this host."""
    precision = str(run.get("precision", "amp_bf16"))
    text = describe_backend(
        shape.moe.backend,
        torch.device("cuda"),
        torch.bfloat16 if "bf16" in precision else torch.float16 if "16" in precision else torch.float32,
        width=shape.d_model,
        hidden=shape.expert_widths if len(shape.expert_widths) > 1 else shape.expert_widths[0],
        capability=CHIPS[chip].capability,
    )
    return f"experts on {chip}, with this host's torch {torch.__version__}: {text}"


def plan_object(plan: RunPlan) -> dict[str, Any]:
    """Every number of a plan."""
    shape, constants = plan.shape, plan.machine.constants
    return {
        "mesh": {width: getattr(plan.mesh, width) for width in DIMENSIONS},
        "all_to_all": plan.mesh.all_to_all,
        "gpus": plan.mesh.world_size,
        "nodes": plan.mesh.nodes,
        "spare_gpus": plan.spares,
        "parameters": {
            "total": shape.num_params,
            "active": round(shape.num_active_params),
            "experts": shape.experts,
            "layers": shape.layers,
            "moe_layers": shape.moe_layers,
        },
        "step": {
            "microbatches": plan.step.microbatches,
            "microbatch_sequences": plan.microbatch,
            "sequences_per_gpu": plan.sequences,
            "sequence_tokens": shape.sequence,
            "tokens": plan.step_tokens,
        },
        RESHARD: plan.step.resharded,
        "memory_bytes": {name: round(size) for name, size in plan.memory.items()},
        "memory_total_bytes": round(plan.memory_bytes),
        "fits": plan.fits,
        "tight": plan.tight,
        "messages": [{**asdict(message), "all_s": message_s(message, constants)} for message in plan.messages],
        "time_s": plan.time,
        "step_s": plan.step_s,
        "tokens_per_s_per_gpu": plan.tokens_per_s,
        "flops_per_s_per_gpu": plan.tokens_per_s * shape.flops_per_token,
        "constants": {"device": constants.device, "source": constants.source, "assumed": list(constants.assumed)},
        "warnings": plan.warnings,
    }


def search_rows(plans: list[RunPlan], invalid: Mapping[Mesh, str]) -> list[dict[str, Any]]:
    """The result of `search_meshes`: `plan_object` of each mesh with the reason. Invalid ones have no numbers."""
    rows = [{**plan_object(plan), "why": why_not(plan, plans[0])} for plan in plans]
    return rows + [
        {"mesh": dict(zip(DIMENSIONS, mesh, strict=True)), "fits": False, "why": f"invalid: {why}"}
        for mesh, why in invalid.items()
    ]


COUNTS = {"B": 1e9, "M": 1e6, "": 1}
SIZES = {"GiB": GIB, "MiB": 2**20}
BYTES = {"GB": 1e9, "MB": 1e6, "kB": 1e3}
TIMES = {"s": 1, "ms": 1e-3, "us": 1e-6}


def _count(number: float, thing: str) -> str:
    return f"{number:,} {thing}{'' if number == 1 else 'es' if thing.endswith('ch') else 's'}"


def _scaled(number: float, units: Mapping[str, float]) -> str:
    """Four digits in the largest of the units that the number reaches, or else in the last; a plain count whole."""
    unit = next((unit for unit, size in units.items() if number >= size), list(units)[-1])
    return f"{number / units[unit]:,.4g} {unit}" if unit else f"{number:,.0f}"


def _sharded(ranks: int) -> str:
    return "whole" if ranks == 1 else f"sharded over {ranks} GPUs"


def format_plan(plan: RunPlan) -> str:
    """The plan as text."""
    mesh, shape, step, constants = plan.mesh, plan.shape, plan.step, plan.machine.constants
    total, active, experts = (
        _scaled(count, COUNTS) for count in (shape.num_params, shape.num_active_params, shape.experts)
    )
    at_most = "at most " if plan.sequences % plan.microbatch else ""
    lines = [
        f"mesh: replicate {mesh.replicate} x shard {mesh.shard} x expert {mesh.expert} = "
        f"{_count(mesh.world_size, 'GPU')} on {_count(mesh.nodes, 'node')}; all_to_all {mesh.all_to_all}"
        + (f"; {_count(plan.spares, 'GPU')} idle as spares" if plan.spares else ""),
        f"  experts: {shape.moe.num_experts // mesh.expert} of {shape.moe.num_experts} in each layer on a GPU, "
        f"{_sharded(mesh.shard)}; other parameters: {_sharded(mesh.dense_shard)}",
        f"parameters: {total}, {active} active; {experts} in experts ({shape.moe_layers} of {shape.layers} layers)",
        f"step: {_count(step.microbatches, 'microbatch')} of {at_most}{_count(plan.microbatch, 'sequence')} of "
        f"{shape.sequence:,} tokens on a GPU, {_scaled(plan.step_tokens, COUNTS)} tokens in all",
        f"memory of a GPU, {RESHARD} {str(step.resharded).lower()}:",
        *(f"  {name:28}{_scaled(size, SIZES):>12}" for name, size in plan.memory.items()),
        f"  {'in all':28}{_scaled(plan.memory_bytes, SIZES):>12}",
    ]
    if plan.messages:
        lines.append("messages of a GPU in a step:")
    for message in plan.messages:
        where = f"to {message.ranks} ranks, {'between nodes' if message.network_bytes else 'within a node'}"
        size, took = _scaled(message.bytes, BYTES), _scaled(message_s(message, constants), TIMES)
        lines.append(f"  {message.count:6} x {message.name:34}{size:>12} {where}, {took}")
    lines += [
        f"time of a step, by the constants of {constants.device} ({constants.source}):",
        *(f"  {name:28}{_scaled(seconds, TIMES):>12}" for name, seconds in plan.time.items()),
        f"  {'in all':28}{_scaled(plan.step_s, TIMES):>12}, {plan.tokens_per_s:,.0f} tokens/s per GPU",
    ]
    return "\n".join([*lines, *(f"warning: {warning}" for warning in plan.warnings)])


def format_search(rows: list[dict[str, Any]], run_mesh: Mapping[str, int], machine: Machine) -> str:
    """The rows of a search as a table; `run_mesh`, that of the YAML, is marked."""
    constants = machine.constants
    lines = [
        f"meshes of {_count(machine.gpus, 'GPU')} ({machine.gpus_per_node} per node), best first; * is the run's own:",
        "   replicate shard expert      GiB  tokens/s per GPU   step s",
        *(_line(row, "*" if row["mesh"] == run_mesh else " ") for row in rows),
        f"estimated with constants of {constants.device} ({constants.source}); assumed, not measured: "
        f"{', '.join(constants.assumed) or 'nothing'};",
        f"  the network at {constants.network.bytes_per_s / 1e9:g} GB/s per GPU, loads as with a balance loss; "
        "without stalls, late data, checkpoints and restarts",
    ]
    if not any(row["fits"] for row in rows):
        lines.append("none fits: lower device_train_microbatch_size or use activation checkpointing")
    return "\n".join(lines)


def _line(row: Mapping[str, Any], mark: str) -> str:
    start = mark + "{:11} {:5} {:6}".format(*row["mesh"].values())
    if "step_s" not in row:
        return f"{start}        -  {row['why']}"
    start += f" {row['memory_total_bytes'] / GIB:8.1f}"
    if not row["fits"]:
        return f"{start}  {row['why']}"
    return f"{start} {row['tokens_per_s_per_gpu']:17,.0f} {row['step_s']:8.3f}  {row['why']}".rstrip()
