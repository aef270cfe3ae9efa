"""Experts of different widths: the expert MLP over weights that lie side by side, on SDD, DSD, DDS or in plain torch.

One node in the graph. It keeps x and the pre-activations z, which its backward turns into their own gradient in place
(a second one is refused), or with `memory: recompute` x alone.

Shapes: T tokens, K choices, R rows sorted by expert, E experts, D model width, H widths of all experts added up, V
values of a sparse matrix (rows as wide as their expert), P planes (gate, up).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from foundry_moe_kernels import mixed_widths, permute, products
from foundry_moe_kernels.topology import Topology, pack_topology, packed_topology_size, unpack_topology
from torch import Tensor
from torch.nn import functional as F

from foundry_moe.ops import compile_ahead as ahead
from foundry_moe.ops.activations import POINTWISE
from foundry_moe.ops.mlp import choose_backend
from foundry_moe.ops.operators import differentiable, operator, take_saved
from foundry_moe.ops.permute import PermutePlan, plan_permute
from foundry_moe.ops.permute import permute as permute_rows
from foundry_moe.ops.permute import unpermute as unpermute_rows
from foundry_moe.ops.sparse_steps import allow_tf32, block_of


@operator(
    "mixed_pack",
    lambda offsets_E, rows, widths: offsets_E.new_empty(packed_topology_size(rows, widths, block_of(offsets_E.device))),
)
def _pack(offsets_E: Tensor, rows: int, widths: Sequence[int]) -> Tensor:
    """The topology's tables, int32, for the products of both directions."""
    return pack_topology(offsets_E, rows, list(widths), block_of(offsets_E.device))


def _topology(packed: Tensor, rows: int, widths: Sequence[int]) -> Topology:
    return unpack_topology(packed, rows, list(widths), block_of(packed.device))


def _planes(w1_HD: Tensor, v1_HD: Tensor | None) -> tuple[Tensor, ...]:
    return (w1_HD.contiguous(),) if v1_HD is None else (w1_HD.contiguous(), v1_HD.contiguous())


def _up(
    x_TD: Tensor, planes: tuple[Tensor, ...], topology: Topology, source_R: Tensor, choices: int, activation: str
) -> tuple[Tensor, Tensor]:
    """z_PV, h_V."""
    return products.sdd_act(
        x_TD.contiguous(), planes, topology, activation, source_R=source_R, choices=choices, tf32=allow_tf32()
    )


def _fake_forward(x_TD, w1_HD, v1_HD, w2_HD, weights_TK, source_R, row_TK, offsets_E, packed, widths, activation, keep):  # type: ignore[no-untyped-def]
    values = source_R.shape[0] * max(widths) if keep else 0
    return x_TD.new_empty(row_TK.shape[0], x_TD.shape[1]), x_TD.new_empty(1 if v1_HD is None else 2, values)


