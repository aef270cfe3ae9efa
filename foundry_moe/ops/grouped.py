"""The expert MLP on torch's grouped product: the cross-check of the block-sparse kernels.

Shapes: R rows, D model width, F expert width, E experts.
"""

import torch
from torch import Tensor

from foundry_moe.ops.activations import POINTWISE
from foundry_moe.ops.permute import PermutePlan


def is_available(device: torch.device, dtype: torch.dtype, capability: tuple[int, int] | None = None) -> bool:
    """Whether `torch._grouped_mm` computes this dtype on this device (bf16 on CUDA of capability 9.0, torch 2.8 up).

    `capability`: of a CUDA device that need not be here.
    """
    return (
        hasattr(torch, "_grouped_mm")
        and dtype is torch.bfloat16
        and device.type == "cuda"
        and (capability or torch.cuda.get_device_capability(device)) >= (9, 0)
    )


def grouped_mlp(
    x_RD: Tensor, plan: PermutePlan, w1_EFD: Tensor, v1_EFD: Tensor | None, w2_EDF: Tensor, activation: str
) -> Tensor:
    """y_RD [R, D]; rows past the end are undefined."""
    act = POINTWISE[activation]
    offsets_E = plan.offsets_E
    h_RF = act(torch._grouped_mm(x_RD, w1_EFD.transpose(1, 2), offs=offsets_E))
    if v1_EFD is not None:
        h_RF = h_RF * torch._grouped_mm(x_RD, v1_EFD.transpose(1, 2), offs=offsets_E)
    return torch._grouped_mm(h_RF, w2_EDF.transpose(1, 2), offs=offsets_E)
