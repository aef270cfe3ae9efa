"""The expert MLP as custom operators on the block-sparse kernels, with gradients.

Custom operators, so that `torch.compile` sees each as one node with known shapes; the same steps as plain autograd
functions where nothing compiles. Two nodes in the graph: the first (up) keeps x, the second (down) the pre-activations
z, which its backward turns into their own gradient in place and hands on; so z is gone before the first node's
gradients are allocated. A second backward through the same graph (`retain_graph`) is therefore refused by autograd's
version check. With `memory: recompute` there is one node that keeps x alone and computes z again.

Shapes: T tokens, K choices, R rows, E experts, D model width, F expert width, P planes (gate, up).
"""

from __future__ import annotations

import os
from typing import Any

import torch
from foundry_moe_kernels import expert_products
from torch import Tensor

from foundry_moe.ops import expert_steps as steps
from foundry_moe.ops.routes import Routes

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


@torch.library.custom_op("foundry_moe::expert_up", mutates_args=())
def expert_up(
    x_TD: Tensor, w1_EFD: Tensor, v1_EFD: Tensor | None, row_TK: Tensor, offsets_E: Tensor, rows: int, activation: str
) -> tuple[Tensor, Tensor]:
    """z_PRF, h_RF: see `expert_steps.up`."""
    return steps.up(x_TD.contiguous(), w1_EFD.contiguous(), _contiguous(v1_EFD), row_TK, offsets_E, rows, activation)


@expert_up.register_fake
def _(x_TD, w1_EFD, v1_EFD, row_TK, offsets_E, rows, activation):  # type: ignore[no-untyped-def]
    planes, hidden = 1 if v1_EFD is None else 2, w1_EFD.shape[1]
    return x_TD.new_empty(planes, rows, hidden), x_TD.new_empty(rows, hidden)


@torch.library.custom_op("foundry_moe::expert_up_backward", mutates_args=())
def expert_up_backward(
    dz_PRF: Tensor,
    x_TD: Tensor,
    w1_EFD: Tensor,
    v1_EFD: Tensor | None,
    row_TK: Tensor,
    offsets_E: Tensor,
    needs_dx: bool,
) -> tuple[Tensor, Tensor]:
    """dx_TD (empty unless needed), dw_PEFD: see `expert_steps.up_backward`."""
    return steps.up_backward(
        dz_PRF.contiguous(),
        x_TD.contiguous(),
        w1_EFD.contiguous(),
        _contiguous(v1_EFD),
        row_TK,
        offsets_E,
        needs_dx,
    )


@expert_up_backward.register_fake
def _(dz_PRF, x_TD, w1_EFD, v1_EFD, row_TK, offsets_E, needs_dx):  # type: ignore[no-untyped-def]
    dx_TD = torch.empty_like(x_TD, memory_format=torch.contiguous_format) if needs_dx else x_TD.new_empty(0)
    return dx_TD, w1_EFD.new_empty(dz_PRF.shape[0], *w1_EFD.shape)


@torch.library.custom_op("foundry_moe::expert_down", mutates_args=())
def expert_down(
    z_PRF: Tensor,
    h_RF: Tensor,
    w2_EDF: Tensor,
    weights_TK: Tensor | None,
    source_R: Tensor,
    row_TK: Tensor,
    offsets_E: Tensor,
    activation: str,
) -> Tensor:
    """y_TD. Takes z_PRF for the backward pass alone: h_RF is a function of it."""
    return steps.down(h_RF, w2_EDF.contiguous(), _contiguous(weights_TK), row_TK, offsets_E)


@expert_down.register_fake
def _(z_PRF, h_RF, w2_EDF, weights_TK, source_R, row_TK, offsets_E, activation):  # type: ignore[no-untyped-def]
    return h_RF.new_empty(row_TK.shape[0], w2_EDF.shape[1])


@torch.library.custom_op("foundry_moe::expert_down_backward_", mutates_args=("z_PRF",))
def expert_down_backward_(
    dy_TD: Tensor,
    z_PRF: Tensor,
    w2_EDF: Tensor,
    weights_TK: Tensor | None,
    source_R: Tensor,
    row_TK: Tensor,
    offsets_E: Tensor,
    activation: str,
) -> tuple[Tensor, Tensor]:
    """dw2_EDF, dweights_TK (empty without weights); z_PRF becomes its gradient: see `expert_steps.down_backward_`."""
    return steps.down_backward_(
        dy_TD.contiguous(),
        z_PRF,
        w2_EDF.contiguous(),
        _contiguous(weights_TK),
        source_R,
        row_TK,
        offsets_E,
        activation,
    )


