"""A plan and a search as text and, for `--json`, as an object whose keys have the units in their names."""

from __future__ import annotations

from typing import Any

from foundry_moe.commands.plan.memory import GIB
from foundry_moe.commands.plan.planner import Machine, RunPlan
from foundry_moe.commands.plan.search import Found
from foundry_moe.commands.plan.step import Message
from foundry_moe.commands.plan.step_time import message_s
from foundry_moe.parallel.mesh import Mesh

WIDTHS = ("replicate", "shard", "expert")


def plan_object(plan: RunPlan) -> dict[str, Any]:
    """Every number of a plan."""
    shape, time = plan.shape, plan.time
    return {
        "mesh": dict(zip(WIDTHS, (plan.mesh.replicate, plan.mesh.shard, plan.mesh.expert), strict=True)),
        "all_to_all": plan.mesh.all_to_all,
        "gpus": plan.mesh.world_size,
        "nodes": plan.mesh.nodes,
        "spare_gpus": plan.spares,
        "skew": plan.skew,
        "parameters": {
            "total": shape.total,
            "active": round(shape.active),
            "experts": shape.experts,
            "layers": shape.layers,
            "moe_layers": shape.moe_layers,
        },
        "step": {
            "microbatches": plan.microbatches,
            "microbatch_sequences": plan.microbatch,
            "sequences_per_gpu": plan.sequences,
            "sequence_tokens": shape.sequence,
            "tokens": plan.step_tokens,
        },
        "memory_bytes": {name: round(size) for name, size in plan.memory.items()},
        "memory_total_bytes": round(plan.memory_bytes),
        "fits": plan.fits,
        "messages": [_message(message, plan) for message in plan.messages],
        "time_s": dict(time.parts),
        "step_s": time.step_s,
        "network_s": time.network_s,
        "host_s": time.host_s,
        "tokens_per_s_per_gpu": time.tokens_per_s,
        "flops_per_s_per_gpu": time.flops / time.step_s,
        "constants": {
            "device": plan.constants.device,
            "source": plan.constants.source,
            "assumed": list(plan.constants.assumed),
        },
        "warnings": list(plan.warnings),
    }


def _message(message: Message, plan: RunPlan) -> dict[str, Any]:
    return {
        "name": message.name,
        "count": message.count,
        "ranks": message.ranks,
        "bytes": message.bytes,
        "network_bytes": message.network_bytes,
        "between_nodes": message.across,
        "all_s": message_s(message, plan.constants),
    }


def search_object(found: list[Found]) -> list[dict[str, Any]]:
    """Every mesh, in the order of the search; null where a mesh has no such number."""
    return [
        {
            "mesh": dict(zip(WIDTHS, entry.mesh, strict=True)),
            "fits": entry.fits,
            "tight": entry.tight,
            "memory_total_bytes": None if entry.plan is None else round(entry.plan.memory_bytes),
            "step_s": None if entry.plan is None else entry.plan.time.step_s,
            "tokens_per_s_per_gpu": None if entry.plan is None else entry.plan.time.tokens_per_s,
            "time_s": None if entry.plan is None else dict(entry.plan.time.parts),
            "days": entry.days,
            "gpu_hours": entry.gpu_hours,
            "why": entry.why,
        }
        for entry in found
    ]


