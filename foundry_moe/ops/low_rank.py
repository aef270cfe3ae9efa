"""Experts with LoRA adapters on the Hopper kernels: low-rank products are steps of the experts' own products.

    u = x A          z = x Wᵀ + u Bᵀ     h = act(z)     (of w1 and v1; scale is a factor of B)
    u2 = h A2        y = h W2ᵀ + u2 B2ᵀ
    v2 = dy B2       dh = dy W2 + v2 A2ᵀ     dB2 = dyᵀ u2
    dz through the activation; in the same pass v = dz B, dB = dzᵀ u, dA2 = hᵀ v2
    dA = xᵀ v        dx = dz W + v Aᵀ

Weights are frozen and have no gradient. As in `blocksparse`, the backward pass overwrites z with its gradient.

Shapes: T tokens, R rows, E experts, D model width, F expert width, P planes (gate and up: 2, else 1), r rank, L its
columns in kernels (see `foundry_moe_kernels.low_rank`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from foundry_moe_kernels import expert_products as hopper
from foundry_moe_kernels import permute as permute_kernels
from foundry_moe_kernels.expert_products import LowRank, Tokens
from foundry_moe_kernels.low_rank import columns_of, hidden_backward_, outer, pack, project
from torch import Tensor

from foundry_moe.ops import compile_ahead as ahead
from foundry_moe.ops.blocksparse import ExpertPlan, _aligned, _gather, _planes, _table
from foundry_moe.ops.operators import differentiable, operator, take_saved
from foundry_moe.ops.permute import PermutePlan

MOST_RANK = 64


class Frozen(NamedTuple):
    """Weights w1, v1 [E, F, D] and w2 [E, D, F], and the scale of adapters."""

    w1: Tensor
    v1: Tensor | None
    w2: Tensor
    scale: float


def _rows_of(matrix_TD: Tensor, plan: ExpertPlan) -> Tokens | Tensor:
    """Tokens where the Hopper products gather them, else their rows."""
    if hopper.gathers(matrix_TD, plan.widths[0]):
        return _as_tokens(matrix_TD, plan)
    return _gather(matrix_TD, plan)


def _as_tokens(matrix_TD: Tensor, plan: ExpertPlan) -> Tokens:
    return Tokens(x_TD=matrix_TD, source_R=plan.source_R, choices=plan.row_TK.shape[1])


def _fake_forward(x_TD, weights_TK, up_a, up_b, down_a, down_b, frozen, plan):  # type: ignore[no-untyped-def]
    planes, columns = up_a.shape[0], columns_of(up_a.shape[-1])
    return (
        x_TD.new_empty(plan.row_TK.shape[0], frozen.w2.shape[1]),
        x_TD.new_empty(planes, plan.rows, frozen.w1.shape[1]),
        x_TD.new_empty(plan.rows, planes * columns),
        x_TD.new_empty(plan.rows, columns),
    )


@operator("lora_experts", _fake_forward)
def _forward(
    x_TD: Tensor,
    weights_TK: Tensor | None,
    up_a: Tensor,
    up_b: Tensor,
    down_a: Tensor,
    down_b: Tensor,
    frozen: Frozen,
    plan: ExpertPlan,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y_TD, and what the backward pass reads: z_PRF, u and u2."""
    x_TD, dtype = _aligned(x_TD), x_TD.dtype
    if plan.rows == 0:
        made = _fake_forward(x_TD, weights_TK, up_a, up_b, down_a, down_b, frozen, plan)
        return made[0].zero_(), *made[1:]
    _compile_ahead(frozen, up_a, weights_TK, plan)
    ragged, x_RD = plan.ragged, _rows_of(x_TD, plan)
    u_RL = project(x_RD, pack(up_a, dtype), ragged)
    low = LowRank(a_RL=u_RL, b=pack(up_b, dtype, scale=frozen.scale, apart=True))
    z_PRF, h_RF = hopper.up(x_RD, _planes(frozen.w1, frozen.v1), ragged, plan.activation, low=low)
    del x_RD
    down_u_RL = project(h_RF, pack(down_a[None], dtype), ragged)
    low = LowRank(a_RL=down_u_RL, b=pack(down_b[None], dtype, scale=frozen.scale)[None])
    y_RD = hopper.rows_product(h_RF[None], (_aligned(frozen.w2),), ragged, transposed=True, low=low)
    return permute_kernels.unpermute(y_RD, weights_TK, plan.row_TK), z_PRF, u_RL, down_u_RL


