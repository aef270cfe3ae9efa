"""Experts with LoRA adapters on the Hopper kernels: low-rank products are steps of the experts' own products.

    u = x A          z = x Wᵀ + u Bᵀ     h = act(z)     (of w1 and v1; scale is a factor of B)
    u2 = h A2        y = h W2ᵀ + u2 B2ᵀ
    v2 = dy B2       dh = dy W2 + v2 A2ᵀ     dB2 = dyᵀ u2
    dz through the activation; in the same pass v = dz B, dB = dzᵀ u, dA2 = hᵀ v2
    dA = xᵀ v        dx = dz W + v Aᵀ

Weights are frozen and have no gradient. As in `blocksparse`, the backward pass overwrites z with its gradient.

Shapes: T tokens, R rows, E experts, D model width, F expert width, Y planes (gate and up: 2, else 1), r rank, L its
columns in kernels (see `foundry_moe_kernels.low_rank`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from foundry_moe_kernels import expert_products as hopper
from foundry_moe_kernels import permute as permute_kernels
from foundry_moe_kernels.expert_products import LowRank
from foundry_moe_kernels.low_rank import Factors, columns_of, hidden_backward_, outer, pack, project
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from foundry_moe.ops import compile_ahead as ahead
from foundry_moe.ops.backends import takes_hopper
from foundry_moe.ops.expert_plan import ExpertPlan, aligned, as_tokens, gather, planes_of, table_of, tokens_of
from foundry_moe.ops.operators import differentiable, operator, take_saved
from foundry_moe.ops.permute import PermutePlan

MOST_RANK = 64


class Adapter(NamedTuple):
    """The factors of one matrix of all experts; `a` is transposed, so that the rows of both are those of weights."""

    a_EKL: Tensor
    b_ENL: Tensor


class Adapters(NamedTuple):
    """The adapters of w1, v1 and w2; None for a matrix without one.

    scale: of the products B A.
    dropout: probability that an element of an adapter's input is zero.
    """

    w1: Adapter | None
    v1: Adapter | None
    w2: Adapter | None
    scale: float
    dropout: float = 0.0

    def padded(self, columns: int) -> Adapters:
        """For weights padded by this many columns (w1, v1) and rows (w2) of zeros."""

        def wider(tensor: Tensor) -> Tensor:
            return F.pad(tensor, (0, 0, 0, columns))

        w1, v1 = (None if one is None else one._replace(a_EKL=wider(one.a_EKL)) for one in (self.w1, self.v1))
        w2 = None if self.w2 is None else self.w2._replace(b_ENL=wider(self.w2.b_ENL))
        return self._replace(w1=w1, v1=v1, w2=w2)


class Frozen(NamedTuple):
    """Weights w1, v1 [E, F, D] and w2 [E, D, F], and the scale of adapters."""

    w1: Tensor
    v1: Tensor | None
    w2: Tensor
    scale: float


class Kept(NamedTuple):
    """Tensors that the backward pass reads beside z, whose memory it overwrites."""

    u_RL: Tensor
    down_u_RL: Tensor
    x_TD: Tensor
    weights_TK: Tensor | None


def _fake_forward(x_TD, weights_TK, factors, frozen, plan):  # type: ignore[no-untyped-def]
    planes, columns = 1 if frozen.v1 is None else 2, columns_of(factors.rank)
    return (
        x_TD.new_empty(plan.row_TK.shape[0], frozen.w2.shape[1]),
        x_TD.new_empty(planes, plan.rows, frozen.w1.shape[1]),
        x_TD.new_empty(plan.rows, planes * columns),
        x_TD.new_empty(plan.rows, columns),
    )


@operator("lora_experts", _fake_forward)
def _forward(
    x_TD: Tensor, weights_TK: Tensor | None, factors: Factors, frozen: Frozen, plan: ExpertPlan
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y_TD, and the tensors of the backward pass: z_YRF, u and u2."""
    x_TD = aligned(x_TD)
    if plan.rows == 0:
        made = _fake_forward(x_TD, weights_TK, factors, frozen, plan)
        return made[0].zero_(), *made[1:]
    _compile_ahead(weights_TK, factors, frozen, plan)
    ragged, x_RD, w1s = plan.ragged, tokens_of(x_TD, plan) or gather(x_TD, plan), planes_of(frozen.w1, frozen.v1)
    packed = pack(factors, frozen.w2, len(w1s), frozen.scale)
    u_RL = project(x_RD, packed.up_a, ragged)
    z_YRF, h_RF = hopper.up(x_RD, w1s, ragged, plan.activation, low=LowRank(a_RL=u_RL, b=packed.up_b))
    del x_RD
    down_u_RL = project(h_RF, packed.down_a, ragged)
    low = LowRank(a_RL=down_u_RL, b=packed.down_b)
    y_RD = hopper.rows_product(h_RF[None], (aligned(frozen.w2),), ragged, transposed=True, low=low)
    return permute_kernels.unpermute(y_RD, weights_TK, plan.row_TK), z_YRF, u_RL, down_u_RL


