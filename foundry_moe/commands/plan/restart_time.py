"""How long a run stands still when a node is lost, from the loss to the first new batch: `foundry-moe plan --restart`.

Arithmetic on a plan and on rates that are given or assumed; the waits are those of our launcher. Measured on a small
scale by benchmarks/restart.py (benchmarks/RESULTS.md, "From the loss of a node to the next batch").
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from foundry_moe.commands.plan.planner import Machine, RunPlan, plan_run
from foundry_moe.launch.lost_nodes import BEAT_S, LAST_CALL_S, silent_s

PROMISE_S = 300.0
JOIN_S = 2.0  # launchers look at the rendezvous once a second
FIND_S = 2.0  # claiming the folder, listing commits, the manifest; 0.7 s of a small one, measured


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What a plan cannot know.

    store: bytes/s between one node and the store. link: bytes/s over gloo between one GPU's process and other nodes.
    start_s: of a process until it looks for the checkpoint: imports, process group, data, model, FSDP.
    step_s: of a batch; None: the plan's.
    """

    store: float = 2e9
    link: float = 1e9
    start_s: float = 45.0
    step_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class RestartTime:
    """seconds: by what they go to, in order; why: a sentence for each; plan: of the GPUs that go on.

    replaced: no mesh fits the nodes that are left, so that all wait for another.
    """

    seconds: dict[str, float]
    why: dict[str, str]
    plan: RunPlan
    replaced: bool
    repeated: str | None

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())


def restart_time(run: Mapping[str, Any], plan: RunPlan, machine: Machine, rates: Rates) -> RestartTime:
    """Of a run that loses one node.

    Args:
        plan: of the run on all of the machine's GPUs.
    """
    replaced = True
    if machine.gpus > machine.gpus_per_node:
        left = replace(machine, gpus=machine.gpus - machine.gpus_per_node)
        with contextlib.suppress(ValueError):  # then all wait for a node in place of the lost one
            plan, replaced = plan_run(run, left, plan.shape), False
    ranks = plan.mesh.world_size
    held = plan.memory["weights"] + plan.memory["optimizer"]  # bytes that a GPU needs of the checkpoint
    whole = plan.shape.total * 4 * held / plan.memory["weights"]
    fetched, nodes = whole / ranks, plan.mesh.nodes
    received = max(held - fetched, 0.0) if nodes > 1 else 0.0
    step_s = plan.time.step_s if rates.step_s is None else rates.step_s
    parts = {
        "detection": (silent_s() + BEAT_S, "a node that falls silent (NODE_SILENCE_S); 1 s if its processes die"),
        "rendezvous": (LAST_CALL_S + JOIN_S, "the last call; up to 15 s more if its processes die"),
        "new processes": (rates.start_s, "imports, process group, data, model, FSDP (--start-s)"),
        "finding the checkpoint": (FIND_S, "list and manifest"),
        "fetching it": (
            whole / nodes / rates.store,
            f"{whole / 1e9:,.1f} GB once, by {nodes} nodes at {rates.store / 1e9:g} GB/s each (--store-gb-s)",
        ),
        "between ranks": (
            received / rates.link,
            f"{received / 1e9:,.2f} GB to each GPU at {rates.link / 1e9:g} GB/s (--link-gb-s)",
        ),
        "first batch": (
            step_s,
            "as given (--step-s)" if rates.step_s is not None else "from the plan",
        ),
    }
    checkpoint = (run.get("callbacks") or {}).get("elastic_checkpoint")
    return RestartTime(
        seconds={part: seconds for part, (seconds, _) in parts.items()},
        why={part: why for part, (_, why) in parts.items()},
        plan=plan,
        replaced=replaced,
        repeated=None if checkpoint is None else str(checkpoint.get("interval", "30m")),
    )


def format_restart(restart: RestartTime) -> str:
    """The prediction as text, with what it assumes."""
    mesh = restart.plan.mesh
    where = f"{mesh.world_size} GPUs on {mesh.nodes} node{'s' if mesh.nodes > 1 else ''}"
    lines = [
        f"restart after a node is lost, on {where}"
        + (", once another has taken its place (not counted):" if restart.replaced else ":"),
        *(f"  {part:28}{seconds:8.1f} s    {restart.why[part]}" for part, seconds in restart.seconds.items()),
        f"  {'in all':28}{restart.total_s:8.1f} s",
    ]
    if restart.repeated is None:
        lines.append("warning: no callbacks.elastic_checkpoint: the run begins from the start")
    else:
        lines.append(f"  and up to {restart.repeated} of training, since the last checkpoint, again")
    if restart.total_s > PROMISE_S:
        part = max(restart.seconds, key=lambda name: restart.seconds[name])
        lines.append(f"warning: a restart takes more than {PROMISE_S / 60:.0f} minutes, most of them {part}")
    return "\n".join(lines)
