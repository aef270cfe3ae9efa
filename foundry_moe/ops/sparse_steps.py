"""The four steps of an expert MLP on SDD, DSD and DDS over the hybrid CSR-COO topology, as plain functions. Any chip.

The first product reads the tokens of its rows where they lie. The weights' gradients read copies: gathered in their
inner loop, they took longer by more than the copy does (H100: 0.7 beside 0.2 ms at OLMoE's shape). Knows nothing of
autograd.

Shapes: T tokens, K choices, R rows sorted by expert, E experts, D model width, F expert width, P planes (2 for a
GLU: gate, up; else 1).
"""

from __future__ import annotations

import torch
from foundry_moe_kernels import load_class, permute, pointwise, products
from foundry_moe_kernels.sparse_tiles import BLOCK
from foundry_moe_kernels.topology import Topology, pack_topology, packed_topology_size, unpack_topology
from torch import Tensor

# Rows of x copied for the weights' gradient at a time: halves of the columns above this size. The copy is what the peak
# of the backward pass holds beside the gradients themselves.
COPY_BYTES = 128 * 2**20


def block_of(device: torch.device) -> int:
    """Rows of a block of the topology on this device."""
    return BLOCK if device.type == "cuda" else 16


def pack(offsets_E: Tensor, rows: int, hidden: int) -> Tensor:
    """The topology's tables, int32, for all products of a layer."""
    return pack_topology(offsets_E, rows, [hidden] * offsets_E.shape[0], block_of(offsets_E.device))


def packed_size(offsets_E: Tensor, rows: int, hidden: int) -> int:
    """Integers of `pack`."""
    return packed_topology_size(rows, [hidden] * offsets_E.shape[0], block_of(offsets_E.device))


def _topology(offsets_E: Tensor, rows: int, hidden: int, packed: Tensor) -> Topology:
    return unpack_topology(packed, rows, [hidden] * offsets_E.shape[0], block_of(offsets_E.device))


def allow_tf32() -> bool:
    """Whether fp32 products may round their operands, as torch's own would."""
    return torch.backends.cuda.matmul.allow_tf32


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
    topology = _topology(offsets_E, source_R.shape[0], weights[0].shape[1], packed)
    return products.sdd_act(
        x_TD, weights, topology, activation, source_R=source_R, choices=row_TK.shape[1], tf32=allow_tf32()
    )


def down(
    h_RF: Tensor, w2_EDF: Tensor, weights_TK: Tensor | None, row_TK: Tensor, offsets_E: Tensor, packed: Tensor
) -> Tensor:
    """y_TD: the weighted sum of each token's rows of h·W2ᵀ."""
    topology = _topology(offsets_E, h_RF.shape[0], w2_EDF.shape[2], packed)
    y_RD = products.dsd(h_RF, w2_EDF, topology, trans_b=True, tf32=allow_tf32(), zero_tail=False)
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
    """Overwrites z_PRF by its gradient; dw2_EDF and, given weights, fp32 [1, R]: the gradient of each row's weight."""
    topology = _topology(offsets_E, source_R.shape[0], w2_EDF.shape[2], packed)
    dy_RD = permute.permute(dy_TD, row_TK, offsets_E, source_R.shape[0], zero_tail=False)
    # dh, and then h in its place
    h_RF = products.sdd(dy_RD, w2_EDF, topology, tf32=allow_tf32(), zero_tail=False)
    dots = pointwise.activation_backward_(h_RF, z_PRF, offsets_E, activation, weights_TK, source_R)
    return products.dds(dy_RD, h_RF, topology, trans_a=True, stacked=True, tf32=allow_tf32()), dots


def column_parts(rows: int, x_TD: Tensor) -> list[slice]:
    """The columns of x whose rows are copied at a time."""
    width = x_TD.shape[1]
    parts = 2 if load_class.rows(rows) * width * x_TD.element_size() > COPY_BYTES and width % 512 == 0 else 1
    return [slice(part * width // parts, (part + 1) * width // parts) for part in range(parts)]


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
    topology = _topology(offsets_E, source_R.shape[0], weights[0].shape[1], packed)
    dx_TD = x_TD.new_empty(0)
    if needs_dx:
        dx_RD = products.dsd(tuple(dz_PRF), weights, topology, tf32=allow_tf32(), zero_tail=False)
        dx_TD = permute.unpermute(dx_RD, None, row_TK)
        del dx_RD
    dw_PEFD = torch.empty(len(weights), *weights[0].shape, dtype=x_TD.dtype, device=x_TD.device)
    for columns in column_parts(source_R.shape[0], x_TD):
        x_RD = permute.permute(x_TD[:, columns], row_TK, offsets_E, source_R.shape[0], zero_tail=False)
        for dz_RF, dw_EFD in zip(dz_PRF, dw_PEFD, strict=True):
            products.dsd(dz_RF, x_RD, topology, trans_s=True, stacked=True, tf32=allow_tf32(), out=dw_EFD[..., columns])
        del x_RD  # before the next part is copied
    return dx_TD, dw_PEFD
