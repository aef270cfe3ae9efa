"""The four steps of an expert MLP on Triton kernels: up and down, forward and backward, each on the faster kernels.

`hopper`: ragged grouped kernels (`ragged_steps`); otherwise SDD, DSD and DDS over the hybrid CSR-COO topology
(`sparse_steps`), on any chip. Answers for no rows at all. Knows nothing of autograd.

Shapes: T tokens, K choices, R rows sorted by expert, E experts, D model width, F expert width, P planes (2 for a
GLU: gate, up; else 1).
"""

from __future__ import annotations

import functools
import os

import torch
import triton
from foundry_moe_kernels import expert_products, permute
from torch import Tensor

from foundry_moe.ops import ragged_steps, sparse_steps


def takes_hopper(device: torch.device, dtype: torch.dtype, width: int, hidden: int) -> bool:
    """Whether the Hopper kernels compute experts of these sizes: see `why_portable`."""
    return why_portable(device, dtype, width, hidden) is None


def why_portable(
    device: torch.device,
    dtype: torch.dtype,
    width: int,
    hidden: int,
    capability: tuple[int, int] | None = None,
) -> str | None:
    """What keeps the Hopper kernels from experts of these sizes, in words; None where they compute them.

    FOUNDRY_MOE_KERNELS=portable in the environment keeps to the kernels of any chip.

    Args:
        width, hidden: D and F.
        capability: of a CUDA device that need not be here; default: the device's own.
    """
    return _why_portable(device, dtype, width, hidden, capability, os.environ.get("FOUNDRY_MOE_KERNELS"))


@functools.lru_cache(maxsize=256)
def _why_portable(
    device: torch.device,
    dtype: torch.dtype,
    width: int,
    hidden: int,
    capability: tuple[int, int] | None,
    kernels: str | None,
) -> str | None:
    if kernels == "portable":
        return "FOUNDRY_MOE_KERNELS=portable is set"
    if device.type != "cuda":
        return "there is no GPU"
    major, minor = capability or torch.cuda.get_device_capability(device)
    if not expert_products.descriptors.capability_supported((major, minor)):
        return (
            "the Hopper kernels want sm_90 with Triton 3.4 or later, and this is "
            f"sm_{major}{minor} with Triton {triton.__version__}"
        )
    if dtype not in (torch.float16, torch.bfloat16):
        return f"the Hopper kernels want bf16 or fp16, and this is {str(dtype).removeprefix('torch.')}"
    if width * dtype.itemsize % 16 or hidden * dtype.itemsize % 16:
        return f"the Hopper kernels want widths that 8 divides, and these are d_model {width}, experts of {hidden}"
    return None


def pack(offsets_E: Tensor, rows: int, hidden: int, hopper: bool) -> Tensor:
    """The table that all products of a layer share, int32: block rows for Hopper's kernels, otherwise the topology."""
    return ragged_steps.pack(offsets_E, rows) if hopper else sparse_steps.pack(offsets_E, rows, hidden)


def packed_size(offsets_E: Tensor, rows: int, hidden: int, hopper: bool) -> int:
    """Integers of `pack`."""
    if hopper:
        return ragged_steps.packed_size(offsets_E, rows)
    return sparse_steps.packed_size(offsets_E, rows, hidden)


def _weights(w1_EFD: Tensor, v1_EFD: Tensor | None) -> tuple[Tensor, ...]:
    return (w1_EFD,) if v1_EFD is None else (w1_EFD, v1_EFD)


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
    steps = ragged_steps if hopper else sparse_steps
    return steps.up(x_TD, weights, source_R, row_TK, offsets_E, packed, activation)


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
    if h_RF.shape[0] == 0:
        return h_RF.new_zeros(row_TK.shape[0], w2_EDF.shape[1])
    steps = ragged_steps if hopper else sparse_steps
    return steps.down(h_RF, w2_EDF, weights_TK, row_TK, offsets_E, packed)


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
    steps = ragged_steps if hopper else sparse_steps
    dw2_EDF, dots = steps.down_backward_(
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
    if dz_PRF.shape[1] == 0:
        return torch.zeros_like(x_TD) if needs_dx else x_TD.new_empty(0), w1_EFD.new_zeros(len(weights), *w1_EFD.shape)
    steps = ragged_steps if hopper else sparse_steps
    return steps.up_backward(dz_PRF, x_TD, weights, source_R, row_TK, offsets_E, packed, needs_dx)
