"""The four steps of an expert MLP on block-sparse kernels: up and down, forward and backward, as plain functions.

Two ways to compute each: ragged grouped kernels where Hopper's take the operands (`hopper`), otherwise SDD, DSD and DDS
over the hybrid CSR-COO topology, on any chip. Knows nothing of autograd.

Shapes: T tokens, K choices, R rows sorted by expert, E experts, D model width, F expert width, P planes (2 for a
GLU: gate, up; else 1).
"""

from __future__ import annotations

import os

import torch
from foundry_moe_kernels import expert_products, permute
from foundry_moe_kernels.expert_products import Tokens
from torch import Tensor

from foundry_moe.ops import sparse_steps


def takes_hopper(device: torch.device, dtype: torch.dtype, width: int, hidden: int) -> bool:
    """Whether the Hopper kernels compute experts of these sizes: 16-bit floats, rows of 16 bytes.

    FOUNDRY_MOE_KERNELS=portable in the environment keeps to the kernels of any chip.
    """
    return (
        os.environ.get("FOUNDRY_MOE_KERNELS") != "portable"
        and dtype in (torch.float16, torch.bfloat16)
        and device.type == "cuda"
        and width * dtype.itemsize % 16 == 0
        and hidden * dtype.itemsize % 16 == 0
        and expert_products.descriptors.device_supported(device)
    )


def _planes(weights: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The weights where one tensor map spans them, which it does not where they lie too far apart: then copies."""
    if expert_products.descriptors.plane_stride(weights) is not None:
        return weights
    return tuple(torch.stack(weights))


def pack(offsets_E: Tensor, rows: int, hidden: int, hopper: bool) -> Tensor:
    """The table that all products of a layer share, int32: block rows for Hopper's kernels, otherwise the topology."""
    return expert_products.pack_rows(offsets_E, rows) if hopper else sparse_steps.pack(offsets_E, rows, hidden)


def packed_size(offsets_E: Tensor, rows: int, hidden: int, hopper: bool) -> int:
    """Integers of `pack`."""
    if hopper:
        return expert_products.packed_size(offsets_E.shape[0], rows)
    return sparse_steps.packed_size(offsets_E, rows, hidden)


def _weights(w1_EFD: Tensor, v1_EFD: Tensor | None) -> tuple[Tensor, ...]:
    return (w1_EFD,) if v1_EFD is None else (w1_EFD, v1_EFD)


def _tokens(x_TD: Tensor, source_R: Tensor, row_TK: Tensor, weights: tuple[Tensor, ...]) -> Tokens | None:
    """The rows of x for Hopper's products that gain by copying them themselves; None for others."""
    if expert_products.gathers(x_TD, weights[0].shape[1]):
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
    hopper: bool,
    activation: str,
) -> tuple[Tensor, Tensor]:
    """(z_PRF, h_RF): pre-activations and act(z[0]) (times z[1])."""
    weights = _weights(w1_EFD, v1_EFD)
    rows, hidden = source_R.shape[0], w1_EFD.shape[1]
    if rows == 0:
        return x_TD.new_empty(len(weights), 0, hidden), x_TD.new_empty(0, hidden)
    if not hopper:
        return sparse_steps.up(x_TD, weights, source_R, row_TK, offsets_E, packed, activation)
    ragged = expert_products.ragged_rows(offsets_E, rows, packed)
    tokens = _tokens(x_TD, source_R, row_TK, weights)
    x_RD = permute.permute(x_TD, row_TK, offsets_E, rows, zero_tail=False) if tokens is None else tokens
    w1_EFD, *rest = _planes(weights)
    return expert_products.up(x_RD, w1_EFD, rest[0] if rest else None, ragged, activation)


def down(
    h_RF: Tensor,
    w2_EDF: Tensor,
    weights_TK: Tensor | None,
    row_TK: Tensor,
    offsets_E: Tensor,
    packed: Tensor,
    hopper: bool,
) -> Tensor:
    """y_TD: the weighted sum of each token's rows of h·W2ᵀ."""
    rows = h_RF.shape[0]
    if rows == 0:
        return h_RF.new_zeros(row_TK.shape[0], w2_EDF.shape[1])
    if not hopper:
        return sparse_steps.down(h_RF, w2_EDF, weights_TK, row_TK, offsets_E, packed)
    ragged = expert_products.ragged_rows(offsets_E, rows, packed)
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
    hopper: bool,
    activation: str,
) -> tuple[Tensor, Tensor]:
    """Overwrites z_PRF by its gradient; (dw2_EDF, dweights_TK). Without weights the second is empty."""
    rows = z_PRF.shape[1]
    if rows == 0:
        return torch.zeros_like(w2_EDF), _like_weights(weights_TK, row_TK, dy_TD).zero_()
    if hopper:
        dy_RD = permute.permute(dy_TD, row_TK, offsets_E, rows, zero_tail=False)
        ragged = expert_products.ragged_rows(offsets_E, rows, packed)
        h_RF, dots = expert_products.down_backward_(dy_RD, w2_EDF, z_PRF, ragged, activation, weights_TK, source_R)
        dw2_EDF = expert_products.weight_gradient(dy_RD[None], h_RF, ragged)[0]
    else:
        dw2_EDF, dots = sparse_steps.down_backward_(
            dy_TD, z_PRF, w2_EDF, weights_TK, source_R, row_TK, offsets_E, packed, activation
        )
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
    hopper: bool,
    needs_dx: bool,
) -> tuple[Tensor, Tensor]:
    """(dx_TD, dw_PEFD): gradients of x (empty unless `needs_dx`) and, plane by plane, of W1 and V1."""
    weights = _weights(w1_EFD, v1_EFD)
    rows = dz_PRF.shape[1]
    experts, hidden, width = w1_EFD.shape
    dx_TD = torch.zeros_like(x_TD) if needs_dx and rows == 0 else x_TD.new_empty(0)
    if rows == 0:
        return dx_TD, w1_EFD.new_zeros(len(weights), experts, hidden, width)
    if not hopper:
        return sparse_steps.up_backward(dz_PRF, x_TD, weights, source_R, row_TK, offsets_E, packed, needs_dx)
    ragged = expert_products.ragged_rows(offsets_E, rows, packed)
    copied_RD = None
    if needs_dx:
        tokens = _tokens(x_TD, source_R, row_TK, weights)
        beside = None
        if tokens is not None and expert_products.copies(tokens):
            copied_RD = x_TD.new_empty(rows, width)
            beside = (tokens, copied_RD)
        dx_RD = expert_products.rows_product(dz_PRF, _planes(weights), ragged, transposed=False, beside=beside)
        dx_TD = permute.unpermute(dx_RD, None, row_TK)
        del dx_RD
    dw_PEFD = torch.empty(len(weights), experts, hidden, width, dtype=w1_EFD.dtype, device=w1_EFD.device)
    if copied_RD is not None:
        expert_products.weight_gradient(dz_PRF, copied_RD, ragged, out=dw_PEFD)
        return dx_TD, dw_PEFD
    for columns in sparse_steps.column_parts(rows, x_TD):
        x_RD = permute.permute(x_TD[:, columns], row_TK, offsets_E, rows, zero_tail=False)
        expert_products.weight_gradient(dz_PRF, x_RD, ragged, out=dw_PEFD[..., columns])
        del x_RD  # before the next part is copied
    return dx_TD, dw_PEFD
