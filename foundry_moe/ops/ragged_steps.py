"""The four steps of an expert MLP on Hopper's ragged grouped kernels, as plain functions; twins of `sparse_steps`.

Knows nothing of autograd.

Shapes: T tokens, K choices, R rows sorted by expert, E experts, D model width, F expert width, P planes (2 for a
GLU: gate, up; else 1).
"""

from __future__ import annotations

import torch
from foundry_moe_kernels import expert_products, permute
from foundry_moe_kernels.expert_products import Tokens
from torch import Tensor

from foundry_moe.ops.sparse_steps import column_parts


def pack(offsets_E: Tensor, rows: int) -> Tensor:
    """The block rows of all products of a layer, int32."""
    return expert_products.pack_rows(offsets_E, rows)


def packed_size(offsets_E: Tensor, rows: int) -> int:
    """Integers of `pack`."""
    return expert_products.packed_size(offsets_E.shape[0], rows)


def _planes(weights: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The weights where one tensor map spans them, which it does not where they lie too far apart: then copies."""
    if expert_products.descriptors.plane_stride(weights) is not None:
        return weights
    return tuple(torch.stack(weights))


def _tokens(x_TD: Tensor, source_R: Tensor, row_TK: Tensor, weights: tuple[Tensor, ...]) -> Tokens | None:
    """The rows of x for products that gain by copying them themselves; None for others."""
    if expert_products.gathers(x_TD, weights[0].shape[1]):
        return Tokens(x_TD=x_TD, source_R=source_R, choices=row_TK.shape[1])
    return None


def up(
    x_TD: Tensor,
    weights: tuple[Tensor, ...],
    source_R: Tensor,
    row_TK: Tensor,
    offsets_E: Tensor,
    packed: Tensor,
    activation: str,
) -> tuple[Tensor, Tensor]:
    """(z_PRF, h_RF): pre-activations and act(z[0]) (times z[1])."""
    rows = source_R.shape[0]
    ragged = expert_products.ragged_rows(offsets_E, rows, packed)
    tokens = _tokens(x_TD, source_R, row_TK, weights)
    x_RD = permute.permute(x_TD, row_TK, offsets_E, rows, zero_tail=False) if tokens is None else tokens
    w1_EFD, *rest = _planes(weights)
    return expert_products.up(x_RD, w1_EFD, rest[0] if rest else None, ragged, activation)


def down(
    h_RF: Tensor, w2_EDF: Tensor, weights_TK: Tensor | None, row_TK: Tensor, offsets_E: Tensor, packed: Tensor
) -> Tensor:
    """y_TD: the weighted sum of each token's rows of h·W2ᵀ."""
    ragged = expert_products.ragged_rows(offsets_E, h_RF.shape[0], packed)
    y_RD = expert_products.rows_product(h_RF[None], (w2_EDF,), ragged, transposed=True)
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
) -> tuple[Tensor, Tensor | None]:
    """Overwrites z_PRF by its gradient; dw2_EDF and, given weights, fp32 [P, R]: the gradient of each row's weight."""
    rows = z_PRF.shape[1]
    dy_RD = permute.permute(dy_TD, row_TK, offsets_E, rows, zero_tail=False)
    ragged = expert_products.ragged_rows(offsets_E, rows, packed)
    h_RF, dots = expert_products.down_backward_(dy_RD, w2_EDF, z_PRF, ragged, activation, weights_TK, source_R)
    return expert_products.weight_gradient(dy_RD[None], h_RF, ragged)[0], dots


def up_backward(
    dz_PRF: Tensor,
    x_TD: Tensor,
    weights: tuple[Tensor, ...],
    source_R: Tensor,
    row_TK: Tensor,
    offsets_E: Tensor,
    packed: Tensor,
    needs_dx: bool,
) -> tuple[Tensor, Tensor]:
    """(dx_TD, dw_PEFD): gradients of x (empty unless `needs_dx`) and, plane by plane, of W1 and V1."""
    rows, width = dz_PRF.shape[1], x_TD.shape[1]
    ragged = expert_products.ragged_rows(offsets_E, rows, packed)
    dx_TD, copied_RD = x_TD.new_empty(0), None
    if needs_dx:
        tokens = _tokens(x_TD, source_R, row_TK, weights)
        beside = None
        if tokens is not None and expert_products.copies(tokens):
            copied_RD = x_TD.new_empty(rows, width)
            beside = (tokens, copied_RD)
        dx_RD = expert_products.rows_product(dz_PRF, _planes(weights), ragged, transposed=False, beside=beside)
        dx_TD = permute.unpermute(dx_RD, None, row_TK)
        del dx_RD
    dw_PEFD = torch.empty(len(weights), *weights[0].shape, dtype=weights[0].dtype, device=weights[0].device)
    if copied_RD is not None:
        expert_products.weight_gradient(dz_PRF, copied_RD, ragged, out=dw_PEFD)
        return dx_TD, dw_PEFD
    for columns in column_parts(rows, x_TD):
        x_RD = permute.permute(x_TD[:, columns], row_TK, offsets_E, rows, zero_tail=False)
        expert_products.weight_gradient(dz_PRF, x_RD, ragged, out=dw_PEFD[..., columns])
        del x_RD  # before the next part is copied
    return dx_TD, dw_PEFD
