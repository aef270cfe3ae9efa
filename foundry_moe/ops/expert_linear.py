"""One linear layer per expert on rows that are sorted by expert, with gradients.

For experts whose activation the fused MLP does not know, and in plain torch the reference for all backends. Weights are
read in either layout without a copy.

Shapes: R rows, E experts, K inputs, N outputs.
"""

from __future__ import annotations

from typing import Any

import torch
from foundry_moe_kernels import expert_products, products
from torch import Tensor

from foundry_moe.ops.backends import blocksparse_available, takes_hopper, tf32_allowed
from foundry_moe.ops.expert_plan import aligned, topology_of
from foundry_moe.ops.operators import differentiable, operator


def expert_linear(
    x_RK: Tensor, weight: Tensor, offsets_E: Tensor, *, inputs_first: bool = False, plain: bool = False
) -> Tensor:
    """y_RN: each row times its expert's matrix. Rows past `offsets_E[-1]` are zeros, in gradients too.

    Args:
        weight: [E, N, K], or [E, K, N] with `inputs_first`.
        offsets_E: int32, the row after the last one of each expert.
        plain: multiply one expert after another in plain torch, which reads the offsets on the host. So do operands
            that kernels do not take.
    """
    plain = plain or x_RK.shape[0] == 0 or not blocksparse_available(x_RK.device, x_RK.dtype)
    return _expert_linear(x_RK, weight, offsets_E, not inputs_first, plain)


def _spans(offsets_E: Tensor) -> list[tuple[int, slice]]:
    ends = offsets_E.tolist()
    return [(e, slice(begin, end)) for e, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)) if end > begin]


def _fake(x_RK, weight, offsets_E, transposed, plain):  # type: ignore[no-untyped-def]
    return x_RK.new_empty(x_RK.shape[0], weight.shape[1 if transposed else 2])


@operator("expert_linear", _fake)
def _rows_product(a_RK: Tensor, weight: Tensor, offsets_E: Tensor, transposed: bool, plain: bool) -> Tensor:
    rows, width = a_RK.shape
    outputs = weight.shape[1 if transposed else 2]
    if plain:
        c_RN = a_RK.new_zeros(rows, outputs)
        for e, span in _spans(offsets_E):
            torch.mm(a_RK[span], weight[e].T if transposed else weight[e], out=c_RN[span])
        return c_RN
    a_RK, weight = aligned(a_RK), aligned(weight)
    if not takes_hopper(a_RK.device, a_RK.dtype, outputs, width):
        return products.dsd(a_RK, weight, topology_of(offsets_E, rows, width), trans_b=transposed, tf32=tf32_allowed())
    c_RN = expert_products.rows_product(
        a_RK[None], (weight,), expert_products.ragged_rows(offsets_E, rows), transposed=transposed
    )
    # the kernel leaves these rows undefined; a NaN there would reach biases and norms, which sum over all rows
    return c_RN.masked_fill_((torch.arange(rows, device=c_RN.device) >= offsets_E[-1])[:, None], 0)


def _weight_gradient(a_RM: Tensor, b_RN: Tensor, offsets_E: Tensor, plain: bool) -> Tensor:
    """[E, M, N]: the sum of a row's outer products over each expert's rows."""
    rows, width = a_RM.shape
    if plain:
        out = a_RM.new_zeros(offsets_E.shape[0], width, b_RN.shape[1])
        for e, span in _spans(offsets_E):
            torch.mm(a_RM[span].T, b_RN[span], out=out[e])
        return out
    a_RM, b_RN = aligned(a_RM), aligned(b_RN)
    if not takes_hopper(a_RM.device, a_RM.dtype, width, b_RN.shape[1]):
        topology = topology_of(offsets_E, rows, width)
        return products.dsd(a_RM, b_RN, topology, trans_s=True, stacked=True, tf32=tf32_allowed())
    return expert_products.weight_gradient(a_RM, b_RN, expert_products.ragged_rows(offsets_E, rows))[0]


@operator(
    "expert_linear_backward",
    lambda dy_RN, x_RK, weight, *_: (x_RK.new_empty(x_RK.shape), weight.new_empty(weight.shape)),
)
def _linear_backward(
    dy_RN: Tensor, x_RK: Tensor, weight: Tensor, offsets_E: Tensor, transposed: bool, plain: bool,
    needs_dx: bool, needs_dw: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dx_RK, dweight. One that is not needed is undefined."""
    dy_RN = dy_RN.contiguous()
    dx_RK = _rows_product(dy_RN, weight, offsets_E, not transposed, plain) if needs_dx else x_RK.new_empty(x_RK.shape)
    if not needs_dw:
        return dx_RK, weight.new_empty(weight.shape)
    return dx_RK, _weight_gradient(*((dy_RN, x_RK) if transposed else (x_RK, dy_RN)), offsets_E, plain)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.settings = inputs[3:]
    ctx.save_for_backward(*inputs[:3])


def _gradient(ctx: Any, dy_RN: Tensor) -> tuple[Tensor | None, ...]:
    needs_dx, needs_dw = ctx.needs_input_grad[:2]
    dx_RK, dweight = _linear_backward(dy_RN, *ctx.saved_tensors, *ctx.settings, needs_dx, needs_dw)
    return dx_RK if needs_dx else None, dweight if needs_dw else None, None, None, None


_expert_linear = differentiable(_rows_product, _save, _gradient)
