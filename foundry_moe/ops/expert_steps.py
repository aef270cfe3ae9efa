"""The four steps of an expert MLP on block-sparse kernels: up and down, forward and backward, as plain functions.

Two ways to compute each: the fused Hopper kernels where they take the operands, otherwise block-sparse products on a
topology with the pointwise part in torch. Knows nothing of autograd.

Shapes: T tokens, K choices, R rows sorted by expert, E experts, D model width, F expert width, P planes (2 for a
GLU: gate, up; else 1).
"""

from __future__ import annotations

import torch
from foundry_moe_kernels import expert_products, permute, products, reference
from foundry_moe_kernels.expert_products import Tokens
from foundry_moe_kernels.topology import Topology, build_topology
from torch import Tensor

# Rows of x gathered for the weights' gradient at a time: halves of the columns above this size. The gather is what
# the peak of the backward pass holds beside the gradients themselves.
_GATHER_BYTES = 128 * 2**20


def _topology(offsets_E: Tensor, rows: int, hidden: int) -> Topology:
    loads_E = torch.diff(offsets_E, prepend=offsets_E.new_zeros(1))
    return build_topology(loads_E, rows, [hidden] * offsets_E.shape[0], 64 if loads_E.is_cuda else 16)


def _weights(w1_EFD: Tensor, v1_EFD: Tensor | None) -> tuple[Tensor, ...]:
    return (w1_EFD,) if v1_EFD is None else (w1_EFD, v1_EFD)


def _tokens(x_TD: Tensor, source_R: Tensor, row_TK: Tensor, weights: tuple[Tensor, ...]) -> Tokens | None:
    """The rows of x for products that gain by copying them themselves; None for others."""
    if _fused(weights) and expert_products.gathers(x_TD, weights[0].shape[1]):
        return Tokens(x_TD=x_TD, source_R=source_R, choices=row_TK.shape[1])
    return None


def up(
    x_TD: Tensor,
    w1_EFD: Tensor,
    v1_EFD: Tensor | None,
    source_R: Tensor,
    row_TK: Tensor,
    offsets_E: Tensor,
    packed: Tensor,
    activation: str,
) -> tuple[Tensor, Tensor]:
    """(z_PRF, h_RF): pre-activations and act(z[0]) (times z[1])."""
    weights = _weights(w1_EFD, v1_EFD)
    rows, hidden = source_R.shape[0], w1_EFD.shape[1]
    if rows == 0:
        return x_TD.new_empty(len(weights), 0, hidden), x_TD.new_empty(0, hidden)
    tokens = _tokens(x_TD, source_R, row_TK, weights)
    if tokens is not None:
        ragged = expert_products.ragged_rows(offsets_E, rows, packed)
        return expert_products.up(tokens, w1_EFD, v1_EFD, ragged, activation)
    x_RD = permute.permute(x_TD, row_TK, offsets_E, rows, zero_tail=False)
    if _fused(weights):
        ragged = expert_products.ragged_rows(offsets_E, rows, packed)
        return expert_products.up(x_RD, w1_EFD, v1_EFD, ragged, activation)
    topology = _topology(offsets_E, rows, hidden)
    z_PRF = torch.stack([products.sdd(x_RD, weight, topology, trans_b=True) for weight in weights])
    return z_PRF, reference.glu(z_PRF.float(), activation).to(z_PRF.dtype)


def down(
    h_RF: Tensor, w2_EDF: Tensor, weights_TK: Tensor | None, row_TK: Tensor, offsets_E: Tensor, packed: Tensor
) -> Tensor:
    """y_TD: the weighted sum of each token's rows of h·W2ᵀ."""
    rows = h_RF.shape[0]
    if rows == 0:
        return h_RF.new_zeros(row_TK.shape[0], w2_EDF.shape[1])
    if _fused((w2_EDF,)):
        ragged = expert_products.ragged_rows(offsets_E, rows, packed)
        y_RD = expert_products.rows_product(h_RF[None], (w2_EDF,), ragged, transposed=True)
    else:
        y_RD = products.dsd(h_RF, w2_EDF, _topology(offsets_E, rows, w2_EDF.shape[2]), trans_b=True)
    return permute.unpermute(y_RD, weights_TK, row_TK)


