"""Compiles the kernels of a layer's experts for every load when they first run, so that no later step compiles.

Which kernel runs depends on the rows per expert, and so on the gate. So at the first call of a kind of experts (widths,
dtype, activation) their operators run on some fifty tokens once for each class of load, with the tiles of that class;
before that their kernels are compiled by threads, as `compile_first` has those of a gate and of a plan compiled. Triton
keeps what it has compiled on disk; each process of a node begins with another class, so that they share the work.

FOUNDRY_MOE_COMPILE_AHEAD=0 turns all of this off: then a kernel is compiled when it is first launched.

Shapes: T tokens, K choices.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Hashable

import torch
from foundry_moe_kernels import tuning
from foundry_moe_kernels.launch import compile_only, compiles_ahead, processes

from foundry_moe.ops.expert_plan import ExpertPlan, table_of
from foundry_moe.ops.permute import PermutePlan, plan_permute

TOKENS = 48
_MANY = 262_144  # choices that are planned in three launches, for any number of experts
_done: set[Hashable] = set()


def run_once(kind: Hashable, plan: ExpertPlan, run: Callable[[], None]) -> None:
    """Runs experts' operators with the tiles of every load, the first time that this kind of experts runs on a GPU.

    Takes some seconds the first time on a machine.

    Args:
        kind: what kernels are compiled for, beside the device and the load.
        run: runs all operators on operands like the layer's.
    """
    device, experts, choices = plan.table.device, len(plan.widths), plan.row_TK.shape[1]
    if device.type != "cuda" or (device, kind) in _done or tuning.is_pretended():
        return
    if not compiles_ahead():
        return
    _done.add((device, kind))

    def run_all() -> None:
        run_all_loads(experts, run)
        for number, dtype in itertools.product((TOKENS, _MANY), (torch.int32, torch.int64)):  # a gate's are either
            plan_of(-(-number // choices), choices, experts, device, dtype)

    with compile_only() as compiles:
        if compiles:
            run_all()
    run_all()


def run_all_loads(experts: int, run: Callable[[], None]) -> None:
    """Calls `run` with the tiles of every load of this many experts."""
    loads = tuning.all_loads()
    first = len(loads) * int(os.environ.get("LOCAL_RANK", "0")) // processes()
    first %= len(loads)
    for rows_per_expert in loads[first:] + loads[:first]:
        with tuning.pretend(rows_per_expert, experts):
            run()


def plan_of(
    tokens: int, choices: int, experts: int, device: torch.device, dtype: torch.dtype = torch.int32
) -> PermutePlan:
    """The plan of this many tokens, whose choices are spread over the experts."""
    experts_TK = torch.arange(tokens * choices, device=device, dtype=dtype).view(-1, choices) % experts
    return plan_permute(experts_TK, experts)


def few_rows(plan: ExpertPlan, tokens: int, experts: int) -> ExpertPlan:
    """The same settings for a few tokens and the first experts."""
    rows = plan_of(tokens, plan.row_TK.shape[1], experts, plan.table.device)
    widths = plan.widths[:experts]
    table = table_of(rows.offsets_E, rows.num_rows, plan.kernels, widths)
    return ExpertPlan(rows.source_R, rows.row_TK, rows.offsets_E, table, *plan.settings)._replace(widths=widths)