def _fake_backward(  # type: ignore[no-untyped-def]
    dy_TD, z_PRF, u_RL, down_u_RL, x_TD, weights_TK, up_a, up_b, down_a, down_b, frozen, plan, needs_dx
):
    return (
        torch.empty_like(x_TD, memory_format=torch.contiguous_format) if needs_dx else x_TD.new_empty(0),
        dy_TD.new_empty(0) if weights_TK is None else weights_TK.new_empty(weights_TK.shape),
        *(factor.new_empty(factor.shape, dtype=torch.float32) for factor in (up_a, up_b, down_a, down_b)),
    )


@operator("lora_experts_backward_", _fake_backward, mutates="z_PRF")
def _backward_(
    dy_TD: Tensor,
    z_PRF: Tensor,
    u_RL: Tensor,
    down_u_RL: Tensor,
    x_TD: Tensor,
    weights_TK: Tensor | None,
    up_a: Tensor,
    up_b: Tensor,
    down_a: Tensor,
    down_b: Tensor,
    frozen: Frozen,
    plan: ExpertPlan,
    needs_dx: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dx_TD and dweights_TK (empty where not needed), and the factors' gradients. Overwrites z_PRF."""
    dy_TD, x_TD, dtype = _aligned(dy_TD), _aligned(x_TD), x_TD.dtype
    if plan.rows == 0:
        made = _fake_backward(
            dy_TD, z_PRF, u_RL, down_u_RL, x_TD, weights_TK, up_a, up_b, down_a, down_b, frozen, plan, needs_dx
        )
        return tuple(tensor.zero_() for tensor in made)  # type: ignore[return-value]
    weights_TK = None if weights_TK is None else weights_TK.contiguous()
    ragged, rank = plan.ragged, up_a.shape[-1]
    dy_RD = _rows_of(dy_TD, plan)
    d_down_b, down_v_RL = outer(
        dy_RD, down_u_RL, ragged, rank, scale=frozen.scale, weights_TK=weights_TK, source_R=plan.source_R,
        factor_EKL=pack(down_b[None], dtype, scale=frozen.scale),
    )  # fmt: skip
    assert down_v_RL is not None
    low = LowRank(a_RL=down_v_RL, b=pack(down_a[None], dtype, transposed=True)[None])
    dh_RF = hopper.rows_product(
        dy_RD if isinstance(dy_RD, Tokens) else dy_RD[None], (_aligned(frozen.w2),), ragged,
        transposed=False, product=f"down_backward{len(z_PRF)}", low=low,
    )  # fmt: skip
    del dy_RD
    hidden = hidden_backward_(
        dh_RF, z_PRF, u_RL, down_v_RL, pack(up_b, dtype, scale=frozen.scale, apart=True), ragged, rank,
        scale=frozen.scale, activation=plan.activation, weights_TK=weights_TK, source_R=plan.source_R,
    )  # fmt: skip
    del dh_RF
    d_up_a, _ = outer(_as_tokens(x_TD, plan), hidden.v_RL, ragged, rank, planes=len(z_PRF))
    dx_TD = x_TD.new_empty(0)
    if needs_dx:
        low = LowRank(a_RL=hidden.v_RL, b=pack(up_a, dtype, transposed=True)[None])
        dx_RD = hopper.rows_product(z_PRF, _planes(frozen.w1, frozen.v1), ragged, transposed=False, low=low)
        dx_TD = permute_kernels.unpermute(dx_RD, None, plan.row_TK)
    dweights_TK = dy_TD.new_empty(0)
    if weights_TK is not None and hidden.dots is not None:
        dweights_TK = permute_kernels.gather_dots(hidden.dots, plan.row_TK, weights_TK.dtype)
    return dx_TD, dweights_TK, d_up_a, hidden.db, hidden.da, d_down_b[0]


def _results(ctx: Any, grads: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """Of the arguments of `_forward`, from the results of `_backward_`."""
    return *(grad if needed else None for grad, needed in zip(grads, ctx.needs_input_grad, strict=False)), None, None


def _save(ctx: Any, inputs: Sequence[Any], output: tuple[Tensor, ...]) -> None:
    *tensors, frozen, plan = inputs
    ctx.set_materialize_grads(False)  # z, u and u2 have none
    ctx.settings = frozen.scale, plan.settings
    ctx.save_for_backward(*output[1:], *tensors, *frozen[:3], *plan.tensors)


def _gradient(ctx: Any, dy_TD: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if dy_TD is None:
        return (None,) * 8
    z_PRF, u_RL, down_u_RL, x_TD, *tensors = take_saved(ctx)
    z_PRF = z_PRF.detach()  # the same memory and version: what autograd saved becomes the gradient
    return _results(ctx, _from_saved(ctx, dy_TD, (z_PRF, u_RL, down_u_RL), (x_TD, *tensors)))


def _from_saved(ctx: Any, dy_TD: Tensor, made: Sequence[Tensor], saved: Sequence[Any]) -> Sequence[Tensor]:
    scale, settings = ctx.settings
    frozen, plan = Frozen(saved[6], saved[7], saved[8], scale), ExpertPlan._make([*saved[9:], *settings])
    result: Sequence[Tensor] = _backward_(dy_TD, *made, *saved[:6], frozen, plan, ctx.needs_input_grad[0])
    return result


def _fake_recompute(x_TD, weights_TK, up_a, up_b, down_a, down_b, frozen, plan):  # type: ignore[no-untyped-def]
    return x_TD.new_empty(plan.row_TK.shape[0], frozen.w2.shape[1])


@operator("lora_experts_recompute", _fake_recompute)
def _recompute(
    x_TD: Tensor,
    weights_TK: Tensor | None,
    up_a: Tensor,
    up_b: Tensor,
    down_a: Tensor,
    down_b: Tensor,
    frozen: Frozen,
    plan: ExpertPlan,
) -> Tensor:
    """y_TD in a node that saves x alone."""
    return _forward(x_TD, weights_TK, up_a, up_b, down_a, down_b, frozen, plan)[0]


def _save_recompute(ctx: Any, inputs: Sequence[Any], output: Tensor) -> None:
    _save(ctx, inputs, (output,))


def _recompute_gradient(ctx: Any, dy_TD: Tensor) -> tuple[Tensor | None, ...]:
    scale, settings = ctx.settings
    saved = ctx.saved_tensors
    frozen, plan = Frozen(saved[6], saved[7], saved[8], scale), ExpertPlan._make([*saved[9:], *settings])
    made = _forward(*saved[:6], frozen, plan)[1:]
    return _results(ctx, _from_saved(ctx, dy_TD, made, saved))


def _compile_ahead(frozen: Frozen, up_a: Tensor, weights_TK: Tensor | None, plan: ExpertPlan) -> None:
    """Has the kernels of experts like these compiled for every load, once a process: see `compile_ahead`."""
    w2, (planes, *_, rank) = frozen.w2, up_a.shape
    experts, choices = len(plan.widths), plan.row_TK.shape[1]
    dtype = None if weights_TK is None else weights_TK.dtype

    def prepare() -> Callable[[], None]:
        few = (experts - 1) % 4 + 1  # whose tables are aligned as those of all are
        rows = ahead.plan_of(ahead.TOKENS, choices, few, w2.device)
        table = _table(rows.offsets_E, rows.num_rows, "hopper", plan.widths[:few])
        some = ExpertPlan(
            rows.source_R, rows.row_TK, rows.offsets_E, table, "hopper", plan.widths[:few], plan.activation
        )
        down, up = w2.new_zeros(w2[:few].shape), w2.new_zeros(planes, few, *w2.shape[:0:-1])
        _, width, hidden = w2.shape
        like: dict[str, Any] = {"device": w2.device}
        factors = [
            torch.zeros(*sizes, rank, **like)
            for sizes in ((planes, few, width), (planes, few, hidden), (few, hidden), (few, width))
        ]
        x_TD = w2.new_zeros(ahead.TOKENS, width)
        ones_TK = None if dtype is None else torch.ones(ahead.TOKENS, choices, dtype=dtype, **like)
        base = Frozen(up[0], up[1] if planes == 2 else None, down, frozen.scale)

        def run() -> None:
            y_TD, *made = _forward(x_TD, ones_TK, *factors, base, some)
            _backward_(y_TD, *made, x_TD, ones_TK, *factors, base, some, True)

        return run

    key = ("lora", w2.device, w2.dtype, dtype, w2.shape, planes, rank, choices, plan.activation)
    ahead.run_once(key, w2.device, experts, choices, prepare)


def kernels_mlp(
    x_TD: Tensor,
    weights_TK: Tensor | None,
    plan: PermutePlan,
    frozen: Frozen,
    factors: tuple[Tensor, Tensor, Tensor, Tensor],
    *,
    activation: str,
    memory: str,
) -> Tensor:
    """y_TD, for operands that the Hopper kernels take.

    Args:
        factors: A and B of the up products, [P, E, D, r] and [P, E, F, r], and of the down product.
    """
    widths = (frozen.w1.shape[1],) * plan.num_experts
    table = _table(plan.offsets_E, plan.num_rows, "hopper", widths)
    experts = ExpertPlan(plan.source_R, plan.row_TK, plan.offsets_E, table, "hopper", widths, activation)
    if memory == "recompute":
        return lora_recompute(x_TD, weights_TK, *factors, frozen, experts)
    return lora_experts(x_TD, weights_TK, *factors, frozen, experts)[0]


lora_experts = differentiable(_forward, _save, _gradient)
lora_recompute = differentiable(_recompute, _save_recompute, _recompute_gradient)
