"""The padded layout of token dropping: the slot of each choice, and tokens copied to their slots.

Each slot is written once, by the program that reads its token; unused slots are written as zeros.

Shapes: T tokens, K choices, A = T * K assignments, E experts, C slots of an expert, R = E * C rows, D model width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from foundry_moe_kernels.launch import divisor, multiple
from torch import Tensor


@triton.jit
def _slot_kernel(
    experts_ptr, sorted_row_ptr, ends_ptr, order_ptr, experts_out, row_ptr, source_ptr, room_ptr, tokens, choices,
    capacity, ORDERED: tl.constexpr, LIMITED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < tokens * choices
    expert = tl.load(experts_ptr + i, mask=inside, other=-1)
    first = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
    slot = tl.load(sorted_row_ptr + i, mask=inside, other=-1) - first
    room = tl.load(room_ptr) if LIMITED else capacity
    kept = (expert >= 0) & (slot < room)
    # `i` counts choices in the order in which they are given slots
    by_choice = tl.load(order_ptr + i, mask=inside, other=0).to(tl.int32) if ORDERED else i
    assignment = by_choice % tokens * choices + by_choice // tokens
    row = expert * capacity + slot
    tl.store(row_ptr + assignment, tl.where(kept, row, -1), mask=inside)
    tl.store(experts_out + assignment, tl.where(kept, expert, -1), mask=inside)
    tl.store(source_ptr + row, assignment, mask=kept)


@triton.jit
def _gather_kernel(
    x_ptr, out_ptr, source_ptr, rows, width, choices, x_stride, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    ALIGN: tl.constexpr,
):  # fmt: skip
    width, x_stride = multiple(width, ALIGN), multiple(x_stride, ALIGN)
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    d = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    source = tl.load(source_ptr + r, mask=r < rows, other=-1)
    token = (tl.maximum(source, 0) // choices).to(tl.int64)
    keep = (d < width)[None, :]
    x = tl.load(x_ptr + token[:, None] * x_stride + d[None, :], mask=keep & (source >= 0)[:, None], other=0.0)
    tl.store(out_ptr + r.to(tl.int64)[:, None] * width + d[None, :], x, mask=keep & (r < rows)[:, None])


def assign_slots(
    experts_A: Tensor,
    row_A: Tensor,
    offsets_E: Tensor,
    order_A: Tensor | None,
    shape: torch.Size,
    capacity: int,
    room: int | Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """int32: experts_TK and row_TK (e * C + slot), both -1 for dropped choices, and source_R (-1: unused).

    Args:
        experts_A, row_A, offsets_E: of `permute_plan.plan_permute`, for choices in the order in which they get slots.
        order_A: that order, as numbers k * T + t; None = all first choices before all second ones, by token.
        shape: [T, K].
        capacity: C, slots allocated for an expert.
        room: slots that are used, at most C; an int32 scalar where the host does not know it.
    """
    tokens, choices = shape
    limit = room if isinstance(room, Tensor) else None
    experts_TK = torch.empty(shape, dtype=torch.int32, device=experts_A.device)
    row_TK = torch.empty_like(experts_TK)
    rows = offsets_E.shape[0] * capacity
    source_R = torch.full((rows,), -1, dtype=torch.int32, device=experts_A.device)
    if experts_TK.numel():
        block = 256
        _slot_kernel[(triton.cdiv(experts_TK.numel(), block),)](
            experts_A, row_A, offsets_E, order_A, experts_TK, row_TK, source_R, limit, tokens, choices, capacity,
            ORDERED=order_A is not None, LIMITED=limit is not None, BLOCK=block,
        )  # fmt: skip
    return experts_TK, row_TK, source_R


def gather(x_TD: Tensor, source_R: Tensor, choices: int) -> Tensor:
    """x_RD: the token source // K of each row, zeros where source is -1. Rows of x are contiguous."""
    rows, width = source_R.shape[0], x_TD.shape[1]
    out = torch.empty(rows, width, dtype=x_TD.dtype, device=x_TD.device)
    if out.numel():
        columns = min(triton.next_power_of_2(width), 2048)
        block = 4 if columns <= 1024 else 2
        _gather_kernel[(triton.cdiv(rows, block), triton.cdiv(width, columns))](
            x_TD, out, source_R, rows, width, choices, x_TD.stride(0), ROWS=block, WIDTH=columns,
            ALIGN=divisor(width, x_TD.stride(0)),
            num_warps=max(1, min(8, columns * x_TD.element_size() // (32 * 16))),
        )  # fmt: skip
    return out