def format_plan(plan: RunPlan) -> str:
    """The plan as text."""
    mesh, shape, time = plan.mesh, plan.shape, plan.time
    lines = [
        f"mesh: replicate {mesh.replicate} x shard {mesh.shard} x expert {mesh.expert} = {mesh.world_size} GPUs on "
        f"{mesh.nodes} node{'s' if mesh.nodes > 1 else ''}; all_to_all {mesh.all_to_all}"
        + (f"; {plan.spares} GPUs wait as spares" if plan.spares else ""),
        f"  experts: {shape.num_experts // mesh.expert} of {shape.num_experts} a GPU and layer, each cut in "
        f"{mesh.shard}; everything else cut in {mesh.dense_shard}",
        f"parameters: {shape.total / 1e9:.3f} B, {shape.active / 1e9:.3f} B active; {shape.experts / 1e9:.3f} B in "
        f"experts ({shape.moe_layers} of {shape.layers} layers)",
        f"step: {plan.microbatches} microbatch{'es' if plan.microbatches > 1 else ''} of "
        f"{'at most ' if plan.sequences % plan.microbatch else ''}{plan.microbatch} x {shape.sequence} tokens a GPU, "
        f"{plan.step_tokens / 1e6:.2f} M tokens in all",
        f"memory of {_whose(plan)}:",
        *(f"  {name:28}{size / GIB:8.2f} GiB" for name, size in plan.memory.items()),
        f"  {'in all':28}{plan.memory_bytes / GIB:8.2f} GiB",
        "messages of a GPU in a step:",
    ]
    for message in plan.messages:
        where = f"to {message.ranks} ranks, {'between nodes' if message.across else 'within a node'}"
        took = message_s(message, plan.constants)
        lines.append(
            f"  {message.count:6} x {message.name:34} {message.bytes / 1e6:10.3f} MB {where}, {1e3 * took:.1f} ms"
        )
    if not plan.messages:
        lines.append("  none")
    lines += [
        f"time of a step of {_whose(plan)}, by the constants of {plan.constants.device} ({plan.constants.source}):",
        *(f"  {name:28}{1e3 * seconds:8.1f} ms" for name, seconds in time.parts.items()),
        f"  {'in all':28}{1e3 * time.step_s:8.1f} ms, {time.tokens_per_s:,.0f} tokens/s a GPU",
    ]
    return "\n".join([*lines, *(f"warning: {warning}" for warning in plan.warnings)])


def _whose(plan: RunPlan) -> str:
    return "a GPU" if plan.skew == 1 else f"the fullest GPU, with {plan.skew:g} times the mean's rows"


def format_search(found: list[Found], run_mesh: Mesh, machine: Machine) -> str:
    """The table as text. run_mesh: that of the YAML, which is marked."""
    lines = [
        f"meshes of {machine.gpus} GPUs ({machine.gpus_per_node} a node), best first; * is the run's own:",
        "   replicate shard expert      GiB  tokens/s a GPU   step s      days  GPU hours",
    ]
    lines += [_line(entry, run_mesh) for entry in found]
    if not any(entry.fits for entry in found):
        lines.append("  none fits: a smaller device_train_microbatch_size or activation checkpointing would help")
    constants = machine.constants
    lines += [
        f"estimated with constants of {constants.device} ({constants.source}); assumed, not measured: "
        f"{', '.join(constants.assumed) or 'nothing'};",
        f"  the network at {constants.network.bytes_per_s / 1e9:g} GB/s a GPU, "
        + (f"skew {machine.skew:g}" if machine.skew > 1 else "loads as a balance loss makes them")
        + ", no stalls, data always there, checkpoints and restarts not counted"
        + ("; days and GPU hours need max_duration in ba, sp or tok" if all(f.days is None for f in found) else ""),
    ]
    return "\n".join(lines)


def _line(entry: Found, run_mesh: Mesh) -> str:
    mark = "*" if entry.mesh == run_mesh else " "
    widths = "{:11} {:5} {:6}".format(*entry.mesh)
    if entry.plan is None:
        return f"{mark}{widths}        -  cannot be: {entry.why}"
    size, time = entry.plan.memory_bytes / GIB, entry.plan.time
    if not entry.fits:
        return f"{mark}{widths} {size:8.1f}  {entry.why}"
    days = "?" if entry.days is None else f"{entry.days:.2f}"
    hours = "?" if entry.gpu_hours is None else f"{entry.gpu_hours:,.0f}"
    speed = f"{time.tokens_per_s:15,.0f} {time.step_s:8.3f}"
    return f"{mark}{widths} {size:8.1f} {speed} {days:>9} {hours:>10}  {entry.why}".rstrip()
