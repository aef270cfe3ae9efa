"""The expert MLP as custom operators on Triton kernels, with gradients.

Four operators: up and down, forward and backward. Each calls the products of one of two families:

    hopper    ragged grouped kernels, for experts of one width (`foundry_moe_kernels.expert_products`)
    portable  SDD, DSD and DDS over the hybrid CSR-COO topology, any chip, any widths (`foundry_moe_kernels.products`)

Two nodes in the graph: the first (up) saves x, the second (down) the pre-activations z. The backward pass of the
second overwrites z with its gradient and passes that on, so z and its gradient never exist at once. A second backward
pass through the same graph (`retain_graph`) is therefore refused, by autograd's version check. With `memory: recompute`
there is one node that saves x alone and computes z again.

Weights of experts of one width are stacks: w1, v1 [E, F, D] and w2 [E, D, F]. Those of experts of different widths lie
side by side: w1, v1 and w2 [H, D]. Gate and up may be one tensor w1 [E, 2 F, D], and matrices of a stack may lie
transposed in memory: both are read, and their gradients written, as they lie. See `ExpertPlan.layout`.

Shapes: T tokens, K choices, R rows, E experts, D model width, F expert width, H widths of all experts added up,
Y planes (gate and up: 2, else 1), W values of one plane (R * F where experts have one width).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from foundry_moe_kernels import expert_products as hopper
from foundry_moe_kernels import permute as permute_kernels
from foundry_moe_kernels import pointwise, products, tuning
from torch import Tensor

from foundry_moe.ops import compile_ahead as ahead
from foundry_moe.ops.backends import tf32_allowed
from foundry_moe.ops.expert_plan import (
    ExpertPlan,
    aligned,
    aligned_stack,
    gather,
    lies_transposed,
    planes_of,
    tokens_of,
)
from foundry_moe.ops.operators import differentiable, is_traced, operator, take_saved

# Rows of x are copied for the weights' gradient, in two halves of the columns if copy and gradient would be above this
# size each. At its peak the backward pass holds the rows of dx, or the copy beside the gradient.
COPY_BYTES = 128 * 2**20


def _gradients_of(w1: Tensor, planes: int, plan: ExpertPlan, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Memory for the gradient of w1 (with a separate v1, for both: [2, ...]), and its planes as products write them."""
    if planes == 2 and plan.layout == "separate":
        dw1 = w1.new_empty(planes, *w1.shape, dtype=dtype)
        return dw1, dw1
    dw1 = torch.empty_like(w1, dtype=dtype)
    return dw1, dw1.unflatten(1, (2, -1)).movedim(1, 0) if plan.layout == "planes" else dw1[None]


def _fake_up(x_TD, w1, v1, bias, plan, *_):  # type: ignore[no-untyped-def]
    one_width = w1.dim() == 3 or len(set(plan.widths)) == 1
    shape = (plan.rows, plan.widths[0]) if one_width else (plan.rows * max(plan.widths),)
    if plan.pairs:
        return x_TD.new_empty(1, plan.rows, 2 * plan.widths[0]), x_TD.new_empty(shape)
    return x_TD.new_empty(2 if v1 is not None or plan.layout == "planes" else 1, *shape), x_TD.new_empty(shape)


