"""Compiles the kernels of a layer's experts for every load, when they first run: none is compiled in a later step.

Which kernel runs depends on rows an expert, and these on the router. So at the first call of a kind of experts (widths,
dtype, activation) their steps run on some fifty tokens once for each class of load, with the tiles of that class.
Triton keeps what it has compiled on disk; each process of a node begins with another class, so that they share the
work.
Tiles that the table lacks are tuned at the first call too (see `kernels/autotune.py`), and not later.

FOUNDRY_MOE_COMPILE_AHEAD=0 leaves this out: then a load is compiled for when it comes.

Shapes: T tokens, K choices, E experts, D model width, F expert width, P planes (gate and up: 2, else 1).
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from foundry_moe_kernels import load_class, permute_plan
from torch import Tensor

from foundry_moe.ops import expert_steps as steps

TOKENS = 48
_MANY = 262_144  # choices that are planned in three launches, for any number of experts


class _Kind(NamedTuple):
    """What kernels are compiled for, beside the load."""

    device: torch.device
    dtype: torch.dtype
    weights_dtype: torch.dtype | None
    experts: int
    choices: int
    width: int
    hidden: int
    planes: int
    hopper: bool
    activation: str


_done: set[Hashable] = set()


def compile_ahead(
    w2_EDF: Tensor, planes: int, weights_TK: Tensor | None, row_TK: Tensor, hopper: bool, activation: str
) -> None:
    """Does so once a process for experts like these, on a GPU; takes some seconds the first time on a machine.

    Args:
        w2_EDF, weights_TK, row_TK: of a call of the experts; read for their kinds alone.
    """
    kind = _Kind(
        w2_EDF.device,
        w2_EDF.dtype,
        None if weights_TK is None else weights_TK.dtype,
        w2_EDF.shape[0],
        row_TK.shape[1],
        w2_EDF.shape[1],
        w2_EDF.shape[2],
        planes,
        hopper,
        activation,
    )
    run_once(kind, kind.device, kind.experts, kind.choices, lambda: _prepare(kind))


def run_once(
    kind: Hashable, device: torch.device, experts: int, choices: int, prepare: Callable[[], Callable[[], None]]
) -> None:
    """Runs experts' steps with the tiles of every load, the first time that this kind of experts comes to a GPU.

    Args:
        kind: what kernels are compiled for, beside the load.
        prepare: makes operands, and gives a function that runs all steps on them.
    """
    if device.type != "cuda" or kind in _done:
        return
    if os.environ.get("FOUNDRY_MOE_COMPILE_AHEAD") == "0" or torch.cuda.is_current_stream_capturing():
        return
    _done.add(kind)
    run_all_loads(experts, prepare())
    for number, dtype in itertools.product((TOKENS, _MANY), (torch.int32, torch.int64)):  # a gate's choices are either
        permute_plan.plan_permute(choices_of(number, choices, experts, device).to(dtype), experts)


def run_all_loads(experts: int, run: Callable[[], None]) -> None:
    """Calls `run` with the tiles of every load of so many experts."""
    loads = load_class.all_loads()
    first = len(loads) * int(os.environ.get("LOCAL_RANK", "0")) // max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)
    first %= len(loads)
    for rows_per_expert in loads[first:] + loads[:first]:
        with load_class.pretend(rows_per_expert, experts):
            run()


def choices_of(number: int, choices: int, experts: int, device: torch.device) -> Tensor:
    """So many choices or a few more, [T, K] int32, spread over experts."""
    count = -(-number // choices) * choices
    return (torch.arange(count, device=device, dtype=torch.int32) % experts).view(-1, choices)


def _prepare(kind: _Kind) -> Callable[[], None]:
    """Forward and backward on a few tokens and experts: as many as leave tables aligned as those of all are."""
    experts = (kind.experts - 1) % 4 + 1
    options: dict[str, Any] = {"device": kind.device, "dtype": kind.dtype}
    experts_TK = choices_of(TOKENS * kind.choices, kind.choices, experts, kind.device)
    _, _, offsets_E, source_R, row_TK = permute_plan.plan_permute(experts_TK, experts)
    x_TD = torch.zeros(experts_TK.shape[0], kind.width, **options)
    w_PEFD = torch.zeros(kind.planes, experts, kind.hidden, kind.width, **options)
    w1_EFD, v1_EFD = w_PEFD[0], w_PEFD[1] if kind.planes == 2 else None
    w2_EDF = torch.zeros(experts, kind.width, kind.hidden, **options)
    weights_TK = (
        None
        if kind.weights_dtype is None
        else torch.ones(experts_TK.shape, device=kind.device, dtype=kind.weights_dtype)
    )
    packed = steps.pack(offsets_E, source_R.shape[0], kind.hidden, kind.hopper)
    plan = (row_TK, offsets_E, packed, kind.hopper)

    def run() -> None:
        z_PRF, h_RF = steps.up(x_TD, w1_EFD, v1_EFD, source_R, *plan, kind.activation)
        y_TD = steps.down(h_RF, w2_EDF, weights_TK, *plan)
        steps.down_backward_(y_TD, z_PRF, w2_EDF, weights_TK, source_R, *plan, kind.activation)
        steps.up_backward(z_PRF, x_TD, w1_EFD, v1_EFD, source_R, *plan, True)

    return run