@operator("mixed_mlp", _fake_forward)
def _forward(
    x_TD: Tensor,
    w1_HD: Tensor,
    v1_HD: Tensor | None,
    w2_HD: Tensor,
    weights_TK: Tensor | None,
    source_R: Tensor,
    row_TK: Tensor,
    offsets_E: Tensor,
    packed: Tensor,
    widths: Sequence[int],
    activation: str,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    """y_TD and z_PV, which is empty unless it is to be kept."""
    planes, rows = _planes(w1_HD, v1_HD), source_R.shape[0]
    if rows == 0:
        return x_TD.new_zeros(row_TK.shape[0], x_TD.shape[1]), x_TD.new_empty(len(planes), 0)
    _compile_ahead(x_TD, w1_HD, v1_HD, w2_HD, weights_TK, row_TK.shape[1], tuple(widths), activation)
    topology = _topology(packed, rows, widths)
    z_PV, h_V = _up(x_TD, planes, topology, source_R, row_TK.shape[1], activation)
    y_RD = products.dsd(h_V, w2_HD.contiguous(), topology, tf32=allow_tf32(), zero_tail=False)
    y_TD = permute.unpermute(y_RD, None if weights_TK is None else weights_TK.contiguous(), row_TK)
    return y_TD, z_PV if keep else z_PV.new_empty(len(planes), 0)


def _fake_backward(dy_TD, z_PV, x_TD, w1_HD, v1_HD, w2_HD, weights_TK, *_):  # type: ignore[no-untyped-def]
    def like(tensor):  # type: ignore[no-untyped-def]
        return x_TD.new_empty(0) if tensor is None else tensor.new_empty(tensor.shape)

    return like(x_TD), like(w1_HD), like(v1_HD), like(w2_HD), like(weights_TK)


@operator("mixed_mlp_backward_", _fake_backward, mutates="z_PV")
def _backward_(
    dy_TD: Tensor,
    z_PV: Tensor,
    x_TD: Tensor,
    w1_HD: Tensor,
    v1_HD: Tensor | None,
    w2_HD: Tensor,
    weights_TK: Tensor | None,
    source_R: Tensor,
    row_TK: Tensor,
    offsets_E: Tensor,
    packed: Tensor,
    widths: Sequence[int],
    activation: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, w1, v1, w2 and the combine weights; empty for what is not there. z_PV becomes its gradient."""
    planes, rows = _planes(w1_HD, v1_HD), source_R.shape[0]
    none = x_TD.new_empty(0)
    if rows == 0:
        zeros = [none if t is None else torch.zeros_like(t) for t in (x_TD, w1_HD, v1_HD, w2_HD, weights_TK)]
        return zeros[0], zeros[1], zeros[2], zeros[3], zeros[4]
    topology = _topology(packed, rows, widths)
    if not z_PV.numel():
        z_PV = _up(x_TD, planes, topology, source_R, row_TK.shape[1], activation)[0]
    weights = None if weights_TK is None else weights_TK.contiguous()
    dy_RD = permute.permute(dy_TD.contiguous(), row_TK, offsets_E, rows, zero_tail=False)
    # dh, and then h in its place
    h_V = products.sdd(dy_RD, w2_HD.contiguous(), topology, trans_b=True, tf32=allow_tf32(), zero_tail=False)
    dots = mixed_widths.activation_backward_(h_V, z_PV, topology, activation, weights, source_R)
    dz_PV = z_PV  # the same memory
    dw2_HD = products.dsd(h_V, dy_RD, topology, trans_s=True, tf32=allow_tf32())
    del h_V, dy_RD
    dx_RD = products.dsd(tuple(dz_PV), planes, topology, tf32=allow_tf32(), zero_tail=False)
    dx_TD = permute.unpermute(dx_RD, None, row_TK)
    del dx_RD
    x_RD = permute.permute(x_TD.contiguous(), row_TK, offsets_E, rows, zero_tail=False)
    dw_P = [products.dsd(dz_V, x_RD, topology, trans_s=True, tf32=allow_tf32()) for dz_V in dz_PV]
    dweights = none
    if weights_TK is not None:
        assert dots is not None
        dweights = permute.gather_dots(dots, row_TK, weights_TK.dtype)
    return dx_TD, dw_P[0], none if v1_HD is None else dw_P[1], dw2_HD, dweights


def _compile_ahead(
    x_TD: Tensor,
    w1_HD: Tensor,
    v1_HD: Tensor | None,
    w2_HD: Tensor,
    weights_TK: Tensor | None,
    choices: int,
    widths: tuple[int, ...],
    activation: str,
) -> None:
    """What `compile_ahead` does for experts of one width. All experts take part: tiles depend on every width."""
    weights_dtype = None if weights_TK is None else weights_TK.dtype
    kind = (x_TD.device, x_TD.dtype, weights_dtype, v1_HD is None, x_TD.shape[1], choices, widths, activation)
    experts = len(widths)

    def prepare() -> Callable[[], None]:
        # kernels differ by whether the second plane of values begins at a multiple of 16 bytes: if rows do, always
        some = (ahead.TOKENS,) if max(widths) * x_TD.itemsize % 16 == 0 else (ahead.TOKENS, ahead.TOKENS - 1)
        runs = [prepare_one(tokens) for tokens in some]

        def run() -> None:
            for run_one in runs:
                run_one()

        return run

    def prepare_one(tokens: int) -> Callable[[], None]:
        plan = plan_permute(ahead.choices_of(tokens * choices, choices, experts, x_TD.device), experts)
        x = x_TD.new_zeros(tokens, x_TD.shape[1])
        weights = None if weights_TK is None else weights_TK.new_ones(tokens, choices)
        rows = (plan.source_R, plan.row_TK, plan.offsets_E, _pack(plan.offsets_E, plan.num_rows, widths), widths)

        def run() -> None:
            y_TD, z_PV = _forward(x, w1_HD, v1_HD, w2_HD, weights, *rows, activation, True)
            _backward_(y_TD, z_PV, x, w1_HD, v1_HD, w2_HD, weights, *rows, activation)

        return run

    ahead.run_once(kind, x_TD.device, experts, choices, prepare)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    *tensors, ctx.widths, ctx.activation, _ = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(output[1], *tensors)


def _gradient(ctx: Any, dy_TD: Tensor | None, dz_PV: Tensor | None) -> tuple[Tensor | None, ...]:
    if dy_TD is None:
        return (None,) * 12
    z_PV, x_TD, w1_HD, v1_HD, w2_HD, weights_TK, *rows = take_saved(ctx)
    # what autograd kept becomes the gradient; nothing was kept to recompute from
    z_PV = z_PV.detach() if z_PV.numel() else torch.empty_like(z_PV)
    dx, dw1, dv1, dw2, dweights = _backward_(
        dy_TD, z_PV, x_TD, w1_HD, v1_HD, w2_HD, weights_TK, *rows, ctx.widths, ctx.activation
    )
    return dx, dw1, None if v1_HD is None else dv1, dw2, None if weights_TK is None else dweights, *(None,) * 7


_mixed = differentiable(_forward, _save, _gradient)


@torch.compiler.disable  # sizes come from the data: not for a compiled graph
def _reference(
    x_RD: Tensor,
    plan: PermutePlan,
    w1_HD: Tensor,
    v1_HD: Tensor | None,
    w2_HD: Tensor,
    widths: Sequence[int],
    activation: str,
) -> Tensor:
    """y_RD: each expert's MLP on its own rows; rows past the end are zeros."""
    act = POINTWISE[activation]
    loads = plan.tokens_per_expert_E.tolist()
    rows = x_RD.split([*loads, x_RD.shape[0] - sum(loads)])
    w1, w2 = w1_HD.split(list(widths)), w2_HD.split(list(widths))
    v1 = v1_HD.split(list(widths)) if v1_HD is not None else None
    outputs = []
    for e, x_rD in enumerate(rows[:-1]):
        h_rF = act(F.linear(x_rD, w1[e]))
        if v1 is not None:
            h_rF = h_rF * F.linear(x_rD, v1[e])
        outputs.append(h_rF @ w2[e])
    outputs.append(torch.zeros_like(rows[-1]))
    return torch.cat(outputs)


def mixed_mlp(
    x_TD: Tensor,
    weights_TK: Tensor | None,
    plan: PermutePlan,
    w1_HD: Tensor,
    v1_HD: Tensor | None,
    w2_HD: Tensor,
    *,
    widths: Sequence[int],
    activation: str,
    backend: str = "auto",
    memory: str = "save",
) -> Tensor:
    """y_TD: for each token the weighted sum of its experts' outputs, as `expert_mlp`; experts differ in width.

    Args:
        w1_HD, v1_HD, w2_HD: [H, D], the rows of expert 0 first. Row j of an expert in `w2_HD` is what hidden unit j
            adds to the output.
        widths: rows of each expert; they add up to H.
        backend: auto | blocksparse | reference.

    Raises:
        ValueError: shapes that do not fit, or a backend that cannot run here or knows one width only.
    """
    if w1_HD.shape != (sum(widths), x_TD.shape[-1]) or w2_HD.shape != w1_HD.shape or len(widths) != plan.num_experts:
        raise ValueError(
            f"w1_HD {tuple(w1_HD.shape)} and w2_HD {tuple(w2_HD.shape)} must be [{sum(widths)}, {x_TD.shape[-1]}] for "
            f"experts of widths {list(widths)}, and the plan (of {plan.num_experts} experts) for as many"
        )
    if backend == "grouped":
        raise ValueError("backend (grouped) computes experts of one width: use auto, blocksparse or reference")
    device_type = x_TD.device.type
    if torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
        x_TD, w1_HD, w2_HD = x_TD.to(dtype), w1_HD.to(dtype), w2_HD.to(dtype)
        v1_HD = v1_HD.to(dtype) if v1_HD is not None else None
        with torch.autocast(device_type, enabled=False):
            return mixed_mlp(
                x_TD, weights_TK, plan, w1_HD, v1_HD, w2_HD,
                widths=widths, activation=activation, backend=backend, memory=memory,
            )  # fmt: skip
    if choose_backend(backend, x_TD.device, x_TD.dtype) == "reference":
        y_RD = _reference(permute_rows(x_TD, plan), plan, w1_HD, v1_HD, w2_HD, widths, activation)
        return unpermute_rows(y_RD, weights_TK, plan)
    packed = _pack(plan.offsets_E, plan.num_rows, list(widths))
    rows = (plan.source_R, plan.row_TK, plan.offsets_E, packed, list(widths))
    return _mixed(x_TD, w1_HD, v1_HD, w2_HD, weights_TK, *rows, activation, memory == "save")[0]
