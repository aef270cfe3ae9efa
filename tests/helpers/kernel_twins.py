"""Plain torch versions of the kernels, with which tests compare them, on any device and in any dtype.

They read loads on the host and loop over experts. Rows past the last expert's end are zeros in every result.

Shapes: T tokens, K choices, R rows sorted by expert, E experts, D model width, F expert width, Y planes (gate, up).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from foundry_moe_kernels.topology import Topology, topology_from_offsets
from torch import Tensor
from torch.nn import functional as F


def build_topology(loads_E: Tensor, num_rows: int, widths: list[int], block: int) -> Topology:
    """`topology_from_offsets` from tokens per expert."""
    return topology_from_offsets(loads_E.cumsum(0).int(), num_rows, widths, block)


def activate(z: Tensor, activation: str) -> Tensor:
    """Twin of `activations.activate`."""
    if activation == "relu2":
        return F.relu(z).square()
    if activation == "gelu_tanh":
        return F.gelu(z, approximate="tanh")
    if activation == "identity":
        return z
    if activation == "silu":
        return F.silu(z)
    return F.gelu(z) if activation == "gelu" else F.relu(z)


def activation_grad(z: Tensor, activation: str) -> Tensor:
    """Twin of the slope of `activations.activate_with_grad`."""
    if activation == "silu":
        s = torch.sigmoid(z)
        return s * (1 + z * (1 - s))
    if activation == "gelu":
        return 0.5 * (1 + torch.erf(z / math.sqrt(2))) + z * torch.exp(-z * z / 2) / math.sqrt(2 * math.pi)
    if activation == "gelu_tanh":
        c = math.sqrt(2 / math.pi)
        t = torch.tanh(c * (z + 0.044715 * z**3))
        return 0.5 * (1 + t) + 0.5 * z * (1 - t * t) * c * (1 + 3 * 0.044715 * z * z)
    if activation == "relu":
        return (z > 0).to(z.dtype)
    if activation == "relu2":
        return 2 * F.relu(z)
    return torch.ones_like(z)


def _spans(offsets_E: Tensor) -> Iterator[tuple[int, slice]]:
    start = 0
    for expert, end in enumerate(offsets_E.tolist()):
        yield expert, slice(start, end)
        start = end


def up(
    x_RD: Tensor, w1_EFD: Tensor, v1_EFD: Tensor | None, offsets_E: Tensor, activation: str
) -> tuple[Tensor, Tensor]:
    """Twin of `expert_products.up`."""
    weights = (w1_EFD,) if v1_EFD is None else (w1_EFD, v1_EFD)
    z_YRF = x_RD.new_zeros(len(weights), x_RD.shape[0], w1_EFD.shape[1])
    for expert, span in _spans(offsets_E):
        for plane, weight in enumerate(weights):
            z_YRF[plane, span] = x_RD[span] @ weight[expert].T
    return z_YRF, glu(z_YRF, activation)


def glu(z_YRF: Tensor, activation: str) -> Tensor:
    """act(gate) * up, or act(z) where there is one plane."""
    h_RF = activate(z_YRF[0], activation)
    return h_RF * z_YRF[1] if z_YRF.shape[0] == 2 else h_RF


def rows_product(a_YRK: Tensor, weights: tuple[Tensor, ...], offsets_E: Tensor, *, transposed: bool) -> Tensor:
    """Twin of `expert_products.rows_product`."""
    n = weights[0].shape[1 if transposed else 2]
    c_RN = a_YRK.new_zeros(a_YRK.shape[1], n)
    for expert, span in _spans(offsets_E):
        for plane, weight in enumerate(weights):
            c_RN[span] += a_YRK[plane, span] @ (weight[expert].T if transposed else weight[expert])
    return c_RN


def glu_backward(dh_RF: Tensor, z_YRF: Tensor, activation: str) -> Tensor:
    """Gradient of `glu` with respect to z."""
    slope_RF = activation_grad(z_YRF[0], activation)
    if z_YRF.shape[0] == 1:
        return (dh_RF * slope_RF)[None]
    return torch.stack([dh_RF * z_YRF[1] * slope_RF, dh_RF * activate(z_YRF[0], activation)])


def down_backward(
    dy_RD: Tensor,
    w2_EDF: Tensor,
    z_YRF: Tensor,
    offsets_E: Tensor,
    activation: str,
    weights_A: Tensor | None,
    source_R: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Twin of `expert_products.down_backward_`, but it leaves z alone: (dz, weighted h, dot(dy, y) of each row)."""
    dh_RF = rows_product(dy_RD[None], (w2_EDF,), offsets_E, transposed=False)
    h_RF = glu(z_YRF, activation)
    weight_R = torch.ones_like(dy_RD[:, 0])
    if weights_A is not None:
        weight_R = weights_A.reshape(-1)[source_R.clamp(min=0).long()].to(dy_RD.dtype)
    dz_YRF = glu_backward(dh_RF * weight_R[:, None], z_YRF, activation)
    return dz_YRF, h_RF * weight_R[:, None], (dh_RF * h_RF).sum(1)


