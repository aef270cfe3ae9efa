"""One function for the experts of a layer, whichever backend computes them.

Shapes: T tokens, K choices, D model width, F expert width, E experts, H widths of all experts added up.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from foundry_moe.ops.backends import ALIGN, choose_backend
from foundry_moe.ops.blocksparse import expert_down, expert_recompute, expert_up
from foundry_moe.ops.expert_plan import check_kinds, plan_experts
from foundry_moe.ops.lora import Adapters, lora_mlp, supports
from foundry_moe.ops.operators import is_traced
from foundry_moe.ops.permute import PermutePlan, check_planned
from foundry_moe.ops.unfused import POINTWISE, unfused_mlp


class Biases(NamedTuple):
    """The biases of w1, of v1 (None for an MLP) and of w2."""

    w1_EF: Tensor
    v1_EF: Tensor | None
    w2_ED: Tensor


def expert_mlp(
    x_TD: Tensor,
    weights_TK: Tensor | None,
    plan: PermutePlan,
    w1: Tensor,
    v1: Tensor | None,
    w2: Tensor,
    *,
    activation: str,
    backend: str = "auto",
    memory: str = "save",
    biases: Biases | None = None,
    widths: Sequence[int] | None = None,
    adapters: Adapters | None = None,
) -> Tensor:
    """y_TD: for each token the weighted sum of its experts' outputs.

    Expert e computes act(x w1_e^T) w2_e^T or, given `v1`, (act(x w1_e^T) * x v1_e^T) w2_e^T; `biases` are added to
    each product.
    Under autocast, `x_TD` and the weights are cast as they are for a linear layer.

    Args:
        x_TD: [T, D].
        weights_TK: combine weights [T, K], any float dtype; None = all one.
        plan: from `plan_permute`.
        w1, v1: [E, F, D]; v1 None = an MLP without gate.
        w2: [E, D, F].
        activation: a name in `foundry_moe.ops.POINTWISE`.
        backend: auto | blocksparse | grouped | reference.
        memory: save | recompute the activation in the backward pass (blocksparse only).
        biases: of experts of one width.
        widths: of experts of different widths. Then w1, v1 and w2 are [H, D], the rows of expert 0 first, and row j of
            an expert in `w2` is what hidden unit j adds to the output.
        adapters: LoRA, of frozen weights of experts of one width (see `foundry_moe.ops.lora`).

    Raises:
        ValueError: shapes that do not fit, an unknown activation, a backend that cannot run here.
    """
    weights = (w1, v1, w2)
    _check(x_TD, weights_TK, plan, weights, activation, backend, widths, adapters)
    columns = x_TD.shape[1]
    if biases is not None:
        _check_biases(weights, biases)
        x_TD, weights = _with_ones(x_TD), _with_biases(weights, biases)
        adapters = None if adapters is None else adapters.padded(ALIGN)
    device_type = x_TD.device.type
    autocast = torch.is_autocast_enabled(device_type) and x_TD.dtype is not torch.float64
    if autocast:
        x_TD = x_TD.to(torch.get_autocast_dtype(device_type))
    dtype = x_TD.dtype
    backend = choose_backend(backend, x_TD.device, dtype)
    aligned = all(width % ALIGN == 0 for width in (x_TD.shape[1], weights[2].shape[-1], *(widths or ())))
    read, copied = weights, False  # read: by products
    if autocast:
        # kernels write the gradients of fp32 weights in fp32 themselves
        copied = backend == "blocksparse" and adapters is None and aligned
        copied = copied and weights[0].dtype is weights[2].dtype is torch.float32 and dtype is not torch.float32
        cast = [None if w is None else (w.detach() if copied else w).to(dtype) for w in weights]
        read = (cast[0], cast[1], cast[2])  # type: ignore[assignment]
        weights = weights if copied else read
    if backend != "blocksparse" or adapters is not None:
        if adapters is not None:
            check_kinds(x_TD, *weights)
        with torch.autocast(device_type, enabled=False) if autocast else nullcontext():
            if backend == "blocksparse" and adapters is not None and supports(x_TD, weights, adapters):
                y_TD = lora_mlp(x_TD, weights_TK, plan, weights, adapters, activation=activation, memory=memory)
            else:
                y_TD = unfused_mlp(
                    x_TD, weights_TK, plan, weights,
                    activation=activation, backend=backend, widths=widths, adapters=adapters, memory=memory,
                )  # fmt: skip
    else:
        copies = read if copied else (None, None, None)
        if not aligned:
            x_TD = F.pad(x_TD, (0, -x_TD.shape[1] % ALIGN))
            weights, widths = _padded(weights, widths)
            read = weights
        # permutes inside, so that the backward pass saves x alone
        shared = plan_experts(x_TD, plan, read, widths=widths, activation=activation, memory=memory)
        w1, v1, w2 = weights
        if memory == "recompute":
            y_TD = expert_recompute(x_TD, w1, v1, None, w2, weights_TK, shared, *copies)
        else:
            traced = is_traced(x_TD)
            z_YW, h_W = (expert_up if traced else expert_up.eager)(x_TD, w1, v1, None, shared, *copies[:2])
            y_TD = (expert_down if traced else expert_down.eager)(z_YW, h_W, w2, weights_TK, shared, copies[2])
    if y_TD.shape[1] != columns:
        y_TD = y_TD[:, :columns]
    return y_TD if biases is None else y_TD + _last_biases(biases.w2_ED, weights_TK, plan).to(y_TD.dtype)


def packed_mlp(
    x_TD: Tensor,
    weights_TK: Tensor | None,
    plan: PermutePlan,
    w1: Tensor,
    w2: Tensor,
    *,
    activation: str,
    gate_up: str | None,
    biases: tuple[Tensor, Tensor] | None = None,
    memory: str = "save",
) -> Tensor:
    """The same for weights as most published models keep them, on backend blocksparse: gate and up in one tensor.

    Weights are read, and their gradients written, as they lie in memory: contiguous, or `.mT` of a contiguous tensor.

    Args:
        w1: [E, 2 F, D], gate and up; without a gate [E, F, D].
        w2: [E, D, F].
        activation: a name in `foundry_moe.ops.POINTWISE`, or with a gate a name and three numbers: `silu ALPHA LIMIT
            SHIFT` is g * sigmoid(ALPHA g) * (u + SHIFT) with the gate g at most LIMIT and u within +-LIMIT (0: none).
        gate_up: rows of w1: concatenated (gate first) | interleaved (gate, up, gate, ...); None = there is no gate.
        biases: of w1 (as its rows are) and of w2, [E, 2 F] and [E, D].

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, or an unknown activation or `gate_up`.
    """
    _check(x_TD, weights_TK, plan, (w1, None, w2), activation.split()[0], "blocksparse", gate_up=gate_up)
    if gate_up not in (None, "concatenated", "interleaved"):
        raise ValueError(f"gate_up ({gate_up!r}) must be concatenated, interleaved or None")
    choose_backend("blocksparse", x_TD.device, x_TD.dtype)
    bias_EF, bias_ED = biases or (None, None)
    if bias_ED is not None:
        _check_biases((w1, None, w2), (bias_EF, None, bias_ED))
        check_kinds(x_TD, w1, None, w2, bias_ED)
    shared = plan_experts(
        x_TD, plan, (w1, None, w2), widths=None, activation=activation, memory=memory, gate_up=gate_up, bias_EF=bias_EF
    )
    if memory == "recompute":
        y_TD = expert_recompute(x_TD, w1, None, bias_EF, w2, weights_TK, shared, None, None, None)
    else:
        z_YW, h_W = expert_up(x_TD, w1, None, bias_EF, shared, None, None)
        y_TD = expert_down(z_YW, h_W, w2, weights_TK, shared, None)
    return y_TD if bias_ED is None else y_TD + _last_biases(bias_ED, weights_TK, plan)


def _check(
    x_TD: Tensor,
    weights_TK: Tensor | None,
    plan: PermutePlan,
    weights: tuple[Tensor, Tensor | None, Tensor],
    activation: str,
    backend: str,
    widths: Sequence[int] | None = None,
    adapters: Adapters | None = None,
    gate_up: str | None = None,
) -> None:
    w1, v1, w2 = weights
    check_planned("x_TD", x_TD, plan.row_TK.shape[0], weights_TK, plan)
    experts = w1.shape[0] if widths is None else len(widths)
    if widths is not None:
        if adapters is not None:
            raise ValueError(f"adapters are for experts of one width, not of {list(widths)}")
        if w1.shape != (sum(widths), x_TD.shape[1]):
            raise ValueError(
                f"w1 {tuple(w1.shape)} must be {(sum(widths), x_TD.shape[1])} to fit x_TD {tuple(x_TD.shape)} and "
                f"experts of widths {list(widths)}"
            )
        if backend == "grouped":
            raise ValueError("backend (grouped) computes experts of one width: use auto, blocksparse or reference")
        second = tuple(w1.shape)
    else:
        second = (experts, w1.shape[2], w1.shape[1] // (2 if gate_up else 1))
        if x_TD.shape[1] != w1.shape[2]:
            raise ValueError(f"x_TD {tuple(x_TD.shape)} must be [tokens, {w1.shape[2]}] to fit w1 {tuple(w1.shape)}")
    if w2.shape != second:
        raise ValueError(f"w2 {tuple(w2.shape)} must be {second} to fit w1 {tuple(w1.shape)}")
    if v1 is not None and v1.shape != w1.shape:
        raise ValueError(f"v1 {tuple(v1.shape)} must have the shape of w1, {tuple(w1.shape)}")
    if plan.num_experts != experts:
        raise ValueError(f"the plan is for {plan.num_experts} experts, the weights for {experts}")
    if activation not in POINTWISE:
        raise ValueError(f"activation {activation!r} is not one of {', '.join(POINTWISE)}")


def _check_biases(
    weights: tuple[Tensor, Tensor | None, Tensor], biases: tuple[Tensor | None, Tensor | None, Tensor]
) -> None:
    for name, weight, bias in zip(("w1", "v1", "w2"), weights, biases, strict=True):
        needed = None if weight is None else weight.shape[:2]
        found = None if bias is None else bias.shape
        if found != needed:
            raise ValueError(f"the bias of {name} must be {needed and list(needed)}, not {found and list(found)}")


def _padded(
    weights: tuple[Tensor, Tensor | None, Tensor], widths: Sequence[int] | None
) -> tuple[tuple[Tensor, Tensor | None, Tensor], list[int] | None]:
    """The weights with zeros up to widths that `ALIGN` divides, and these widths.

    One copy per pass: otherwise kernels would move single elements, which took 8.1 times as long as a dense FFN (H200).
    """

    def padded(weight: Tensor) -> Tensor:
        if widths is None:
            return F.pad(weight, (0, -weight.shape[2] % ALIGN, 0, -weight.shape[1] % ALIGN))
        parts = weight.split(list(widths))
        return torch.cat([F.pad(part, (0, -part.shape[1] % ALIGN, 0, -part.shape[0] % ALIGN)) for part in parts])

    w1, v1, w2 = weights
    wide = None if widths is None else [width + -width % ALIGN for width in widths]
    return (padded(w1), None if v1 is None else padded(v1), padded(w2)), wide


# Biases are added around products that have none, so that each backend supports them. Tokens get a column of
# ones, and each matrix its bias as the column that meets it. Copying the matrices costs their size once per forward and
# once per backward pass: biases are for models that have them, not for speed.


def _with_ones(x_TD: Tensor) -> Tensor:
    """[T, D + ALIGN]: a one, then zeros."""
    columns = x_TD.new_zeros(x_TD.shape[0], ALIGN)
    columns[:, 0] = 1
    return torch.cat([x_TD, columns], dim=1)


def _with_biases(weights: tuple[Tensor, Tensor | None, Tensor], biases: Biases) -> tuple[Tensor, Tensor | None, Tensor]:
    """w1, v1 [E, F, D + ALIGN], whose biases meet the ones, and w2 [E, D + ALIGN, F]: outputs are as wide as inputs."""
    w1_EFD, v1_EFD, w2_EDF = weights

    def with_column(weight_EFD: Tensor, bias_EF: Tensor) -> Tensor:
        column = F.pad(bias_EF[..., None].to(weight_EFD.dtype), (0, ALIGN - 1))
        return torch.cat([weight_EFD, column], dim=2)

    return (
        with_column(w1_EFD, biases.w1_EF),
        None if v1_EFD is None or biases.v1_EF is None else with_column(v1_EFD, biases.v1_EF),
        F.pad(w2_EDF, (0, 0, 0, ALIGN)),
    )


def _last_biases(w2_ED: Tensor, weights_TK: Tensor | None, plan: PermutePlan) -> Tensor:
    """[T, D]: for each token the weighted sum of its experts' last biases."""
    chosen_TK = (plan.row_TK >= 0) & (plan.experts_TK >= 0)
    weights_TK = torch.ones_like(chosen_TK, dtype=w2_ED.dtype) if weights_TK is None else weights_TK
    weights_TK = weights_TK.masked_fill(~chosen_TK, 0)
    index_TK = plan.experts_TK.long().clamp(min=0)
    shares_TE = weights_TK.new_zeros(index_TK.shape[0], w2_ED.shape[0]).scatter_add(1, index_TK, weights_TK)
    return shares_TE.to(w2_ED.dtype) @ w2_ED