def down_backward_(
    dy_TD: Tensor,
    z_PRF: Tensor,
    w2_EDF: Tensor,
    weights_TK: Tensor | None,
    source_R: Tensor,
    row_TK: Tensor,
    offsets_E: Tensor,
    packed: Tensor,
    activation: str,
) -> tuple[Tensor, Tensor]:
    """Overwrites z_PRF by its gradient; (dw2_EDF, dweights_TK). Without weights the second is empty."""
    rows = z_PRF.shape[1]
    if rows == 0:
        return torch.zeros_like(w2_EDF), _like_weights(weights_TK, row_TK, dy_TD).zero_()
    dy_RD = permute.permute(dy_TD, row_TK, offsets_E, rows, zero_tail=False)
    if _fused((w2_EDF,)):
        ragged = expert_products.ragged_rows(offsets_E, rows, packed)
        h_RF, dots = expert_products.down_backward_(dy_RD, w2_EDF, z_PRF, ragged, activation, weights_TK, source_R)
        dw2_EDF = expert_products.weight_gradient(dy_RD[None], h_RF, ragged)[0]
    else:
        topology = _topology(offsets_E, rows, w2_EDF.shape[2])
        dh_RF = products.sdd(dy_RD, w2_EDF, topology).float()
        z = z_PRF.float()
        h_RF = reference.glu(z, activation)
        # rows past the end hold nothing, and nothing must come of it
        dots = (dh_RF * h_RF).sum(1)[None] if weights_TK is not None else None
        if weights_TK is not None:
            weight_R1 = weights_TK.float().reshape(-1)[source_R.clamp(min=0).long()][:, None]
            dh_RF, h_RF = dh_RF * weight_R1, h_RF * weight_R1
        z_PRF.copy_(reference.glu_backward(dh_RF, z, activation))
        # h^T dy is W2's gradient transposed: its values are read in place, the result is viewed the other way
        dw2_EFD = products.dsd(h_RF.to(dy_RD.dtype), dy_RD, topology, trans_s=True, stacked=True)
        dw2_EDF = dw2_EFD.mT.contiguous()
    if weights_TK is None:
        return dw2_EDF, _like_weights(weights_TK, row_TK, dy_TD)
    assert dots is not None
    return dw2_EDF, permute.gather_dots(dots, row_TK, weights_TK.dtype)


def _like_weights(weights_TK: Tensor | None, row_TK: Tensor, like: Tensor) -> Tensor:
    if weights_TK is None:
        return like.new_empty(0)
    return torch.empty_like(weights_TK, memory_format=torch.contiguous_format)


def up_backward(
    dz_PRF: Tensor,
    x_TD: Tensor,
    w1_EFD: Tensor,
    v1_EFD: Tensor | None,
    source_R: Tensor,
    row_TK: Tensor,
    offsets_E: Tensor,
    packed: Tensor,
    needs_dx: bool,
) -> tuple[Tensor, Tensor]:
    """(dx_TD, dw_PEFD): gradients of x (empty unless `needs_dx`) and, plane by plane, of W1 and V1."""
    weights = _weights(w1_EFD, v1_EFD)
    rows = dz_PRF.shape[1]
    experts, hidden, width = w1_EFD.shape
    dx_TD = torch.zeros_like(x_TD) if needs_dx and rows == 0 else x_TD.new_empty(0)
    if rows == 0:
        return dx_TD, w1_EFD.new_zeros(len(weights), experts, hidden, width)
    fused = _fused(weights)
    ragged = expert_products.ragged_rows(offsets_E, rows, packed) if fused else None
    topology = None if fused else _topology(offsets_E, rows, hidden)
    copied_RD = None
    if needs_dx:
        if ragged is not None:
            tokens = _tokens(x_TD, source_R, row_TK, weights)
            beside = None
            if tokens is not None and expert_products.copies(tokens):
                copied_RD = x_TD.new_empty(rows, width)
                beside = (tokens, copied_RD)
            dx_RD = expert_products.rows_product(dz_PRF, weights, ragged, transposed=False, beside=beside)
        else:
            assert topology is not None
            parts = [products.dsd(dz, weight, topology).float() for dz, weight in zip(dz_PRF, weights, strict=True)]
            dx_RD = sum(parts[1:], parts[0]).to(x_TD.dtype)
        dx_TD = permute.unpermute(dx_RD, None, row_TK)
        del dx_RD
    dw_PEFD = torch.empty(len(weights), experts, hidden, width, dtype=w1_EFD.dtype, device=w1_EFD.device)
    if ragged is not None and copied_RD is not None:
        expert_products.weight_gradient(dz_PRF, copied_RD, ragged, out=dw_PEFD)
        return dx_TD, dw_PEFD
    halves = 2 if rows * width * x_TD.element_size() > _GATHER_BYTES and width % 512 == 0 else 1
    for part in range(halves):
        columns = slice(part * width // halves, (part + 1) * width // halves)
        x_RD = permute.permute(x_TD[:, columns], row_TK, offsets_E, rows, zero_tail=False)
        if ragged is not None:
            expert_products.weight_gradient(dz_PRF, x_RD, ragged, out=dw_PEFD[..., columns])
        else:
            assert topology is not None
            for plane, dz_RF in enumerate(dz_PRF):
                dw_PEFD[plane, ..., columns] = products.dsd(dz_RF, x_RD, topology, trans_s=True, stacked=True)
        del x_RD  # before the next half is gathered
    return dx_TD, dw_PEFD


def _fused(weights: tuple[Tensor, ...]) -> bool:
    """Whether the Hopper kernels take these weights and activations of their widths."""
    aligned = all(width * weights[0].element_size() % 16 == 0 for width in weights[0].shape[1:])
    return (
        aligned
        and expert_products.supported(*weights)
        and expert_products.descriptors.plane_stride(weights) is not None
    )