@operator("expert_up", _fake_up)
def _up(
    x_TD: Tensor, w1: Tensor, v1: Tensor | None, bias_EF: Tensor | None, plan: ExpertPlan,
    w1_copy: Tensor | None = None, v1_copy: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """z_YW and h_W: pre-activations, and act(z[0]) (times z[1]). Products read the copies, if there are any."""
    w1, v1 = (w1, v1) if w1_copy is None else (w1_copy, v1_copy)
    if plan.rows == 0:
        return _fake_up(x_TD, w1, v1, bias_EF, plan)
    x_TD, weights = aligned(x_TD), planes_of(w1, v1, plan)
    if plan.pairs or plan.biased:
        z_RF = _rows_times(x_TD, weights[0], plan)
        bias_EF = None if bias_EF is None else bias_EF.contiguous()
        return z_RF[None], pointwise.activate(
            z_RF[None], plan.offsets_E, plan.activation, pairs=plan.pairs, bias_EF=bias_EF
        )
    if plan.kernels == "hopper":
        return hopper.up(tokens_of(x_TD, plan) or gather(x_TD, plan), weights, plan.ragged, plan.activation)
    choices = plan.row_TK.shape[1]
    return products.sdd_act(  # reads the tokens of its rows from x itself
        x_TD, weights, plan.topology, plan.activation, source_R=plan.source_R, choices=choices, tf32=tf32_allowed()
    )


def _rows_times(x_TD: Tensor, weight: Tensor, plan: ExpertPlan) -> Tensor:
    """z_RF, without an activation."""
    if plan.kernels == "hopper":
        rows = tokens_of(x_TD, plan) or gather(x_TD, plan)
        return hopper.rows_product(rows, (weight,), plan.ragged, transposed=True)
    x_RD = gather(x_TD, plan)
    topology = plan.topology_of(weight.shape[1])
    return products.sdd(x_RD, weight, topology, trans_b=True, tf32=tf32_allowed(), zero_tail=False)


@operator("expert_down", lambda z_YW, h_W, w2, _, plan, *more: h_W.new_empty(plan.row_TK.shape[0], w2.shape[1]))
def _down(
    z_YW: Tensor, h_W: Tensor, w2: Tensor, weights_TK: Tensor | None, plan: ExpertPlan, w2_copy: Tensor | None = None
) -> Tensor:
    """y_TD: the weighted sum of each token's rows of h·W2ᵀ. Takes z for the backward pass: h is a function of it."""
    dtype, w2 = w2.dtype, w2 if w2_copy is None else w2_copy
    _compile_ahead(w2, z_YW.shape[0], weights_TK, plan, dtype)
    w2 = aligned_stack(w2)
    if plan.rows == 0:
        return h_W.new_zeros(plan.row_TK.shape[0], w2.shape[1])
    if plan.kernels == "hopper":
        y_RD = hopper.rows_product(h_W, (w2,), plan.ragged, transposed=True)
    else:
        y_RD = products.dsd(h_W, w2, plan.topology, trans_b=w2.dim() == 3, tf32=tf32_allowed(), zero_tail=False)
    return permute_kernels.unpermute(y_RD, weights_TK, plan.row_TK)


def _fake_down_backward(dy_TD, z_YW, w2, weights_TK, plan, dtype):  # type: ignore[no-untyped-def]
    dweights = dy_TD.new_empty(0) if weights_TK is None else weights_TK.new_empty(weights_TK.shape)
    return torch.empty_like(w2, dtype=dtype), dweights


@operator("expert_down_backward_", _fake_down_backward, mutates=["z_YW"])
def _down_backward_(
    dy_TD: Tensor, z_YW: Tensor, w2: Tensor, weights_TK: Tensor | None, plan: ExpertPlan, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """dw2 (of this dtype) and dweights_TK (empty without weights). Overwrites z_YW with its gradient."""
    return _down_backward_into(z_YW, dy_TD, z_YW, w2, weights_TK, plan, dtype)


@operator("expert_down_backward", lambda dy, z, *rest: (torch.empty_like(z), *_fake_down_backward(dy, z, *rest)))
def _down_backward(
    dy_TD: Tensor, z_YW: Tensor, w2: Tensor, weights_TK: Tensor | None, plan: ExpertPlan, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """dz_YW, dw2 and dweights_TK. For compiled graphs, which copy a saved tensor before it is overwritten."""
    dz_YW = torch.empty_like(z_YW)
    return dz_YW, *_down_backward_into(dz_YW, dy_TD, z_YW, w2, weights_TK, plan, dtype)


def _down_backward_into(
    dz_YW: Tensor, dy_TD: Tensor, z_YW: Tensor, w2: Tensor, weights_TK: Tensor | None, plan: ExpertPlan,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if plan.rows == 0:
        dweights_TK = dy_TD.new_empty(0) if weights_TK is None else torch.zeros_like(weights_TK)
        return torch.zeros_like(w2, dtype=dtype), dweights_TK
    w2 = aligned_stack(w2)
    turned = w2.dim() == 3 and w2.stride(-1) != 1  # as it lies, the gradient is that of w2.mT
    dw2 = torch.empty_like(w2, dtype=dtype)
    weights_TK = None if weights_TK is None else weights_TK.contiguous()
    dy_TD = aligned(dy_TD)
    # In both families dh takes the memory that the weighted h has afterwards. The combine weights enter with the
    # activation's backward pass, so that no product is computed for their gradient.
    if plan.kernels == "hopper":
        ragged, taken = plan.ragged, tokens_of(dy_TD, plan, backward=True) or gather(dy_TD, plan)
        h_W, dots = hopper.down_backward_(
            taken, w2, z_YW, ragged, plan.activation, weights_TK, plan.source_R, pairs=plan.pairs, out=dz_YW
        )
        if turned:
            hopper.weight_gradient(h_W, taken, ragged, out=dw2.mT[None])
        else:
            hopper.weight_gradient(taken, h_W, ragged, out=dw2[None])
    else:
        topology, stacked, dy_RD = plan.topology, w2.dim() == 3, gather(dy_TD, plan)
        h_W = products.sdd(dy_RD, w2, topology, trans_b=not stacked, tf32=tf32_allowed(), zero_tail=False)
        if topology.uniform:
            dots = pointwise.activation_backward_(
                h_W, z_YW, plan.offsets_E, plan.activation, weights_TK, plan.source_R, pairs=plan.pairs, out=dz_YW
            )  # fmt: skip
        else:
            dots = pointwise.values_backward_(
                h_W, z_YW, topology, plan.activation, weights_TK, plan.source_R, out=dz_YW
            )
        out = dw2.mT if stacked else dw2
        products.dsd(h_W, dy_RD, topology, trans_s=True, stacked=stacked, tf32=tf32_allowed(), out=out)
    if weights_TK is None or dots is None:
        return dw2, dy_TD.new_empty(0)
    return dw2, permute_kernels.gather_dots(dots, plan.row_TK, weights_TK.dtype)


def _fake_up_backward(dz_YW, x_TD, w1, v1, plan, dtype, needs_dx):  # type: ignore[no-untyped-def]
    dx_TD = torch.empty_like(x_TD, memory_format=torch.contiguous_format) if needs_dx else x_TD.new_empty(0)
    bias = (len(plan.widths), dz_YW.shape[-1]) if plan.biased else (0,)
    return dx_TD, _gradients_of(w1, dz_YW.shape[0], plan, dtype)[0], w1.new_empty(bias)


@operator("expert_up_backward", _fake_up_backward)
def _up_backward(
    dz_YW: Tensor, x_TD: Tensor, w1: Tensor, v1: Tensor | None, plan: ExpertPlan, dtype: torch.dtype, needs_dx: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """dx_TD (empty unless `needs_dx`), `_gradients_of` w1 and v1, and the bias's gradient (empty unless `biased`)."""
    if plan.rows == 0:
        return tuple(map(torch.zeros_like, _fake_up_backward(dz_YW, x_TD, w1, v1, plan, dtype, needs_dx)))  # type: ignore[return-value]
    dz_YW, x_TD, weights = aligned(dz_YW), aligned(x_TD), planes_of(w1, v1, plan)
    turned = w1.dim() == 3 and weights[0].stride(-1) != 1  # as it lies, the gradient is that of w1.mT
    dx_TD = x_TD.new_empty(0)
    on_hopper = plan.kernels == "hopper"
    if on_hopper:
        ragged = plan.ragged
    else:
        topology = plan.topology_of(dz_YW.shape[2]) if plan.pairs else plan.topology
    x_RD: Tensor | hopper.Tokens | None = tokens_of(x_TD, plan, backward=True)
    if needs_dx:
        if on_hopper:
            beside = None
            if x_RD is None and (tokens := tokens_of(x_TD, plan)) is not None and hopper.copies(tokens):
                x_RD = x_TD.new_empty(plan.rows, x_TD.shape[1])
                beside = (tokens, x_RD)  # the product copies x's rows for the weights' gradient
            dx_RD = hopper.rows_product(dz_YW, weights, ragged, transposed=False, beside=beside)
        else:
            dx_RD = products.dsd(tuple(dz_YW), weights, topology, tf32=tf32_allowed(), zero_tail=False)
        dx_TD = permute_kernels.unpermute(dx_RD, None, plan.row_TK)
        del dx_RD
    dw1, dw_Y = _gradients_of(w1, len(weights), plan, dtype)  # only now: the rows of dx and this never exist at once
    for columns in [slice(None)] if x_RD is not None else column_parts(plan, x_TD, dw1):
        rows = gather(x_TD[:, columns], plan) if x_RD is None else x_RD
        if on_hopper and turned:
            hopper.weight_gradient(rows, dz_YW[0], ragged, out=dw_Y.mT[:, :, columns])
        elif on_hopper:
            hopper.weight_gradient(dz_YW, rows, ragged, out=dw_Y[..., columns])
        else:
            assert isinstance(rows, Tensor)
            stacked = w1.dim() == 3
            for dz_W, dw in zip(dz_YW, dw_Y, strict=True):
                out = dw[..., columns]
                products.dsd(dz_W, rows, topology, trans_s=True, stacked=stacked, tf32=tf32_allowed(), out=out)
        del rows  # before the next part is copied
    return dx_TD, dw1, _bias_gradient(dz_YW[0], plan) if plan.biased else w1.new_empty(0)


def _bias_gradient(dz_RF: Tensor, plan: ExpertPlan) -> Tensor:
    """[E, F]: each expert's rows added up, as the product with a column of ones."""
    ones_R8 = dz_RF.new_ones(plan.rows, 8)  # 16 bytes of a 16-bit type, which the kernels need of a row
    if plan.kernels == "hopper":
        sums_E8F = hopper.weight_gradient(ones_R8, dz_RF, plan.ragged)[0]
    else:
        sums_E8F = products.dsd(ones_R8, dz_RF, plan.topology_of(8), trans_s=True, stacked=True)
    return sums_E8F[:, 0].contiguous()  # as a compiled graph expects a new tensor


def column_parts(plan: ExpertPlan, x_TD: Tensor, gradient: Tensor) -> list[slice]:
    """The columns of x whose rows are copied at a time."""
    width = x_TD.shape[1]
    copy_bytes = tuning.all_rows(plan.rows) * width * x_TD.element_size()
    experts = len(plan.widths)
    gradient_bytes = gradient.nbytes * tuning.all_experts(experts) // experts
    parts = 2 if min(copy_bytes, gradient_bytes) > COPY_BYTES and width % 512 == 0 else 1
    return [slice(part * width // parts, (part + 1) * width // parts) for part in range(parts)]


def _fake_mlp(x_TD, w1, v1, bias_EF, w2, weights_TK, plan, *_):  # type: ignore[no-untyped-def]
    return x_TD.new_empty(plan.row_TK.shape[0], w2.shape[1])


@operator("expert_recompute", _fake_mlp)
def _mlp(
    x_TD: Tensor, w1: Tensor, v1: Tensor | None, bias_EF: Tensor | None, w2: Tensor, weights_TK: Tensor | None,
    plan: ExpertPlan, w1_copy: Tensor | None = None, v1_copy: Tensor | None = None, w2_copy: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """y_TD in one node that saves no pre-activations."""
    return _down(*_up(x_TD, w1, v1, bias_EF, plan, w1_copy, v1_copy), w2, weights_TK, plan, w2_copy)


def _save_up(ctx: Any, inputs: Sequence[Any], output: tuple[Tensor, Tensor]) -> None:
    x_TD, w1, v1, _, plan, w1_copy, v1_copy = inputs
    ctx.set_materialize_grads(False)  # h has no gradient: `down` gives that of z
    ctx.dtype, ctx.settings = w1.dtype, plan.settings
    read = (w1, v1) if w1_copy is None else (w1_copy, v1_copy)
    ctx.save_for_backward(x_TD, *read, *plan.tensors)


def _up_gradient(ctx: Any, dz_YW: Tensor | None, dh_W: Tensor | None) -> tuple[Tensor | None, ...]:
    assert dh_W is None, "h has no gradient of its own"
    if dz_YW is None:
        return (None,) * 7
    x_TD, w1, v1, *tables = ctx.saved_tensors
    plan = ExpertPlan._make([*tables, *ctx.settings])
    return *_up_gradients(ctx, dz_YW, x_TD, w1, v1, plan), None, None, None


def _up_gradients(
    ctx: Any, dz_YW: Tensor, x_TD: Tensor, w1: Tensor, v1: Tensor | None, plan: ExpertPlan
) -> tuple[Tensor | None, ...]:
    """Gradients of x_TD, w1, v1 and the bias."""
    needs_dx = ctx.needs_input_grad[0]
    up_backward = _up_backward if is_traced(dz_YW) else _up_backward.eager
    dx_TD, dw1, dbias_EF = up_backward(dz_YW, x_TD, w1, v1, plan, ctx.dtype, needs_dx)
    of_weights = (dw1, None) if v1 is None else (dw1[0], dw1[1])
    return dx_TD if needs_dx else None, *of_weights, dbias_EF if plan.biased else None


def _save_down(ctx: Any, inputs: Sequence[Any], output: Tensor) -> None:
    z_YW, _, w2, weights_TK, plan, w2_copy = inputs
    ctx.dtype, ctx.settings = w2.dtype, plan.settings
    ctx.save_for_backward(z_YW, w2 if w2_copy is None else w2_copy, weights_TK, *plan.tensors)


def _down_gradient(ctx: Any, dy_TD: Tensor) -> tuple[Tensor | None, ...]:
    z_YW, w2, weights_TK, *tables = take_saved(ctx)
    plan = ExpertPlan._make([*tables, *ctx.settings])
    if is_traced(dy_TD):
        dz_YW, dw2, dweights_TK = _down_backward(dy_TD, z_YW, w2, weights_TK, plan, ctx.dtype)
    else:
        dz_YW = z_YW.detach()  # the same memory and version: what autograd saved becomes the gradient
        dw2, dweights_TK = _down_backward_.eager(dy_TD, dz_YW, w2, weights_TK, plan, ctx.dtype)
    return dz_YW, None, dw2, None if weights_TK is None else dweights_TK, None, None


def _save_mlp(ctx: Any, inputs: Sequence[Any], output: Tensor) -> None:
    x_TD, w1, v1, bias_EF, w2, weights_TK, plan, *copies = inputs
    ctx.dtype, ctx.settings = w1.dtype, plan.settings
    w1, v1, w2 = (w1, v1, w2) if copies[0] is None else copies
    ctx.save_for_backward(x_TD, w1, v1, bias_EF, w2, weights_TK, *plan.tensors)


def _mlp_gradient(ctx: Any, dy_TD: Tensor) -> tuple[Tensor | None, ...]:
    x_TD, w1, v1, bias_EF, w2, weights_TK, *tables = ctx.saved_tensors
    plan = ExpertPlan._make([*tables, *ctx.settings])
    z_YW = _up(x_TD, w1, v1, bias_EF, plan, None, None)[0]
    dw2, dweights_TK = _down_backward_(dy_TD, z_YW, w2, weights_TK, plan, ctx.dtype)
    of_up = _up_gradients(ctx, z_YW, x_TD, w1, v1, plan)
    return *of_up, dw2, None if weights_TK is None else dweights_TK, None, None, None, None


expert_up = differentiable(_up, _save_up, _up_gradient)
expert_down = differentiable(_down, _save_down, _down_gradient)
expert_recompute = differentiable(_mlp, _save_mlp, _mlp_gradient)


def _compile_ahead(w2: Tensor, planes: int, weights_TK: Tensor | None, plan: ExpertPlan, dtype: torch.dtype) -> None:
    """Has the kernels of experts like these compiled for every load, once per process: see `compile_ahead`.

    Args:
        dtype: of the weights' gradients.
    """
    weights_dtype, choices = None if weights_TK is None else weights_TK.dtype, plan.row_TK.shape[1]
    key = (w2.dtype, weights_dtype, w2.shape, w2.stride(-1), planes, choices, dtype, *plan.settings)
    ahead.run_once(key, plan, lambda: _run_few(w2, planes, weights_TK, plan, dtype))


def _run_few(w2: Tensor, planes: int, weights_TK: Tensor | None, plan: ExpertPlan, dtype: torch.dtype) -> None:
    """Runs all four operators on a few tokens."""
    experts, choices, stacked = len(plan.widths), plan.row_TK.shape[1], w2.dim() == 3
    if stacked:  # a few experts, whose tables are aligned as those of all are. Tiles of mixed widths depend on all
        experts = (experts - 1) % 4 + 1
    w2 = torch.zeros_like(w2[:experts] if stacked else w2)
    w1, v1 = torch.zeros_like(w2.mT, memory_format=torch.contiguous_format) if stacked else w2, None
    if planes == 2 and plan.layout == "separate":
        v1 = torch.zeros_like(w1)
    elif stacked:  # it lies as w2 does
        w1 = w1 if plan.layout == "separate" else torch.cat([w1, w1], dim=1)
        w1 = w1.mT.contiguous().mT if lies_transposed(w2) else w1
    bias = w1.new_zeros(w1.shape[:2]) if plan.biased else None
    # kernels differ by whether the second plane of values begins at a multiple of 16 bytes: if rows do, always
    whole = max(plan.widths[:experts]) * w2.itemsize % 16 == 0
    for tokens in (ahead.TOKENS,) if whole else (ahead.TOKENS, ahead.TOKENS - 1):
        few = ahead.few_rows(plan, tokens, experts)
        weights = None if weights_TK is None else weights_TK.new_ones(tokens, choices)
        x_TD = w2.new_zeros(tokens, w2.shape[1])
        z_YW, h_W = _up(x_TD, w1, v1, bias, few)
        y_TD = _down(z_YW, h_W, w2, weights, few)
        _down_backward_(y_TD, z_YW, w2, weights, few, dtype)
        _up_backward(z_YW, x_TD, w1, v1, few, dtype, True)
