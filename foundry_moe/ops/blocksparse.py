"""The expert MLP as custom operators on the block-sparse kernels, with gradients.

Two nodes in the graph: the first (up) keeps x, the second (down) the pre-activations
z, which its backward turns into their own gradient in place and hands on; so z is gone before the first node's
gradients are allocated. A second backward through the same graph (`retain_graph`) is therefore refused, by autograd's
version check. With `memory: recompute` there is one node that keeps x alone and computes z again.

Shapes: T tokens, K choices, R rows, E experts, D model width, F expert width, P planes (gate, up).
"""

from __future__ import annotations

from typing import Any

import torch
from foundry_moe_kernels.interpreter import INTERPRETED
from torch import Tensor

from foundry_moe.ops import expert_steps as steps
from foundry_moe.ops.compile_ahead import compile_ahead
from foundry_moe.ops.operators import differentiable, operator, take_saved
from foundry_moe.ops.permute import PermutePlan

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _aligned(tensor: Tensor) -> Tensor:
    """The tensor as kernels read it: contiguous, from an address that 16 bytes divide."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def _aligned_weights(w1_EFD: Tensor, v1_EFD: Tensor | None) -> tuple[Tensor, Tensor | None]:
    return _aligned(w1_EFD), None if v1_EFD is None else _aligned(v1_EFD)


def _fake_up(x_TD, w1_EFD, v1_EFD, source_R, row_TK, offsets_E, packed, hopper, activation):  # type: ignore[no-untyped-def]
    planes, rows, hidden = 1 if v1_EFD is None else 2, source_R.shape[0], w1_EFD.shape[1]
    return x_TD.new_empty(planes, rows, hidden), x_TD.new_empty(rows, hidden)


@operator(
    "expert_pack",
    lambda offsets_E, rows, hidden, hopper: offsets_E.new_empty(steps.packed_size(offsets_E, rows, hidden, hopper)),
)
def _pack(offsets_E: Tensor, rows: int, hidden: int, hopper: bool) -> Tensor:
    """The table that the products of all four steps share: see `expert_steps.pack`."""
    return steps.pack(offsets_E, rows, hidden, hopper)


@operator("expert_up", _fake_up)
def _up(
    x_TD: Tensor,
    w1_EFD: Tensor,
    v1_EFD: Tensor | None,
    source_R: Tensor,
    row_TK: Tensor,
    offsets_E: Tensor,
    packed: Tensor,
    hopper: bool,
    activation: str,
) -> tuple[Tensor, Tensor]:
    """z_PRF, h_RF: see `expert_steps.up`."""
    operands = (_aligned(x_TD), *_aligned_weights(w1_EFD, v1_EFD))
    return steps.up(*operands, source_R, row_TK, offsets_E, packed, hopper, activation)


def _fake_up_backward(dz_PRF, x_TD, w1_EFD, v1_EFD, source_R, row_TK, offsets_E, packed, hopper, needs_dx):  # type: ignore[no-untyped-def]
    dx_TD = torch.empty_like(x_TD, memory_format=torch.contiguous_format) if needs_dx else x_TD.new_empty(0)
    return dx_TD, w1_EFD.new_empty(dz_PRF.shape[0], *w1_EFD.shape)


@operator("expert_up_backward", _fake_up_backward)
def _up_backward(
    dz_PRF: Tensor,
    x_TD: Tensor,
    w1_EFD: Tensor,
    v1_EFD: Tensor | None,
    source_R: Tensor,
    row_TK: Tensor,
    offsets_E: Tensor,
    packed: Tensor,
    hopper: bool,
    needs_dx: bool,
) -> tuple[Tensor, Tensor]:
    """dx_TD (empty unless needed), dw_PEFD: see `expert_steps.up_backward`."""
    operands = (_aligned(dz_PRF), _aligned(x_TD), *_aligned_weights(w1_EFD, v1_EFD))
    return steps.up_backward(*operands, source_R, row_TK, offsets_E, packed, hopper, needs_dx)


def _fake_down(z_PRF, h_RF, w2_EDF, weights_TK, source_R, row_TK, offsets_E, packed, hopper, activation):  # type: ignore[no-untyped-def]
    return h_RF.new_empty(row_TK.shape[0], w2_EDF.shape[1])


@operator("expert_down", _fake_down)
def _down(
    z_PRF: Tensor,
    h_RF: Tensor,
    w2_EDF: Tensor,
    weights_TK: Tensor | None,
    source_R: Tensor,
    row_TK: Tensor,
    offsets_E: Tensor,
    packed: Tensor,
    hopper: bool,
    activation: str,
) -> Tensor:
    """y_TD. Takes z_PRF for the backward pass alone: h_RF is a function of it."""
    compile_ahead(w2_EDF, z_PRF.shape[0], weights_TK, row_TK, hopper, activation)
    return steps.down(h_RF, _aligned(w2_EDF), _contiguous(weights_TK), row_TK, offsets_E, packed, hopper)


def _fake_down_backward(dy_TD, z_PRF, w2_EDF, weights_TK, *_):  # type: ignore[no-untyped-def]
    dweights = dy_TD.new_empty(0) if weights_TK is None else weights_TK.new_empty(weights_TK.shape)
    return w2_EDF.new_empty(w2_EDF.shape), dweights


@operator("expert_down_backward_", _fake_down_backward, mutates="z_PRF")
def _down_backward_(
    dy_TD: Tensor,
    z_PRF: Tensor,
    w2_EDF: Tensor,
    weights_TK: Tensor | None,
    source_R: Tensor,
    row_TK: Tensor,
    offsets_E: Tensor,
    packed: Tensor,
    hopper: bool,
    activation: str,
) -> tuple[Tensor, Tensor]:
    """dw2_EDF, dweights_TK (empty without weights); z_PRF becomes its gradient: see `expert_steps.down_backward_`."""
    w2_EDF, weights_TK = _aligned(w2_EDF), _contiguous(weights_TK)
    return steps.down_backward_(
        _aligned(dy_TD), z_PRF, w2_EDF, weights_TK, source_R, row_TK, offsets_E, packed, hopper, activation
    )


def _fake_mlp(x_TD, w1_EFD, v1_EFD, w2_EDF, weights_TK, source_R, row_TK, offsets_E, packed, hopper, activation):  # type: ignore[no-untyped-def]
    return x_TD.new_empty(row_TK.shape[0], w2_EDF.shape[1])


@operator("expert_recompute", _fake_mlp)
def _mlp(
    x_TD: Tensor,
    w1_EFD: Tensor,
    v1_EFD: Tensor | None,
    w2_EDF: Tensor,
    weights_TK: Tensor | None,
    source_R: Tensor,
    row_TK: Tensor,
    offsets_E: Tensor,
    packed: Tensor,
    hopper: bool,
    activation: str,
) -> Tensor:
    """y_TD in one node that keeps no pre-activations."""
    compile_ahead(w2_EDF, 1 if v1_EFD is None else 2, weights_TK, row_TK, hopper, activation)
    _, h_RF = _up(x_TD, w1_EFD, v1_EFD, source_R, row_TK, offsets_E, packed, hopper, activation)
    return steps.down(h_RF, _aligned(w2_EDF), _contiguous(weights_TK), row_TK, offsets_E, packed, hopper)


def _save_up(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)  # h's gradient never comes: its use hands it to z
    ctx.hopper = inputs[7]
    ctx.save_for_backward(*inputs[:7])


def _up_gradient(ctx: Any, dz_PRF: Tensor | None, dh_RF: Tensor | None) -> tuple[Tensor | None, ...]:
    assert dh_RF is None, "h has no gradient of its own"
    if dz_PRF is None:
        return (None,) * 9
    needs_dx = ctx.needs_input_grad[0]
    dx_TD, dw_PEFD = _up_backward(dz_PRF, *ctx.saved_tensors, ctx.hopper, needs_dx)
    return dx_TD if needs_dx else None, *_by_plane(dw_PEFD), None, None, None, None, None, None


def _by_plane(dw_PEFD: Tensor) -> tuple[Tensor, Tensor | None]:
    return dw_PEFD[0], dw_PEFD[1] if dw_PEFD.shape[0] == 2 else None


def _save_down(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    z_PRF, _, *rest, ctx.hopper, ctx.activation = inputs
    ctx.save_for_backward(z_PRF, *rest)


def _down_gradient(ctx: Any, dy_TD: Tensor) -> tuple[Tensor | None, ...]:
    z_PRF, w2_EDF, weights_TK, *rows = take_saved(ctx)
    dz_PRF = z_PRF.detach()  # the same memory and version: what autograd kept is now the gradient
    dw2_EDF, dweights_TK = _down_backward_(dy_TD, dz_PRF, w2_EDF, weights_TK, *rows, ctx.hopper, ctx.activation)
    return dz_PRF, None, dw2_EDF, None if weights_TK is None else dweights_TK, None, None, None, None, None, None


def _save_mlp(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.hopper, ctx.activation = inputs
    ctx.save_for_backward(*tensors)


def _mlp_gradient(ctx: Any, dy_TD: Tensor) -> tuple[Tensor | None, ...]:
    x_TD, w1_EFD, v1_EFD, w2_EDF, weights_TK, source_R, row_TK, offsets_E, packed = ctx.saved_tensors
    first = (x_TD, w1_EFD, v1_EFD, source_R, row_TK, offsets_E, packed, ctx.hopper)
    z_PRF = _up(*first, ctx.activation)[0]
    dw2_EDF, dweights_TK = _down_backward_(
        dy_TD, z_PRF, w2_EDF, weights_TK, source_R, row_TK, offsets_E, packed, ctx.hopper, ctx.activation
    )
    needs_dx = ctx.needs_input_grad[0]
    dx_TD, dw_PEFD = _up_backward(z_PRF, *first, needs_dx)
    dweights = None if weights_TK is None else dweights_TK
    return dx_TD if needs_dx else None, *_by_plane(dw_PEFD), dw2_EDF, dweights, None, None, None, None, None, None


expert_up = differentiable(_up, _save_up, _up_gradient)
expert_down = differentiable(_down, _save_down, _down_gradient)
expert_recompute = differentiable(_mlp, _save_mlp, _mlp_gradient)


def is_available(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernels run here: fp32, fp16 or bf16 on CUDA, or anywhere in Triton's interpreter (no bf16 there)."""
    if INTERPRETED:
        return dtype in (torch.float32, torch.float16)
    return device.type == "cuda" and dtype in _DTYPES