@expert_down_backward_.register_fake
def _(dy_TD, z_PRF, w2_EDF, weights_TK, source_R, row_TK, offsets_E, activation):  # type: ignore[no-untyped-def]
    dweights = dy_TD.new_empty(0) if weights_TK is None else weights_TK.new_empty(weights_TK.shape)
    return w2_EDF.new_empty(w2_EDF.shape), dweights


def _save_up(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x_TD, w1_EFD, v1_EFD, row_TK, offsets_E, _, _ = inputs
    ctx.set_materialize_grads(False)  # h's gradient never comes: its use hands it to z
    ctx.save_for_backward(x_TD, w1_EFD, v1_EFD, row_TK, offsets_E)


def _up_backward(ctx: Any, dz_PRF: Tensor | None, dh_RF: Tensor | None) -> tuple[Tensor | None, ...]:
    assert dh_RF is None, "h has no gradient of its own"
    if dz_PRF is None:
        return (None,) * 7
    x_TD, w1_EFD, v1_EFD, row_TK, offsets_E = ctx.saved_tensors
    needs_dx = ctx.needs_input_grad[0]
    dx_TD, dw_PEFD = _of(ctx).up_backward(dz_PRF, x_TD, w1_EFD, v1_EFD, row_TK, offsets_E, needs_dx)
    dv1_EFD = None if v1_EFD is None else dw_PEFD[1]
    return dx_TD if needs_dx else None, dw_PEFD[0], dv1_EFD, None, None, None, None


def _save_down(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    z_PRF, _, w2_EDF, weights_TK, source_R, row_TK, offsets_E, activation = inputs
    ctx.activation = activation
    ctx.save_for_backward(z_PRF, w2_EDF, weights_TK, source_R, row_TK, offsets_E)


def _down_backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor | None, ...]:
    z_PRF, w2_EDF, weights_TK, source_R, row_TK, offsets_E = ctx.saved_tensors
    dz_PRF = z_PRF.detach()  # the same memory and version: what autograd kept is now the gradient
    dw2_EDF, dweights_TK = _of(ctx).down_backward_(
        dy_TD, dz_PRF, w2_EDF, weights_TK, source_R, row_TK, offsets_E, ctx.activation
    )
    return dz_PRF, None, dw2_EDF, None if weights_TK is None else dweights_TK, None, None, None, None


@torch.library.custom_op("foundry_moe::expert_mlp", mutates_args=())
def expert_mlp(
    x_TD: Tensor,
    w1_EFD: Tensor,
    v1_EFD: Tensor | None,
    w2_EDF: Tensor,
    weights_TK: Tensor | None,
    source_R: Tensor,
    row_TK: Tensor,
    offsets_E: Tensor,
    activation: str,
) -> Tensor:
    """y_TD in one node that keeps no pre-activations."""
    _, h_RF = expert_up(x_TD, w1_EFD, v1_EFD, row_TK, offsets_E, source_R.shape[0], activation)
    return steps.down(h_RF, w2_EDF.contiguous(), _contiguous(weights_TK), row_TK, offsets_E)


@expert_mlp.register_fake
def _(x_TD, w1_EFD, v1_EFD, w2_EDF, weights_TK, source_R, row_TK, offsets_E, activation):  # type: ignore[no-untyped-def]
    return x_TD.new_empty(row_TK.shape[0], w2_EDF.shape[1])


def _save_mlp(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.activation = inputs[-1]
    ctx.save_for_backward(*inputs[:-1])


def _mlp_backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor | None, ...]:
    x_TD, w1_EFD, v1_EFD, w2_EDF, weights_TK, source_R, row_TK, offsets_E = ctx.saved_tensors
    use = _of(ctx)
    z_PRF, h_RF = use.up(x_TD, w1_EFD, v1_EFD, row_TK, offsets_E, source_R.shape[0], ctx.activation)
    del h_RF
    dw2_EDF, dweights_TK = use.down_backward_(
        dy_TD, z_PRF, w2_EDF, weights_TK, source_R, row_TK, offsets_E, ctx.activation
    )
    needs_dx = ctx.needs_input_grad[0]
    dx_TD, dw_PEFD = use.up_backward(z_PRF, x_TD, w1_EFD, v1_EFD, row_TK, offsets_E, needs_dx)
    dv1_EFD = None if v1_EFD is None else dw_PEFD[1]
    dweights = None if weights_TK is None else dweights_TK
    return dx_TD if needs_dx else None, dw_PEFD[0], dv1_EFD, dw2_EDF, dweights, None, None, None, None


expert_up.register_autograd(_up_backward, setup_context=_save_up)
expert_down.register_autograd(_down_backward, setup_context=_save_down)
expert_mlp.register_autograd(_mlp_backward, setup_context=_save_mlp)


class _Operators:
    """The steps as nodes that `torch.compile` sees."""

    up = staticmethod(expert_up)
    up_backward = staticmethod(expert_up_backward)
    down_backward_ = staticmethod(expert_down_backward_)


class _Eager:
    """The steps themselves: under a profiler the dispatch of operators is the host's largest expense in a step."""

    @staticmethod
    def up(*args: Any) -> tuple[Tensor, Tensor]:
        return expert_up._init_fn(*args)

    @staticmethod
    def up_backward(*args: Any) -> tuple[Tensor, Tensor]:
        return expert_up_backward._init_fn(*args)

    @staticmethod
    def down_backward_(*args: Any) -> tuple[Tensor, Tensor]:
        torch.autograd.graph.increment_version(args[1])  # as the operator does
        return expert_down_backward_._init_fn(*args)


def _of(ctx: Any) -> type[_Operators] | type[_Eager]:
    return _Eager if getattr(ctx, "eager", False) else _Operators


class _Up(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        ctx.eager = True
        z_PRF, h_RF = _Eager.up(*inputs)
        _save_up(ctx, inputs, None)
        ctx.mark_non_differentiable(h_RF)
        return z_PRF, h_RF

    backward = staticmethod(_up_backward)


class _Down(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        ctx.eager = True
        _save_down(ctx, inputs, None)
        return expert_down._init_fn(*inputs)

    backward = staticmethod(_down_backward)


class _Mlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        ctx.eager = True
        _save_mlp(ctx, inputs, None)
        x_TD, w1_EFD, v1_EFD, w2_EDF, weights_TK, source_R, row_TK, offsets_E, activation = inputs
        _, h_RF = _Eager.up(x_TD, w1_EFD, v1_EFD, row_TK, offsets_E, source_R.shape[0], activation)
        return steps.down(h_RF, w2_EDF.contiguous(), _contiguous(weights_TK), row_TK, offsets_E)

    backward = staticmethod(_mlp_backward)


def is_available(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernels run here: fp32, fp16 or bf16 on CUDA, or anywhere in Triton's interpreter (no bf16 there)."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return dtype in (torch.float32, torch.float16)
    return device.type == "cuda" and dtype in _DTYPES


def is_fast(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the fused kernels run here: 16-bit floats on Hopper with a Triton that has tensor descriptors."""
    return (
        dtype in (torch.float16, torch.bfloat16)
        and device.type == "cuda"
        and expert_products.descriptors.device_supported(device)
    )


def routed_mlp(
    x_TD: Tensor,
    weights_TK: Tensor | None,
    routes: Routes,
    w1_EFD: Tensor,
    v1_EFD: Tensor | None,
    w2_EDF: Tensor,
    activation: str,
    memory: str,
) -> Tensor:
    """y_TD: what `foundry_moe.ops.routed_mlp` says, for operands it has checked.

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
    places = (routes.source_R, routes.row_TK, routes.offsets_E)
    compiling = torch.compiler.is_compiling()
    if memory == "recompute":
        mlp = expert_mlp if compiling else _Mlp.apply
        return mlp(x_TD, w1_EFD, v1_EFD, w2_EDF, weights_TK, *places, activation)
    up, down = (expert_up, expert_down) if compiling else (_Up.apply, _Down.apply)
    z_PRF, h_RF = up(x_TD, w1_EFD, v1_EFD, *places[1:], routes.num_rows, activation)
    return down(z_PRF, h_RF, w2_EDF, weights_TK, *places, activation)
