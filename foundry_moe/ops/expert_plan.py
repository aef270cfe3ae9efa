"""What the operators of one call of experts share: tables of rows, settings, and operands as kernels read them.

Shapes: T tokens, K choices, R rows, E experts, D model width, F expert width, Y planes (gate and up: 2, else 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from foundry_moe_kernels import expert_products as hopper
from foundry_moe_kernels import permute as permute_kernels
from foundry_moe_kernels.activations import NAMES
from foundry_moe_kernels.sparse_tiles import BLOCK
from foundry_moe_kernels.topology import (
    Topology,
    pack_rows,
    pack_topology,
    packed_size,
    packed_topology_size,
    topology_from_offsets,
    unpack_topology,
)
from torch import Tensor

from foundry_moe.ops.backends import takes_hopper
from foundry_moe.ops.operators import is_traced, operator
from foundry_moe.ops.permute import PermutePlan


class ExpertPlan(NamedTuple):
    """The tensors and settings that the operators of one call share.

    source_R, row_TK, offsets_E: of `PermutePlan`.
    table: int32, read by all products: block rows for `hopper`, the topology for `portable`.
    kernels: hopper | portable.
    widths: F of each expert.
    activation: a name in `foundry_moe.ops.POINTWISE`, or a formula (see `foundry_moe_kernels.activations.GLUFormula`).
    layout: of gate and up in w1 and in z.
        separate      w1, and v1 if there is a gate; z [Y, R, F]
        planes        the upper and the lower half of w1; z [2, R, F], with h from the product's epilogue
        concatenated  the same w1; z [1, R, 2 F], for a bias, a formula or a transposed w1
        interleaved   every second row of w1, gate first; z [1, R, 2 F], columns interleaved too
    biased: whether a bias is added to z.
    """

    source_R: Tensor
    row_TK: Tensor
    offsets_E: Tensor
    table: Tensor
    kernels: str
    widths: Sequence[int]
    activation: str
    layout: str = "separate"
    biased: bool = False

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self[:4]

    @property
    def settings(self) -> tuple[Any, ...]:
        return self[4:]

    @property
    def rows(self) -> int:
        return self.source_R.shape[0]

    @property
    def pairs(self) -> str | None:
        """`layout` where z holds gate and up of a row side by side."""
        return self.layout if self.layout in ("concatenated", "interleaved") else None

    @property
    def topology(self) -> Topology:
        return unpack_topology(self.table, self.rows, self.widths, block_of(self.table.device))

    def topology_of(self, width: int) -> Topology:
        """The topology of the same rows, with matrices of another width."""
        return topology_of(self.offsets_E, self.rows, width)

    @property
    def ragged(self) -> hopper.RaggedRows:
        return hopper.ragged_rows(self.offsets_E, self.rows, self.table)


def topology_of(offsets_E: Tensor, rows: int, width: int) -> Topology:
    """Of experts of one width whose rows end at `offsets_E`."""
    return topology_from_offsets(offsets_E, rows, [width] * offsets_E.shape[0], block_of(offsets_E.device))


def block_of(device: torch.device) -> int:
    """Rows of a block of the topology on this device."""
    return BLOCK if device.type == "cuda" else 16


def check_kinds(x_TD: Tensor, *weights: Tensor | None) -> None:
    """Raises ValueError for a weight (w1, v1, w2 and a bias, in this order) of another dtype or device than x's."""
    for name, weight in zip(("w1", "v1", "w2", "the bias"), weights, strict=False):
        if weight is not None and (weight.dtype, weight.device) != (x_TD.dtype, x_TD.device):
            raise ValueError(
                f"{name} is {weight.dtype} on {weight.device}, x_TD {x_TD.dtype} on {x_TD.device}: they must agree"
            )


def plan_experts(
    x_TD: Tensor,
    plan: PermutePlan,
    weights: tuple[Tensor, Tensor | None, Tensor],
    *,
    widths: Sequence[int] | None,
    activation: str,
    memory: str,
    gate_up: str | None = None,
    bias_EF: Tensor | None = None,
) -> ExpertPlan:
    """What the operators of one call share, for operands that `foundry_moe.ops.mlp` has checked.

    Args:
        weights: as kernels read them.

    Raises:
        ValueError: `memory` is neither save nor recompute, or dtypes or devices differ.
    """
    w1, _, w2 = weights
    if memory not in ("save", "recompute"):
        raise ValueError(f"memory ({memory!r}) must be save or recompute")
    check_kinds(x_TD, *weights, bias_EF)
    layout = gate_up or "separate"
    if gate_up == "concatenated" and bias_EF is None and activation in NAMES and not lies_transposed(w1):
        layout = "planes"
    stacked = widths is None
    widths = (w2.shape[2],) * plan.num_experts if widths is None else tuple(widths)
    hopper_computes = stacked and takes_hopper(x_TD.device, x_TD.dtype, w2.shape[1], w2.shape[2])
    kernels = "hopper" if hopper_computes else "portable"
    make = table_of if is_traced(x_TD) else table_of.eager
    table = make(plan.offsets_E, plan.num_rows, kernels, widths)
    return ExpertPlan(
        plan.source_R, plan.row_TK, plan.offsets_E, table, kernels, widths, activation, layout, bias_EF is not None
    )


def aligned(tensor: Tensor) -> Tensor:
    """The tensor as kernels read it: contiguous, at an address that 16 bytes divide."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def aligned_stack(weight: Tensor) -> Tensor:
    """The same, of matrices that may lie transposed."""
    return aligned(weight.mT).mT if lies_transposed(weight) else aligned(weight)


def lies_transposed(weight: Tensor) -> bool:
    return not weight.is_contiguous() and weight.ndim == 3 and weight.mT.is_contiguous()


def planes_of(w1: Tensor, v1: Tensor | None, plan: ExpertPlan | None = None) -> tuple[Tensor, ...]:
    """The matrices that z's planes are made with."""
    if plan is not None and plan.layout == "planes":
        return aligned(w1).unflatten(1, (2, -1)).unbind(1)
    return (aligned_stack(w1),) if v1 is None else (aligned(w1), aligned(v1))


def gather(x_TD: Tensor, plan: ExpertPlan) -> Tensor:
    """x_RD: the token of each row. Rows past the end are undefined."""
    return permute_kernels.permute(x_TD, plan.row_TK, None, plan.rows)


def tokens_of(x_TD: Tensor, plan: ExpertPlan, *, backward: bool = False) -> hopper.Tokens | None:
    """The rows of x for Hopper products that gain by gathering tokens themselves; None for others."""
    gathers = plan.kernels == "hopper" and hopper.gathers(x_TD, plan.widths[0], backward=backward)
    return as_tokens(x_TD, plan) if gathers else None


def as_tokens(x_TD: Tensor, plan: ExpertPlan) -> hopper.Tokens:
    return hopper.Tokens(x_TD=x_TD, source_R=plan.source_R, choices=plan.row_TK.shape[1])


def _fake_table(offsets_E, rows, kernels, widths):  # type: ignore[no-untyped-def]
    if kernels == "hopper":
        return offsets_E.new_empty(packed_size(rows, offsets_E.shape[0]))
    return offsets_E.new_empty(packed_topology_size(rows, widths, block_of(offsets_E.device)))


@operator("expert_table", _fake_table)
def table_of(offsets_E: Tensor, rows: int, kernels: str, widths: Sequence[int]) -> Tensor:
    """`ExpertPlan.table`."""
    if kernels == "hopper":
        return pack_rows(offsets_E, rows)
    return pack_topology(offsets_E, rows, widths, block_of(offsets_E.device))