def weight_gradient(a_YRM: Tensor, b_RN: Tensor, offsets_E: Tensor) -> Tensor:
    """Twin of `expert_products.weight_gradient`."""
    out = a_YRM.new_zeros(a_YRM.shape[0], offsets_E.shape[0], a_YRM.shape[2], b_RN.shape[1])
    for expert, span in _spans(offsets_E):
        out[:, expert] = a_YRM[:, span].transpose(1, 2) @ b_RN[span]
    return out


def permute(x_TD: Tensor, row_TK: Tensor) -> Tensor:
    """Twin of `permute.permute`, rows past the end zero."""
    tokens, choices = row_TK.shape
    x_RD = x_TD.new_zeros(tokens * choices, x_TD.shape[1])
    for k in range(choices):
        chosen_T = row_TK[:, k] >= 0
        x_RD[row_TK[chosen_T, k].long()] = x_TD[chosen_T]
    return x_RD


def unpermute(y_RD: Tensor, weights_TK: Tensor | None, row_TK: Tensor) -> Tensor:
    """Twin of `permute.unpermute`."""
    taken_TKD = y_RD[row_TK.clamp(min=0).long()].masked_fill((row_TK < 0)[..., None], 0)
    if weights_TK is not None:
        taken_TKD = taken_TKD * weights_TK[..., None].to(taken_TKD.dtype)
    return taken_TKD.sum(1)


def unpermute_backward(dy_TD: Tensor, y_RD: Tensor, weights_TK: Tensor, row_TK: Tensor) -> tuple[Tensor, Tensor]:
    """Twin of `permute.unpermute_backward`."""
    dy_RD = torch.zeros_like(y_RD)
    dweights_TK = torch.zeros_like(weights_TK)
    for k in range(row_TK.shape[1]):
        chosen_T = row_TK[:, k] >= 0
        row = row_TK[chosen_T, k].long()
        dy_RD[row] = dy_TD[chosen_T] * weights_TK[chosen_T, k, None].to(dy_TD.dtype)
        dweights_TK[chosen_T, k] = (dy_TD[chosen_T] * y_RD[row]).sum(1).to(weights_TK.dtype)
    return dy_RD, dweights_TK


def expand(values: Tensor, tokens_per_expert_E: Tensor, num_rows: int, widths: list[int]) -> Tensor:
    """The dense [R, C] matrix of block-sparse values: the truth of the format."""
    dense = values.new_zeros(num_rows, sum(widths))
    flat, row, column, at = values.reshape(-1), 0, 0, 0
    for load, width in zip(tokens_per_expert_E.tolist(), widths, strict=True):
        dense[row : row + load, column : column + width] = flat[at : at + load * width].view(load, width)
        row, column, at = row + load, column + width, at + load * width
    return dense


def sparsity(tokens_per_expert_E: Tensor, num_rows: int, widths: list[int]) -> Tensor:
    """Where the topology has values: a boolean [R, C]."""
    count = num_rows * max(widths)
    ones = torch.ones(count, device=tokens_per_expert_E.device)
    return expand(ones, tokens_per_expert_E, num_rows, widths) > 0


def plan_permute(experts_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Twin of `permute_plan.plan_permute`."""
    expert_A = experts_TK.reshape(-1).long()
    key_A = torch.where(expert_A >= 0, expert_A, num_experts)
    order_A = torch.sort(key_A, stable=True).indices
    loads_E = torch.bincount(key_A, minlength=num_experts + 1)[:num_experts]
    used = int(loads_E.sum())
    source_R = order_A.clone()
    source_R[used:] = -1
    row_A = torch.full_like(expert_A, -1)
    row_A[order_A[:used]] = torch.arange(used, device=expert_A.device)
    return tuple(t.int() for t in (experts_TK, loads_E, loads_E.cumsum(0), source_R, row_A.view_as(experts_TK)))  # type: ignore[return-value]


def spread(values_TK: Tensor, experts_TK: Tensor, num_experts: int) -> Tensor:
    """fp32 [T, E]: each value at its expert, zeros elsewhere; -1 is no expert."""
    out_TE = values_TK.new_zeros(experts_TK.shape[0], num_experts + 1, dtype=torch.float32)
    places_TK = torch.where(experts_TK >= 0, experts_TK, num_experts).long()
    return out_TE.scatter_(1, places_TK, values_TK.float())[:, :num_experts]


def gather_dots(dots: Tensor, row_TK: Tensor, dtype: torch.dtype) -> Tensor:
    """[T, K]: the sum over tiles of `dots` [tiles, R] at each choice's row; zero where there is no choice."""
    summed_R = dots.sum(0)
    return torch.where(row_TK >= 0, summed_R[row_TK.clamp(min=0).long()], 0.0).to(dtype)


def gather(x_TD: Tensor, source_R: Tensor, choices: int) -> Tensor:
    """x_RD: the token source // K of each row, zeros where source is -1."""
    token_R = source_R.clamp(min=0).long() // choices
    return torch.where((source_R >= 0)[:, None], x_TD[token_R], 0)