def blocksparse_mlp(
    x_TD: Tensor,
    weights_TK: Tensor | None,
    plan: PermutePlan,
    w1_EFD: Tensor,
    v1_EFD: Tensor | None,
    w2_EDF: Tensor,
    activation: str,
    memory: str,
) -> Tensor:
    """y_TD: what `foundry_moe.ops.expert_mlp` says, for operands it has checked.

    Raises:
        ValueError: `memory` is neither save nor recompute, or dtypes or devices differ.
    """
    if memory not in ("save", "recompute"):
        raise ValueError(f"memory ({memory!r}) must be save or recompute")
    for name, weight in (("w1_EFD", w1_EFD), ("v1_EFD", v1_EFD), ("w2_EDF", w2_EDF)):
        if weight is not None and (weight.dtype, weight.device) != (x_TD.dtype, x_TD.device):
            raise ValueError(
                f"{name} is {weight.dtype} on {weight.device}, x_TD {x_TD.dtype} on {x_TD.device}: they must agree"
            )
    hopper = steps.takes_hopper(x_TD.device, x_TD.dtype, *w2_EDF.shape[1:])
    packed = _pack(plan.offsets_E, plan.num_rows, w2_EDF.shape[2], hopper)
    rows = (plan.source_R, plan.row_TK, plan.offsets_E, packed, hopper)
    if memory == "recompute":
        return expert_recompute(x_TD, w1_EFD, v1_EFD, w2_EDF, weights_TK, *rows, activation)
    z_PRF, h_RF = expert_up(x_TD, w1_EFD, v1_EFD, *rows, activation)
    return expert_down(z_PRF, h_RF, w2_EDF, weights_TK, *rows, activation)