def _fake_backward(dy_TD, z_YRF, kept, factors, frozen, plan, needs_dx):  # type: ignore[no-untyped-def]
    (planes, _, f), (experts, d, _), rank, x_TD = z_YRF.shape, frozen.w2.shape, factors.rank, kept.x_TD
    sizes = (planes, experts, d), (planes, experts, f), (experts, f), (experts, d)
    return (
        torch.empty_like(x_TD, memory_format=torch.contiguous_format) if needs_dx else x_TD.new_empty(0),
        dy_TD.new_empty(0) if kept.weights_TK is None else kept.weights_TK.new_empty(kept.weights_TK.shape),
        *(x_TD.new_empty(*size, rank, dtype=torch.float32) for size in sizes),
    )


@operator("lora_experts_backward_", _fake_backward, mutates=["z_YRF"])
def _backward_(
    dy_TD: Tensor, z_YRF: Tensor, kept: Kept, factors: Factors, frozen: Frozen, plan: ExpertPlan, needs_dx: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dx_TD and dweights_TK (empty where not needed), and the factors' gradients. Overwrites z_YRF."""
    if plan.rows == 0:
        made = _fake_backward(dy_TD, z_YRF, kept, factors, frozen, plan, needs_dx)
        return tuple(tensor.zero_() for tensor in made)  # type: ignore[return-value]
    dy_TD, x_TD = aligned(dy_TD), aligned(kept.x_TD)
    weights_TK = None if kept.weights_TK is None else kept.weights_TK.contiguous()
    weighted: dict[str, Any] = {"weights_TK": weights_TK, "source_R": plan.source_R}
    ragged, rank = plan.ragged, factors.rank
    packed = pack(factors, frozen.w2, len(z_YRF), frozen.scale)
    dy_RD = tokens_of(dy_TD, plan) or gather(dy_TD, plan)
    d_down_b, down_v_RL = outer(
        dy_RD, kept.down_u_RL, ragged, rank, scale=frozen.scale, factor_EKL=packed.down_b[0], **weighted
    )
    assert down_v_RL is not None
    dh_RF = hopper.rows_product(
        dy_RD, (aligned(frozen.w2),), ragged,
        transposed=False, low=LowRank(a_RL=down_v_RL, b=packed.down_a[None]),
    )  # fmt: skip
    del dy_RD
    d_up_b, d_down_a, v_RL, dots = hidden_backward_(
        dh_RF, z_YRF, kept.u_RL, down_v_RL, packed.up_b, ragged, rank,
        scale=frozen.scale, activation=plan.activation, **weighted,
    )  # fmt: skip
    del dh_RF
    d_up_a, _ = outer(as_tokens(x_TD, plan), v_RL, ragged, rank, planes=len(z_YRF))
    dx_TD = x_TD.new_empty(0)
    if needs_dx:
        low = LowRank(a_RL=v_RL, b=packed.up_a[None])
        dx_RD = hopper.rows_product(z_YRF, planes_of(frozen.w1, frozen.v1), ragged, transposed=False, low=low)
        dx_TD = permute_kernels.unpermute(dx_RD, None, plan.row_TK)
    dweights_TK = dy_TD.new_empty(0)
    if weights_TK is not None and dots is not None:
        dweights_TK = permute_kernels.gather_dots(dots, plan.row_TK, weights_TK.dtype)
    return dx_TD, dweights_TK, d_up_a, d_up_b, d_down_a, d_down_b[0]


def _save(ctx: Any, inputs: Sequence[Any], output: tuple[Tensor, ...]) -> None:
    x_TD, weights_TK, factors, frozen, plan = inputs
    ctx.set_materialize_grads(False)  # z, u and u2 have none
    ctx.settings = frozen.scale, plan.settings
    ctx.save_for_backward(*output[1:], x_TD, weights_TK, *factors, *frozen[:3], *plan.tensors)


def _gradient(ctx: Any, dy_TD: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if dy_TD is None:
        return (None,) * 5
    z_YRF, u_RL, down_u_RL, x_TD, weights_TK, *saved = take_saved(ctx)
    scale, settings = ctx.settings
    factors, frozen = Factors(*saved[:6]), Frozen(saved[6], saved[7], saved[8], scale)
    plan = ExpertPlan._make([*saved[9:], *settings])
    needed = ctx.needs_input_grad
    # detached, z is the same memory and version: what autograd saved becomes the gradient
    dx_TD, dweights_TK, d_up_a, d_up_b, d_down_a, d_down_b = _backward_(
        dy_TD, z_YRF.detach(), Kept(u_RL, down_u_RL, x_TD, weights_TK), factors, frozen, plan, needed[0]
    )
    by_factor = (d_up_a[0], d_up_b[0], d_up_a[-1], d_up_b[-1], d_down_a, d_down_b)
    of_factors = [grad if wanted else None for grad, wanted in zip(by_factor, needed[2:], strict=False)]
    return dx_TD if needed[0] else None, dweights_TK if needed[1] else None, Factors(*of_factors), None, None


def _compile_ahead(weights_TK: Tensor | None, factors: Factors, frozen: Frozen, plan: ExpertPlan) -> None:
    """Has the kernels of experts like these compiled for every load, once per process: see `compile_ahead`."""
    experts, choices = len(plan.widths), plan.row_TK.shape[1]

    def run() -> None:
        few = (experts - 1) % 4 + 1  # whose tables are aligned as those of all are
        some = ahead.few_rows(plan, ahead.TOKENS, few)
        low = Factors(*(None if factor is None else factor[:few] for factor in factors))
        v1 = None if frozen.v1 is None else frozen.v1[:few]
        base = Frozen(frozen.w1[:few], v1, frozen.w2[:few], frozen.scale)
        x_TD = base.w2.new_zeros(ahead.TOKENS, base.w2.shape[1])
        ones_TK = None if weights_TK is None else weights_TK.new_ones(ahead.TOKENS, choices)
        y_TD, z_YRF, u_RL, down_u_RL = _forward(x_TD, ones_TK, low, base, some)
        _backward_(y_TD, z_YRF, Kept(u_RL, down_u_RL, x_TD, ones_TK), low, base, some, True)

    dtypes = [None if tensor is None else tensor.dtype for tensor in (frozen.w2, weights_TK, *factors)]
    key = ("lora", *dtypes, frozen.w2.shape, frozen.v1 is None, factors.rank, choices, plan.activation)
    ahead.run_once(key, plan, run)


def lora_mlp(
    x_TD: Tensor,
    weights_TK: Tensor | None,
    plan: PermutePlan,
    weights: tuple[Tensor, Tensor | None, Tensor],
    adapters: Adapters,
    *,
    activation: str,
    memory: str,
) -> Tensor:
    """y_TD as `foundry_moe.ops.expert_mlp` defines it, for operands that `supports` accepts."""
    factors = Factors(*(factor for adapter in adapters[:3] for factor in adapter or (None, None)))
    frozen = Frozen(*weights, adapters.scale)
    widths = (frozen.w1.shape[1],) * plan.num_experts
    table = table_of(plan.offsets_E, plan.num_rows, "hopper", widths)
    experts = ExpertPlan(plan.source_R, plan.row_TK, plan.offsets_E, table, "hopper", widths, activation)
    if memory == "recompute" and torch.is_grad_enabled():
        run = partial(checkpoint, lora_experts, use_reentrant=False, preserve_rng_state=False)
        return run(x_TD, weights_TK, factors, frozen, experts)[0]
    return lora_experts(x_TD, weights_TK, factors, frozen, experts)[0]


def supports(x_TD: Tensor, weights: tuple[Tensor, Tensor | None, Tensor], adapters: Adapters) -> bool:
    """Whether the Hopper kernels compute these experts: they draw no random numbers and have no gradient of weights."""
    ranks = [adapter.a_EKL.shape[2] for adapter in adapters[:3] if adapter is not None]
    frozen = not any(weight is not None and weight.requires_grad for weight in weights)
    hopper_computes = takes_hopper(x_TD.device, x_TD.dtype, *weights[2].shape[1:])
    return hopper_computes and frozen and not adapters.dropout and max(ranks) <= MOST_RANK


lora_experts = differentiable(_forward, _save, _gradient, of_fields=True)
