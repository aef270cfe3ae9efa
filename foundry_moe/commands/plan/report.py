"""`foundry-moe plan --json`: a plan, a search and a restart as one object. Units are in the names of the keys."""

from __future__ import annotations

from typing import Any

from foundry_moe.commands.plan.messages import Message
from foundry_moe.commands.plan.planner import RunPlan
from foundry_moe.commands.plan.restart_time import RestartTime
from foundry_moe.commands.plan.search import Found
from foundry_moe.commands.plan.step_time import message_s
from foundry_moe.parallel.mesh import MeshPlan


def plan_object(plan: RunPlan) -> dict[str, Any]:
    """Every number of a plan."""
    shape, time = plan.shape, plan.time
    return {
        "mesh": _mesh(plan.mesh),
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


def _mesh(mesh: MeshPlan) -> dict[str, int]:
    return {"replicate": mesh.replicate, "shard": mesh.shard, "expert": mesh.expert}


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
            "mesh": dict(zip(("replicate", "shard", "expert"), entry.mesh, strict=True)),
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


def restart_object(restart: RestartTime) -> dict[str, Any]:
    """A restart's parts."""
    return {
        "mesh": _mesh(restart.plan.mesh),
        "gpus": restart.plan.mesh.world_size,
        "waits_for_another_node": restart.replaced,
        "parts_s": dict(restart.seconds),
        "total_s": restart.total_s,
        "repeated": restart.repeated,
    }
